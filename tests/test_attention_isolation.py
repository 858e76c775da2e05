"""What a query token's output depends on: its own keys and nothing else, bit for bit."""

import numpy as np
import pytest
from cases import DECODE_CASES, PREFILL_CASES, decode_inputs, prefill_inputs
from helpers import (
    bf16,
    check_decode,
    check_prefill,
    encoded,
    from_bf16,
    i32,
    make_layout,
    poisoned_slab,
    random_bf16,
    record_format,
    run_decode,
    run_prefill,
    store,
)

import ringslab as rs

DIM = 32
FORMATS = {"mxfp8": record_format(DIM), "bf16": record_format(DIM, "bf16")}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def test_s07_n04_ragged_batch(backend):
    """Verify lengths 3, 1, 0, 2: offsets 0, 3, 4, 4, 6; each row equals that of its own call, bit
    for bit, wherever it stands in the batch."""
    rng = np.random.default_rng(5)
    fmt = FORMATS["mxfp8"]
    layout = make_layout(fmt, 13, num_layers=1)
    slab = poisoned_slab(layout, 4)
    firsts, counts = [20, 3, 9, 7], [3, 1, 0, 2]
    for state_id, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        stored = np.arange(max(0, first - 8), first + count)
        store(slab, layout, 0, random_bf16(rng, (len(stored), DIM)), state_id, stored)
    q = random_bf16(rng, (6, 3, DIM), 2.0)
    state_ids = np.repeat(np.arange(4), counts)
    positions = np.concatenate([f + np.arange(c) for f, c in zip(firsts, counts, strict=True)])
    cu = i32([0, 3, 4, 4, 6])
    sizes = {"window": 8, "ring_len": 13}
    plan = rs.plan_decode(i32(state_ids), i32(positions), cu_seqlens_q=cu, **sizes)
    assert plan.cu_seqlens_q.tolist() == [0, 3, 4, 4, 6]
    together = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=0.3)
    for t in range(6):
        alone = rs.plan_decode(i32(state_ids[t : t + 1]), i32(positions[t : t + 1]), **sizes)
        out, lse = run_decode(backend, q[t : t + 1], slab, layout, 0, alone, softmax_scale=0.3)
        np.testing.assert_array_equal(out[0], together[0][t])
        np.testing.assert_array_equal(lse[0], together[1][t])


@pytest.mark.parametrize("case", DECODE_CASES[7:11], ids=str)
def test_rows_do_not_depend_on_the_batch(backend, case):
    """Sequences in reverse order, and the first one alone: the same bits."""
    q, slab, layout, layer, plan, options = decode_inputs(case)
    whole = run_decode(backend, q, slab, layout, layer, plan, **options)
    bounds = plan.cu_seqlens_q.tolist()
    orders = [list(range(plan.num_seqs))[::-1], [0]]
    for order in orders:
        tokens = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in order])
        cu = i32(np.cumsum([0] + [bounds[i + 1] - bounds[i] for i in order]))
        part = rs.plan_decode(
            plan.state_ids[tokens],
            plan.positions[tokens],
            window=plan.window,
            ring_len=plan.ring_len,
            cu_seqlens_q=cu,
        )
        found = run_decode(backend, q[tokens], slab, layout, layer, part, **options)
        np.testing.assert_array_equal(found[0], whole[0][tokens])
        np.testing.assert_array_equal(found[1], whole[1][tokens])


def test_invisible_rows_never_leak(backend, fmt):
    """Rows outside a query's window hold NaN or infinities (the slab is 0xFF, rejected drafts and
    old positions are inf and NaN): outputs equal those over zeros, bit for bit."""
    layout = make_layout(fmt, 10, num_layers=1)
    rng = np.random.default_rng(9)
    kv = random_bf16(rng, (5, DIM))
    q = random_bf16(rng, (2, 3, DIM), 2.0)
    plan = rs.plan_decode([1, 1], [13, 12], window=4, ring_len=10)
    results = []
    for hidden in (np.nan, np.inf, -np.inf, 0.0):
        slab = poisoned_slab(layout, 3) if hidden else np.zeros(3 * layout.slot_bytes, np.uint8)
        old = np.full((10, DIM), hidden, np.float32)
        store(slab, layout, 0, bf16(old), 1, range(10))
        store(slab, layout, 0, kv, 1, range(9, 14))
        store(slab, layout, 0, bf16(old[:2]), 1, [14, 15])
        results.append(run_decode(backend, q, slab, layout, 0, plan, softmax_scale=0.5))
    for out, lse in results[:-1]:
        np.testing.assert_array_equal(out, results[-1][0])
        np.testing.assert_array_equal(lse, results[-1][1])


