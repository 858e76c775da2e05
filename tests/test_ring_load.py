"""ring_load on every backend: the keys of prefill chunks, out of rings and new records, are what
window_attention needs to give what window_prefill gives."""

import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from cases import GQA_PREFILL_CASES, PINNED_PREFILL_CASES, Case, format_of, options_of
from helpers import (
    Guarded,
    encoded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_kv,
    random_values,
    store,
    to_backend,
)
from kernels_on_host import launchers

import ringslab as rs
from ringslab.rawkernels.cuda.prefill_scratch import scratch_bytes
from ringslab.rawkernels.operations import operation

CASES = (
    *GQA_PREFILL_CASES,
    *(case for case in PINNED_PREFILL_CASES if case.kv_heads),
    Case("gqa_96", ((300, 20), (0, 3)), 40, 47, heads=3, head_dim=96, kv_heads=3),
    Case("odd_bytes", ((30, 9), (3, 2)), 16, 22, heads=1, head_dim=32, kv_heads=1),
    Case("planar_odd", ((30, 9),), 16, 22, heads=1, head_dim=32, kv_heads=1, plane_order="planar"),
    Case("fp16_40", ((30, 9),), 16, 22, heads=3, head_dim=40, kv_heads=3, record_type="fp16"),
    Case("many", tuple((7 * i, i % 4) for i in range(40)), 9, 12, 1, head_dim=32, kv_heads=1),
)


class Chunks:
    """A prefill batch of a case: `records` of the whole sequences, those of the chunks not yet in
    the slab; every third sequence of more than three is padding."""

    def __init__(self, case, seed=0):
        rng = np.random.default_rng(seed)
        self.fmt = format_of(case)
        self.layout = make_layout(self.fmt, case.ring_len, sink_tokens=case.sink_tokens)
        slots = len(case.sequences) + 1
        self.slab = poisoned_slab(self.layout, slots)
        states = i32(rng.permutation(slots)[: len(case.sequences)])
        if len(states) > 3:
            states[::3] = -1
        self.wanted, new = [], []
        for state, (first, count) in zip(states.tolist(), case.sequences, strict=True):
            kv = random_kv(rng, first + count, self.fmt)
            records = encoded(kv, self.fmt)
            new.append(records[first:])
            if state < 0:
                continue
            some = tuple(part[:first] for part in kv)
            store(self.slab, self.layout, 1, some, state, range(first))
            if count:
                recent = range(max(first - case.window + 1, min(case.sink_tokens, first)), first)
                pinned = range(min(case.sink_tokens, first))
                self.wanted.append(records[[*pinned, *recent, *range(first, first + count)]])
        counts = i32([count for _, count in case.sequences])
        ends = i32([first + count for first, count in case.sequences])
        rings = {"window": case.window, "ring_len": case.ring_len, "sink_tokens": case.sink_tokens}
        self.plan = rs.plan_prefill(states, counts, ends, **rings)
        self.records = np.concatenate([np.zeros((0, self.fmt.record_bytes), np.uint8), *new])

    def joint(self):
        joint = np.full(
            (self.plan.history_rows + len(self.records), self.fmt.record_bytes), 0xFF, np.uint8
        )
        operations("reference").load_history(self.slab, self.layout, 1, self.plan, joint)
        joint[self.plan.history_rows :] = self.records
        return joint


def bits_of(records, fmt):
    """Bits of K and V in records, by the public codec; MXFP8 numbers are exact in bf16."""
    found = []
    for part in np.split(records, 2, axis=1):
        part = np.ascontiguousarray(part)
        if fmt.type == "mxfp8":
            split = fmt.part_value_bytes
            exact = rs.dequantize_mxfp8(part[:, :split].copy(), part[:, split:].copy())
            part = (exact.view(np.uint32) >> 16).astype(np.uint16)
        found.append(part.view(np.uint16).reshape(len(part), fmt.num_kv_heads, fmt.head_dim))
    return found


def load(run, backend, chunks, spare=3):
    """cu_seqlens_k, k and v, host, of a load into poison between sentinels."""
    plan, fmt = chunks.plan, chunks.fmt
    dtype = np.float16 if fmt.type == "fp16" else np.uint16
    rows = (plan.most_keys + spare, fmt.num_kv_heads, fmt.head_dim)
    ends = Guarded((plan.num_seqs + 1,), np.int32, backend)
    k, v = Guarded(rows, dtype, backend), Guarded(rows, dtype, backend)
    slab, records = to_backend(chunks.slab, backend), to_backend(chunks.records, backend)
    arrays = (ends.array, k.array, v.array)
    run(slab, chunks.layout, 1, to_backend(plan, backend), records, *arrays)
    return ends.host(), k.host(), v.host()


