"""Rings whose first positions are pinned (sink_tokens): plans, stores and history find every
visible position, and nothing that has been overwritten."""

import numpy as np
import pytest
from helpers import Guarded, i32, make_layout, operations, poisoned_slab, record_format, to_backend
from kernels_on_host import launchers

import ringslab as rs
from ringslab.layouts.rings import ring_index

FORMAT = record_format(32, "bf16")


def visible(position, window, sink_tokens):
    """Positions that a query sees, ascending, from the definition."""
    return [p for p in range(position + 1) if p > position - window or p < sink_tokens]


def test_decode_plan_of_a_small_ring():
    """State 1, two pinned positions, ring of 6 (4 turn), window 3: position 0 sees one pinned key;
    1 two; 3 adds rows 8, 9; 10 has keys 8, 9, 10 at ring indices 4, 5 and, wrapped, 2."""
    plan = rs.plan_decode([1] * 4 + [-1], [0, 1, 3, 10, 0], window=3, ring_len=6, sink_tokens=2)
    assert plan.num_pinned.tolist() == [1, 2, 2, 2, 0]
    assert plan.offset_len.tolist() == [[6, 0], [6, 0], [8, 2], [10, 3], [0, 0]]
    assert plan.index.tolist() == [
        [6, -1, -1, -1, -1],
        [6, 7, -1, -1, -1],
        [6, 7, 8, 9, -1],
        [6, 7, 10, 11, 8],
        [-1] * 5,
    ]
    assert rs.plan_decode([0], [3], window=3, ring_len=6).num_pinned is None


@pytest.mark.parametrize(("window", "sink_tokens", "tokens"), [(1, 1, 1), (3, 2, 2), (5, 4, 3)])
def test_decode_plan_rows(window, sink_tokens, tokens):
    """Every position up to three turns of the smallest ring, in steps of up to 3 tokens: the rows
    of `index`, and those that offset_len and num_pinned say, are the visible positions' in order.
    One record less is refused."""
    ring_len = rs.required_ring_len(window, tokens, sink_tokens)
    for first in range(3 * ring_len):
        positions = i32(range(first, first + tokens))
        cu = i32([0, tokens])
        plan = rs.plan_decode(
            [2] * tokens,
            positions,
            window=window,
            ring_len=ring_len,
            cu_seqlens_q=cu,
            sink_tokens=sink_tokens,
        )
        for t, p in enumerate(positions.tolist()):
            seen = visible(p, window, sink_tokens)
            rows = [2 * ring_len + ring_index(s, ring_len, sink_tokens) for s in seen]
            assert [row for row in plan.index[t].tolist() if row >= 0] == rows
            offset, length = plan.offset_len[t].tolist()
            turn = ring_len - sink_tokens
            start = offset % ring_len - sink_tokens
            moved = [2 * ring_len + sink_tokens + (start + i) % turn for i in range(length)]
            pinned = [2 * ring_len + i for i in range(plan.num_pinned[t])]
            assert pinned + moved == rows
            assert offset // ring_len == 2
    with pytest.raises(rs.errors.PlanError, match="ring_len"):
        rs.plan_decode([0], [50], window=window, ring_len=window, sink_tokens=sink_tokens)


def test_refusals():
    """Missing positions beside pinned ones, a negative count, a ring that pins all its records, and
    a plan of a ring with another count."""
    with pytest.raises(rs.errors.PlanError, match="swa_valid_start=3 and sink_tokens=2"):
        rs.plan_decode([0], [9], window=3, ring_len=6, sink_tokens=2, swa_valid_start=3)
    with pytest.raises(rs.errors.PlanError, match="sink_tokens=-1"):
        rs.plan_prefill([0], [1], [9], window=3, ring_len=6, sink_tokens=-1)
    with pytest.raises(rs.errors.LayoutError, match=r"sink_tokens=6 but must be 0 \.\. .* 5"):
        make_layout(FORMAT, 6, sink_tokens=6)
    plan = rs.plan_prefill([0], [1], [9], window=3, ring_len=6)
    layout = make_layout(FORMAT, 6, sink_tokens=2)
    with pytest.raises(rs.errors.ArgumentError, match=r"plan\.sink_tokens=0 .*sink_tokens=2"):
        rs.load_history(poisoned_slab(layout, 1), layout, 0, plan)