def test_nan_never_leaves_its_sequence(backend):
    """A NaN key in one sequence of three, and a NaN query in another token: those rows are NaN in
    the reference's places, all others as without them, bit for bit."""
    fmt = FORMATS["mxfp8"]
    layout = make_layout(fmt, 8, num_layers=1)
    rng = np.random.default_rng(12)
    kv = [random_bf16(rng, (5, DIM)) for _ in range(3)]
    q = random_bf16(rng, (6, 3, DIM), 2.0)
    plan = rs.plan_decode(i32([0, 0, 1, 1, 2, 2]), i32([3, 4] * 3), window=4, ring_len=8)

    def run(bad):
        slab = poisoned_slab(layout, 3)
        for state_id in range(3):
            keys = kv[state_id].copy()
            if bad and state_id == 1:
                keys[4, 7] = 0x7FC0
            store(slab, layout, 0, keys, state_id, range(5))
        queries = q.copy()
        if bad:
            queries[5, 1, 3] = 0x7FC0
        return check_decode(backend, queries, slab, layout, 0, plan, softmax_scale=0.5)

    clean, bad = run(False), run(True)
    numbers = from_bf16(bad[0])
    assert np.isnan(numbers[3]).all()  # position 4 of sequence 1 sees the NaN key
    assert np.isnan(numbers[5, 1]).all()
    for t, head in ((0, ...), (1, ...), (2, ...), (4, ...), (5, 0), (5, 2)):
        np.testing.assert_array_equal(bad[0][t, head], clean[0][t, head])
        np.testing.assert_array_equal(bad[1][t, head], clean[1][t, head])


def test_two_runs_give_equal_bits(backend):
    """The largest case twice."""
    case = next(c for c in DECODE_CASES if c.name == "head_dim_512")
    q, slab, layout, layer, plan, options = decode_inputs(case)
    first = run_decode(backend, q, slab, layout, layer, plan, **options)
    second = run_decode(backend, q, slab, layout, layer, plan, **options)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("case", [c for c in PREFILL_CASES if len(c.sequences) > 1][:5], ids=str)
def test_prefill_rows_do_not_depend_on_the_batch(backend, case):
    """Each sequence of a batch prefilled alone: the same bits."""
    q, records, plan, fmt, options = prefill_inputs(case)
    whole = run_prefill(backend, q, records, plan, fmt, **options)
    bounds, window = plan.cu_seqlens_q.tolist(), plan.window
    for i in range(plan.num_seqs):
        tokens = slice(bounds[i], bounds[i + 1])
        part = rs.plan_prefill(
            plan.state_ids[i : i + 1],
            i32([bounds[i + 1] - bounds[i]]),
            plan.seqlens_k[i : i + 1],
            window=window,
            ring_len=plan.ring_len,
        )
        new = records[plan.history_rows :][tokens]
        joint = np.concatenate([records[i * window : (i + 1) * window], new])
        found = run_prefill(backend, q[tokens], joint, part, fmt, **options)
        np.testing.assert_array_equal(found[0], whole[0][tokens])
        np.testing.assert_array_equal(found[1], whole[1][tokens])


def test_prefill_invisible_rows_never_leak(backend, fmt):
    """Window 4, 2 cached, 9 new tokens of which the later ones are NaN: queries before them equal
    those over zeros, bit for bit; so do queries past them by a window; rows behind the joint
    buffer's last one may hold anything."""
    rng = np.random.default_rng(9)
    plan = rs.plan_prefill([0], [9], [11], window=4, ring_len=12)
    q = random_bf16(rng, (9, 3, DIM), 2.0)
    kv = random_bf16(rng, (15, DIM))
    results = []
    for hidden in (0x7FC0, 0x7F80, 0xFF80, 0):
        values = kv.copy()
        values[[0, 1, 7, 13, 14]] = hidden  # missing history, the new token 3, rows behind the end
        records = encoded(values, fmt)
        results.append(run_prefill(backend, q, records, plan, fmt, softmax_scale=0.5))
    clean = [0, 1, 2, 7, 8]  # token 3 is seen by 3..6
    for out, lse in results[:-1]:
        np.testing.assert_array_equal(out[clean], results[-1][0][clean])
        np.testing.assert_array_equal(lse[clean], results[-1][1][clean])
    assert np.isnan(from_bf16(results[0][0][3:7])).all()


def test_prefill_nan_never_leaves_its_sequence(backend):
    """Three sequences of 7 tokens; token 3 of the second is NaN: the other two keep their bits."""
    fmt = FORMATS["mxfp8"]
    rng = np.random.default_rng(3)
    plan = rs.plan_prefill([0, 1, 2], [7] * 3, [7] * 3, window=4, ring_len=9)
    q, kv = random_bf16(rng, (21, 2, DIM), 2.0), random_bf16(rng, (21, DIM))
    outs = []
    for bad in (0, 0x7FC0):
        kv[10] = bad
        records = np.concatenate([np.zeros((12, fmt.record_bytes), np.uint8), encoded(kv, fmt)])
        outs.append(check_prefill(backend, q, records, plan, fmt, softmax_scale=0.5)[0])
    others = [*range(7), 7, 8, 9, *range(14, 21)]
    np.testing.assert_array_equal(outs[0][others], outs[1][others])
    assert np.isnan(from_bf16(outs[1][10:14])).all()