def check(run, backend, chunks):
    """Ends and rows are the wanted ones, what is behind keeps its poison."""
    ends, k, v = load(run, backend, chunks)
    lengths = iter([len(part) for part in chunks.wanted])
    counts = np.diff(chunks.plan.cu_seqlens_q)
    sees = (counts > 0) & (chunks.plan.state_ids >= 0)
    assert np.diff(ends).tolist() == [next(lengths) if any_ else 0 for any_ in sees]
    assert ends[0] == 0
    none = np.zeros((0, chunks.fmt.record_bytes), np.uint8)
    wanted = bits_of(np.concatenate([none, *chunks.wanted]), chunks.fmt)
    for found, rows in zip((k, v), wanted, strict=True):
        np.testing.assert_array_equal(found.view(np.uint16)[: ends[-1]], rows)
        assert (found.view(np.uint16)[ends[-1] :] == 0xFFFF).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_visible_positions_in_order(backend, case):
    """Each sequence's rows are its visible history (pinned positions first) and its chunk; young,
    wrapped, empty and padding sequences in one batch."""
    check(operations(backend).ring_load, backend, Chunks(case))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("case", [case for case in CASES if case.window < 1000], ids=str)
def test_kernel_on_the_host(tmp_path, monkeypatch, case):
    """The CUDA kernel by its launcher, played on the CPU; and its variant over the joint buffer:
    the same rows, and a last sequence without keys that takes the tokens of no sequence."""
    run = launchers(monkeypatch, tmp_path)["ring_load"]
    chunks = Chunks(case)
    check(run, "cpu", chunks)
    plan, fmt = chunks.plan, chunks.fmt
    if plan.num_seqs == 0:
        return
    ends, k, v = load(run, "cpu", chunks)
    dtype = k.dtype
    more = replace(plan, positions=np.concatenate([plan.positions, i32([0, 0])]))
    k_ends, q_ends = (Guarded((plan.num_seqs + 2,), np.int32, "cpu") for _ in range(2))
    k_found, v_found = (Guarded(k.shape, dtype, "cpu") for _ in range(2))
    module = import_module("ringslab.rawkernels.cuda.ring_load")
    arrays = (q_ends.array, k_ends.array, k_found.array, v_found.array)
    module.joint_load(chunks.joint(), more, fmt, *arrays, None)
    np.testing.assert_array_equal(k_ends.host(), [*ends, ends[-1]])
    np.testing.assert_array_equal(q_ends.host(), [*plan.cu_seqlens_q, plan.num_tokens + 2])
    for found, wanted in ((k_found, k), (v_found, v)):
        np.testing.assert_array_equal(found.host().view(np.uint16), wanted.view(np.uint16))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_kernel_skips_what_is_out_of_range(tmp_path, monkeypatch):
    """A state id of no slot: its history is zeros, its new records and the other sequence are as
    they should be. Too few rows of k and v: nothing behind them is written."""
    run = launchers(monkeypatch, tmp_path)["ring_load"]
    case = Case("two", ((30, 3), (30, 4)), 16, 22, heads=1, head_dim=32, kv_heads=1)
    chunks = Chunks(case)
    ends, wanted, _ = load(run, "cpu", chunks)
    chunks.plan.state_ids[0] = 2**31 - 1
    _, found, _ = load(run, "cpu", chunks)
    assert not found[:15].any()
    np.testing.assert_array_equal(found[15:], wanted[15:])
    assert ends.tolist() == [0, 18, 37]