def marked(positions):
    """Records that say their own position, twice over."""
    records = np.zeros((len(positions), FORMAT.record_bytes), np.uint8)
    records.view(np.int32)[:] = np.asarray(positions, np.int32)[:, None]
    return records


def stored(run, backend, layout, slots, calls):
    """The slab after store_records of `calls`, each (state id, first position, count)."""
    slab = Guarded((slots * layout.slot_bytes,), np.uint8, backend)
    for state_id, first, count in calls:
        positions = i32(range(first, first + count))
        ids = np.full(count, state_id, np.int32)
        arrays = [to_backend(x, backend) for x in (marked(positions), ids, positions)]
        run(slab.array, layout, 1, *arrays)
    return slab.host()


CALLS = [(1, 0, 30), (0, 0, 1), (0, 1, 5), (2, 7, 3)]  # a chunk of several turns, steps, a wrap


def check_store(run, backend):
    """Ring of 7, two pinned: after CALLS each ring index holds the newest position that lives
    there, and what no position has reached keeps its poison."""
    layout = make_layout(FORMAT, 7, sink_tokens=2)
    slab = stored(run, backend, layout, 3, CALLS)
    wanted = poisoned_slab(layout, 3)
    view = layout.view(wanted, 1)
    for state_id, first, count in CALLS:
        for record in marked(range(first, first + count)):
            index = ring_index(int(record.view(np.int32)[0]), 7, 2)
            view[state_id, index, 0] = record
    np.testing.assert_array_equal(slab, wanted)


def test_store_keeps_pinned_positions(backend):
    """On every backend, by `check_store`."""
    check_store(operations(backend).store_records, backend)


def test_store_kernel_on_the_host(tmp_path, monkeypatch):
    """The CUDA kernel of store_records, played on the CPU, by `check_store`."""
    check_store(launchers(monkeypatch, tmp_path)["store_records"], "cpu")


@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 1), (3, 2), (5, 4), (2, 6)])
def test_joint_buffer(backend, window, sink_tokens):
    """Chunks of 1, 3 and 9 tokens at every start up to 25, several in one batch with padding: the
    rows of pinned_pivots and then pivots hold the visible positions, in order."""
    ring_len = window + sink_tokens + 2
    layout = make_layout(FORMAT, ring_len, sink_tokens=sink_tokens)
    starts = i32(range(26))
    counts = i32([(1, 3, 9)[i % 3] for i in starts])
    slab = poisoned_slab(layout, 26)
    for i in starts.tolist():
        positions = i32(range(i))
        ids = np.full(i, i, np.int32)
        operations("reference").store_records(slab, layout, 1, marked(positions), ids, positions)
    states = starts.copy()
    states[4] = -1
    plan = rs.plan_prefill(
        states, counts, starts + counts, window=window, ring_len=ring_len, sink_tokens=sink_tokens
    )
    joint = Guarded((plan.history_rows + plan.num_tokens, FORMAT.record_bytes), np.uint8, backend)
    operations(backend).load_history(
        to_backend(slab, backend), layout, 1, to_backend(plan, backend), joint.array
    )
    records = joint.host()
    records[plan.history_rows :] = marked(plan.positions)
    found = records.view(np.int32)[:, 0]
    for t in range(plan.num_tokens):
        rows = []
        for pivots in (plan.pinned_pivots[t], plan.pivots[t]):
            for start, length in pivots.reshape(2, 2).tolist():
                rows += range(start, start + length)
        padding = plan.token_state_ids[t] < 0
        seen = [] if padding else visible(int(plan.positions[t]), window, sink_tokens)
        assert found[rows].tolist() == seen
