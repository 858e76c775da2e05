"""The same tokens by any road: one prefill, chunks, decode steps, rejected drafts, reused slots."""

import functools

import numpy as np
import pytest
from helpers import random_bf16, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_driver import (
    SequenceDriver,
    equal_chunks,
    expected_whole,
    join,
    make_inputs,
)

from ringslab.rawkernels.reference.bound import assert_within_bound

LENGTHS = [1, 50, 127, 128, 129, 134, 135, 1000]
CHUNKS = [1, 7, 128, 133, 134, 135, 300]


@functools.cache
def expected(n):
    return expected_whole(make_inputs(n))


def assert_same_outputs(backend, found, wanted):
    """Bit for bit on the host backends; on a GPU the bound holds instead (checked by the caller):
    bits there may depend on the kernel that a shape selects."""
    if backend != "cuda":
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])


@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_and_steps_agree(backend, n):
    """n tokens at once, in chunks of 1, 7, 128, 133, 134, 135 and 300, and in n decode steps: the
    same slab bytes, and outputs within the bound of the reference over the whole sequence."""
    inputs = make_inputs(n)
    driver = SequenceDriver(backend, inputs)
    whole = driver.prefill(0, n)
    assert_within_bound(*whole, expected(n), f"one prefill of {n}")
    slab = to_host(driver.slab)
    for size in CHUNKS:
        driver = SequenceDriver(backend, inputs)
        found = driver.chunks(equal_chunks(n, size))
        np.testing.assert_array_equal(to_host(driver.slab), slab, err_msg=f"chunks of {size}")
        assert_within_bound(*found, expected(n), f"chunks of {size}")
        assert_same_outputs(backend, found, whole)
    driver = SequenceDriver(backend, inputs)
    found = driver.steps(0, n)
    np.testing.assert_array_equal(to_host(driver.slab), slab, err_msg="decode steps")
    assert_within_bound(*found, expected(n), "decode steps")
    assert_same_outputs(backend, found, whole)


def test_planar_ring_agrees(backend):
    """150 tokens in chunks of 40 and 20 decode steps over a planar ring: within the bound, and the
    same outputs as over an interleaved one, bit for bit."""
    inputs = make_inputs(170)
    found = []
    for plane_order in ("interleaved", "planar"):
        driver = SequenceDriver(backend, inputs, plane_order=plane_order)
        found.append(join([driver.chunks(equal_chunks(150, 40)), driver.steps(150, 170)]))
        assert_within_bound(*found[-1], expected(170), plane_order)
    np.testing.assert_array_equal(found[0][0], found[1][0])


def test_five_rejected_drafts_in_a_row(backend):
    """After 262 tokens, five steps of one token and five drafts, all drafts rejected, at positions
    262..272 where the ring of 134 wraps (268 is row 0): the first token of each step equals that of
    a run that never drafted; so do the steps that come after."""
    inputs = make_inputs(290)
    plain, drafting = (SequenceDriver(backend, inputs) for _ in range(2))
    for driver in (plain, drafting):
        driver.prefill(0, 262)
    rng = np.random.default_rng(99)
    kept = []
    for p in range(262, 267):
        kv = np.concatenate([inputs.kv[p : p + 1], random_bf16(rng, (5, 32), 3.0)])
        out, lse = drafting.decode(p, 6, kv)
        kept.append((out[:1], lse[:1]))
    found = join([*kept, drafting.steps(267, 290)])
    wanted = plain.steps(262, 290)
    assert_same_outputs(backend, found, wanted)
    whole = expected(290)
    tail = type(whole)(whole.out[262:], whole.rounded[262:], whole.lse[262:])
    assert_within_bound(*found, tail, "drafting")
    assert_within_bound(*wanted, tail, "plain")
    np.testing.assert_array_equal(to_host(plain.slab), to_host(drafting.slab))


@pytest.mark.parametrize("accepted", [1, 3, 5])
def test_accepted_drafts_equal_single_steps(backend, accepted):
    """Steps of six tokens of which `accepted` drafts are right: the kept outputs equal those of
    single steps, over two laps of the ring."""
    n = 150 + 24 * (accepted + 1)
    inputs = make_inputs(n + 6)
    driver = SequenceDriver(backend, inputs)
    driver.prefill(0, 150)
    rng = np.random.default_rng(accepted)
    kept, p = [], 150
    while p < n:
        kv = random_bf16(rng, (6, 32), 3.0)
        kv[: accepted + 1] = inputs.kv[p : p + accepted + 1]
        out, lse = driver.decode(p, 6, kv)
        kept.append((out[: accepted + 1], lse[: accepted + 1]))
        p += accepted + 1
    single = SequenceDriver(backend, inputs)
    single.prefill(0, 150)
    wanted = single.steps(150, n)
    whole = expected(n + 6)
    part = type(whole)(whole.out[150:n], whole.rounded[150:n], whole.lse[150:n])
    assert_within_bound(*join(kept), part, "accepted drafts")
    assert_same_outputs(backend, join(kept), wanted)


def test_reused_slot_sees_only_its_own_keys(backend):
    """A sequence of 400 tokens ends; another one of 140 takes its slot, by a prefill of 9 and 131
    decode steps: outputs equal those in a fresh slab of 0xFF, bit for bit."""
    old, new = make_inputs(400, seed=1), make_inputs(140, seed=2)
    used, fresh = SequenceDriver(backend, old), SequenceDriver(backend, new)
    used.prefill(0, 400)
    used.inputs = new
    runs = [join([driver.prefill(0, 9), driver.steps(9, 140)]) for driver in (used, fresh)]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert_within_bound(*runs[0], expected_whole(new), "reused slot")


@settings(max_examples=25)
@given(
    parts=st.lists(st.tuples(st.sampled_from(["prefill", "step"]), st.integers(1, 17)), max_size=8),
    window=st.integers(1, 9),
    spare=st.integers(0, 7),
)
def test_any_mixture_of_chunks_and_steps(parts, window, spare):
    """Chunks and steps (of at most spare + 1 tokens) in any order, windows 1..9, rings from the
    smallest allowed one on: the slab and every output equal those of one prefill, bit for bit."""
    steps = spare + 1
    ring_len = window + spare
    n = 1 + sum(count if kind == "prefill" else min(count, steps) for kind, count in parts)
    inputs = make_inputs(n)
    driver = SequenceDriver("cpu", inputs, window, ring_len)
    found, p = [driver.prefill(0, 1)], 1
    for kind, count in parts:
        count = count if kind == "prefill" else min(count, steps)
        found.append(driver.prefill(p, count) if kind == "prefill" else driver.decode(p, count))
        p += count
    whole = SequenceDriver("cpu", inputs, window, ring_len)
    wanted = whole.prefill(0, n)
    np.testing.assert_array_equal(join(found)[0], wanted[0])
    np.testing.assert_array_equal(join(found)[1], wanted[1])
    np.testing.assert_array_equal(driver.slab, whole.slab)


def test_windowed_equals_unwindowed_on_the_last_keys(backend):
    """60 tokens with window 9, a prompt of 51 and then 9 more: the last row equals that of window
    128 where only the last 9 tokens are valid (swa_valid_start 51), bit for bit."""
    inputs = make_inputs(60)
    windowed = SequenceDriver(backend, inputs, 9, 14)
    windowed.prefill(0, 51)
    wide = SequenceDriver(backend, inputs)
    wide.sizes["swa_valid_start"] = 51
    found, wanted = wide.prefill(51, 9), windowed.prefill(51, 9)
    np.testing.assert_array_equal(found[0][8], wanted[0][8])
    np.testing.assert_array_equal(found[1][8], wanted[1][8])