@pytest.mark.parametrize("case", [case for case in CASES if case.window < 1000], ids=str)
def test_window_attention_over_it_is_window_prefill(case):
    """By the references: outputs and lse of window_attention over what ring_load gives are those of
    window_prefill over the joint buffer, to 1e-12, padding and pinned positions included."""
    chunks = Chunks(case, seed=3)
    plan, fmt, rng = chunks.plan, chunks.fmt, np.random.default_rng(4)
    q = random_values(rng, (plan.num_tokens, case.heads, case.head_dim), case.record_type)
    options = {"softcap": 0.0, **options_of(case, rng)}
    del options["rope_out"]
    results = [(np.empty(q.shape), np.empty(q.shape[:2], np.float32)) for _ in range(2)]
    run = operation("reference", "window_prefill")
    run(q, chunks.joint(), plan, fmt, *results[0], **options)
    ends, k, v = load(operation("reference", "ring_load"), "cpu", chunks, spare=0)
    windowed = {"window": case.window, "sink_tokens": case.sink_tokens}
    run = operation("reference", "window_attention")
    run(q, k, v, plan.cu_seqlens_q, ends, *results[1], **windowed, **options)
    np.testing.assert_allclose(results[1][0], results[0][0], atol=1e-12)
    np.testing.assert_array_equal(results[1][1], results[0][1])


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("case", [case for case in CASES if case.window < 1000], ids=str)
def test_cuda_window_prefill_by_its_parts(tmp_path, monkeypatch, case):
    """The CUDA launcher of window_prefill over K and V apart: its kernel that decodes the joint
    buffer, played on the CPU, then the reference of window_attention, give the reference's
    window_prefill, padding sequences and padding tokens behind the last sequence included. It works
    in the bytes that scratch_bytes states, of a buffer between sentinels."""
    launchers(monkeypatch, tmp_path)
    launcher = import_module("ringslab.rawkernels.cuda.window_prefill")
    for name in ("check_current_device", "check_alignment"):
        monkeypatch.setattr(launcher, name, lambda *_: None)
    module = import_module("ringslab.rawkernels.cuda.window_prefill_gqa")
    monkeypatch.setattr(module, "window_attention", operation("reference", "window_attention"))
    chunks = Chunks(case, seed=5)
    fmt, rng = chunks.fmt, np.random.default_rng(6)
    padded = {"positions": [0, 0], "pivots": [[0] * 4] * 2, "pinned_pivots": [[0] * 4] * 2}
    parts = {name: getattr(chunks.plan, name) for name in padded}
    more = {
        name: np.concatenate([part, i32(padded[name])])
        for name, part in parts.items()
        if part is not None
    }
    plan = replace(chunks.plan, **more)
    q = random_values(rng, (plan.num_tokens, case.heads, case.head_dim), case.record_type)
    joint = np.concatenate([chunks.joint(), np.full((2, fmt.record_bytes), 0xFF, np.uint8)])
    options = {"softcap": 0.0, **options_of(case, rng)}
    del options["rope_out"]
    results = [(np.empty(q.shape), np.empty(q.shape[:2], np.float32)) for _ in range(2)]
    run = operation("reference", "window_prefill")
    run(q, joint, plan, fmt, *results[0], **options)
    size = scratch_bytes(plan.num_seqs, plan.most_keys, fmt)
    scratch = Guarded((size,), np.uint8, "cpu")
    arrays = (q, joint, plan, fmt, *results[1])
    launcher.window_prefill(*arrays, **options, scratch=scratch.array)
    scratch.host()
    with pytest.raises(rs.errors.ArgumentError, match=rf"{size - 1} but scratch_bytes .*={size}"):
        launcher.window_prefill(*arrays, **options, scratch=scratch.array[:-1])
    np.testing.assert_allclose(results[1][0], results[0][0], atol=1e-12)
    np.testing.assert_array_equal(results[1][1], results[0][1])
    assert np.isneginf(results[1][1][-2:]).all()


def test_public_entry_and_its_errors():
    """The call returns its outputs; a latent ring, a plan of another ring, short k, a state id past
    the slab are refused with both numbers."""
    case = GQA_PREFILL_CASES[2]
    chunks = Chunks(case)
    plan, fmt = chunks.plan, chunks.fmt
    rows = (plan.most_keys, fmt.num_kv_heads, fmt.head_dim)
    k, v, ends = np.zeros(rows, np.uint16), np.zeros(rows, np.uint16), np.zeros(3, np.int32)

    def call(slab=chunks.slab, layout=chunks.layout, plan=plan, records=chunks.records, k=k, v=v):
        return rs.ring_load(slab, layout, 1, plan, records, ends, k, v)

    assert call()[0] is ends
    assert k.any()

    def refused(pattern, error=rs.errors.ArgumentError, **changed):
        with pytest.raises(error, match=pattern):
            call(**changed)

    latent = make_layout(rs.make_record_format("mxfp8", case.head_dim), case.ring_len)
    refused("is latent", layout=latent, slab=poisoned_slab(latent, 2))
    other = rs.plan_prefill([0, 1], [20, 6], [70, 9], window=case.window, ring_len=150)
    refused("ring_len=150", plan=other)
    refused(rf"k\.shape\[0\]={plan.most_keys - 1} .*{plan.most_keys}", k=k[:-1], v=v[:-1])
    refused(r"records\.shape\[0\]", records=chunks.records[:-1])
    refused("float16 but must be bfloat16", k=k.view(np.float16), v=v.view(np.float16))
    bad = replace(plan, state_ids=i32([0, 7]))
    refused(r"state_ids\[1\]=7", plan=bad)
