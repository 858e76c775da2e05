"""The Hopper kernel of window_prefill: what the compiler made of it, and on a GPU the float64
reference, the bits of decode, and what must not change them."""

import dataclasses

import numpy as np
import pytest
from helpers import (
    encoded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    store,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.layouts.errors import ArgumentError
from ringslab.layouts.plans import PrefillPlan
from ringslab.layouts.rope import Rope
from ringslab.rawkernels.cuda import window_prefill_sm90 as launcher
from ringslab.rawkernels.reference.bound import assert_within_bound, expected_prefill

DIM = 512
FORMAT = record_format(DIM)
SCALE = DIM**-0.5
# (tokens in this batch, tokens after it) of each sequence; the second batch splits in every way.
BATCHES = {
    "new prompt": [(300, 300)],
    "history": [(140, 2188)],
    "one token": [(1, 1)],
    "ragged": [(1, 1), (7, 7), (0, 50), (130, 130), (133, 500), (1, 129), (64, 10_064)],
    "one token each": [(1, n) for n in (1, 2, 127, 128, 129, 134, 135, 1000)],
}


@dataclasses.dataclass
class Case:
    """Inputs of one launch on the host. Records that no token sees are 0xFF, which is NaN."""

    q: np.ndarray
    records: np.ndarray
    plan: PrefillPlan
    options: dict


def case(lengths, heads=64, window=128, ring_len=134, sink=True, rope=None, codes=None, seed=0):
    rng = np.random.default_rng(seed)
    tokens = [q for q, _ in lengths]
    plan = rs.plan_prefill(
        list(range(len(lengths))), tokens, [k for _, k in lengths], window=window, ring_len=ring_len
    )
    total = plan.history_rows + sum(tokens)
    records = encoded(random_bf16(rng, (total, DIM)), FORMAT)
    if codes is not None:
        records[:, DIM:] = rng.integers(*codes, (total, DIM // 32), dtype=np.uint8)
    seen = np.zeros(total, bool)
    for start0, length0, start1, length1 in plan.pivots:
        seen[start0 : start0 + length0] = True
        seen[start1 : start1 + length1] = True
    records[~seen] = 0xFF
    sinks = rng.standard_normal(heads).astype(np.float32) if sink else None
    options = {"softmax_scale": SCALE, "sink": sinks, "rope_out": rope}
    return Case(random_bf16(rng, (sum(tokens), heads, DIM)), records, plan, options)


def launch(c, bounds=None, **extra):
    """Outputs and lse of the Hopper kernel, over poison; `bounds` on the device in place of the
    plan's cu_seqlens_q."""
    out = to_backend(np.full(c.q.shape, 0x7FC1, np.uint16), "cuda")
    lse = to_backend(np.full(c.q.shape[:2], np.nan, np.float32), "cuda")
    arrays = [to_backend(x, "cuda") for x in (c.q, c.records, c.plan)]
    if bounds is not None:
        arrays[2] = dataclasses.replace(arrays[2], cu_seqlens_q=bounds)
    options = {**c.options, "sink": to_backend(c.options["sink"], "cuda")}
    launcher.launch(*arrays, out, lse, **options, **extra)
    return to_host(out), to_host(lse)


def check(c, name=""):
    out, lse = launch(c)
    some = np.unique(np.linspace(0, len(out) - 1, min(len(out), 150)).astype(int))
    plan = dataclasses.replace(c.plan, positions=c.plan.positions[some], pivots=c.plan.pivots[some])
    expected = expected_prefill(c.q[some], c.records, plan, FORMAT, **c.options)
    assert_within_bound(out[some], lse[some], expected, name)
    assert not (out == 0x7FC1).any()
    return out, lse


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_within_the_bound(name, heads):
    """Every shape of batch with 64 and 128 heads; unseen records are NaN."""
    check(case(BATCHES[name], heads), name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("window", "ring_len"),
    [(1, 6), (2, 2), (63, 68), (64, 64), (127, 134), (128, 128), (128, 133), (128, 136)],
)
def test_windows_within_the_bound(window, ring_len):
    """Rings as short as the window, where each token waits for the one before, and longer ones."""
    check(case([(200, 200), (77, 1000)], window=window, ring_len=ring_len))


@pytest.mark.gpu
@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_inverse_rotation(pairing):
    """The output turned back at the query's position, both pairings."""
    check(case([(150, 5000), (40, 40)], rope=Rope(10_000.0, 64, pairing)), pairing)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [(0, 5), (100, 141), (134, 136), (0, 221)])
def test_scale_codes(codes):
    """Scale codes at both ends, and across 134, from where one bf16 factor does not do. The softmax
    scale takes the largest of them out again, so that scores stay near 1."""
    c = case([(100, 300)], codes=codes)
    c.options["softmax_scale"] = SCALE * 2.0 ** (120 - codes[1])
    check(c, str(codes))


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_cut():
    """Ragged batch: 1, 7, 100 or all thread blocks give equal bits, twice, and so does a sequence
    that runs alone."""
    c = case(BATCHES["ragged"], rope=Rope(10_000.0, 64, "adjacent"))
    out, lse = launch(c)
    for blocks in (1, 7, 100, None):
        again = launch(c, num_blocks=blocks)
        assert np.array_equal(again[0], out)
        assert np.array_equal(again[1], lse)

    seq, window = 4, c.plan.window
    first, last = c.plan.cu_seqlens_q[seq : seq + 2]
    rows = np.r_[seq * window : (seq + 1) * window]
    new = np.r_[first:last] + c.plan.history_rows
    plan = rs.plan_prefill([0], [last - first], [500], window=window, ring_len=134)
    alone = Case(c.q[first:last], c.records[np.r_[rows, new]], plan, c.options)
    assert np.array_equal(launch(alone)[0], out[first:last])


@pytest.mark.gpu
def test_padding_behind_the_last_sequence():
    """37 tokens more than the sequences have, and bounds that are followed by zeros: the sequences'
    bits are those without padding, padding gives 0 and -inf, and nothing is read past the bounds
    (a search that went on would not end)."""
    c = case([(140, 2188), (30, 30)])
    out, lse = launch(c)
    seqlens = ([0, 1], [140, 30], [2188, 30])
    plan = rs.plan_prefill(*seqlens, window=128, ring_len=134, num_tokens=207)
    bounds = to_backend(i32([*plan.cu_seqlens_q, *[0] * 61]), "cuda")
    records = np.concatenate([c.records, np.full((37, c.records.shape[1]), 0xFF, np.uint8)])
    q = np.concatenate([c.q, np.full((37, *c.q.shape[1:]), 0x3F80, np.uint16)])
    padded = Case(q, records, plan, c.options)
    for blocks in (1, 9, None):
        more, more_lse = launch(padded, bounds=bounds[:3], num_blocks=blocks)
        assert np.array_equal(more[:170], out)
        assert np.array_equal(more_lse[:170], lse)
        assert not more[170:].any()
        assert (more_lse[170:] == -np.inf).all()


@pytest.mark.gpu
def test_bits_equal_those_of_decode():
    """The last 6 tokens of a 300-token chunk after 900, in one decode step over the ring that holds
    the same records: equal bits, whatever the kernels."""
    rng = np.random.default_rng(5)
    position, drafts = 1200, 6
    keys = random_bf16(rng, (position, DIM))
    layout = make_layout(FORMAT, 134, num_layers=1)
    slab = poisoned_slab(layout, 2)
    store(slab, layout, 0, keys, 1, range(position))

    plan = rs.plan_prefill([1], [300], [position], window=128, ring_len=134)
    records = np.empty((128 + 300, FORMAT.record_bytes), np.uint8)
    records[:] = encoded(keys[position - 428 :], FORMAT)
    q = random_bf16(rng, (300, 64, DIM))
    options = {"softmax_scale": SCALE, "sink": None, "rope_out": Rope(10_000.0, 64, "adjacent")}
    prefill = launch(Case(q, records, plan, options))

    state_ids, positions = [1] * drafts, range(position - drafts, position)
    cu_seqlens = to_backend(i32([0, drafts]), "cuda")
    step = rs.plan_decode(
        to_backend(i32(state_ids), "cuda"),
        to_backend(i32(list(positions)), "cuda"),
        window=128,
        ring_len=134,
        cu_seqlens_q=cu_seqlens,
    )
    out, lse = rs.window_decode(
        to_backend(q[-drafts:], "cuda"), to_backend(slab, "cuda"), layout, 0, step, **options
    )
    assert np.array_equal(to_host(out), prefill[0][-drafts:])
    assert np.array_equal(to_host(lse), prefill[1][-drafts:])


@pytest.mark.gpu
def test_a_nan_stays_in_its_sequence():
    """A NaN record in the middle of the first sequence: its own later tokens that see it are NaN,
    those that do not and the other sequence are as without it."""
    c = case([(300, 300), (50, 700)])
    clean = launch(c)[0]
    at = c.plan.history_rows + 100
    c.records[at, 40] = 0x7F
    out = launch(c, num_blocks=2)[0]
    blind = np.r_[0:100, 228:350]
    assert np.array_equal(out[blind], clean[blind])
    assert ((out[100:228] & 0x7FFF) > 0x7F80).all()


@pytest.mark.gpu
def test_a_variant_that_cannot_run_is_refused():
    """Heads that are no multiple of 64 run as portable only, and the message says so."""
    c = case([(3, 3)], heads=32)
    operation = operations("cuda").window_prefill
    arrays = [to_backend(x, "cuda") for x in (c.q, c.records)]
    plan = rs.plan_prefill(
        to_backend(i32([0]), "cuda"),
        to_backend(i32([3]), "cuda"),
        to_backend(i32([3]), "cuda"),
        window=128,
        ring_len=134,
    )
    out = to_backend(np.empty(c.q.shape, np.uint16), "cuda")
    lse = to_backend(np.empty(c.q.shape[:2], np.float32), "cuda")
    with pytest.raises(ArgumentError, match="'portable' alone serves"):
        operation(*arrays, plan, FORMAT, out, lse, softmax_scale=SCALE, variant="sm_90a")
