"""load_history on every backend: the window before a chunk, gathered out of the rings."""

import numpy as np
import pytest
from helpers import (
    Guarded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    record_format,
    to_backend,
    to_host,
)

import ringslab as rs

FORMATS = {
    "interleaved": record_format(64),
    "planar": record_format(64, plane_order="planar"),
    "bf16": record_format(64, "bf16"),
}


def load(backend, slab, layout, layer, plan, extra_rows=3):
    """The joint buffer after load_history, host; the rows past the history are in it."""
    rows = plan.history_rows + extra_rows
    out = Guarded((rows, layout.ring(layer).record_bytes), np.uint8, backend)
    operations(backend).load_history(
        to_backend(slab, backend), layout, layer, to_backend(plan, backend), out.array
    )
    return out.host()


def filled_slab(layout, num_slots, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, num_slots * layout.slot_bytes, dtype=np.uint8)


def expected_history(slab, layout, layer, plan, valid_start=0):
    """Independent model: position by position, from the layout's views."""
    values, scales = layout.planes(slab, layer)
    out = np.full((plan.history_rows, layout.ring(layer).record_bytes), 0, np.uint8)
    for i, state_id in enumerate(plan.state_ids):
        seqlen_q = plan.cu_seqlens_q[i + 1] - plan.cu_seqlens_q[i]
        q_start = plan.seqlens_k[i] - seqlen_q
        for row in range(plan.window):
            position = q_start - plan.window + row
            if position >= valid_start:
                index = position % plan.ring_len
                record = np.concatenate([values[state_id, index, 0], scales[state_id, index, 0]])
                out[i * plan.window + row] = record
    return out


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("valid_start", [0, 2])
def test_history_of_a_mixed_batch(backend, fmt, valid_start):
    """Window 5, ring 9: new prompt (all zeros), one cached token, less than a window, exactly full
    ring, wraps, an empty sequence, and three segments (zeros, up to the wrap, from the wrap on).
    Rows past the history keep their poison."""
    layout = make_layout(FORMATS[fmt], 9)
    cached = [valid_start, 3, 4, 9, 11, 12, 20, 1000]
    seqlens_q = i32([4, 1, 0, 2, 3, 1, 30, 1])
    state_ids = i32([0, 3, 1, 2, 5, 4, 7, 6])
    plan = rs.plan_prefill(
        state_ids,
        seqlens_q,
        i32(cached) + seqlens_q,
        window=5,
        ring_len=9,
        swa_valid_start=valid_start,
    )
    slab = filled_slab(layout, 8)
    found = load(backend, slab, layout, 1, plan)
    wanted = expected_history(slab, layout, 1, plan, valid_start)
    np.testing.assert_array_equal(found[: plan.history_rows], wanted)
    assert (found[plan.history_rows :] == 0xFF).all()


def test_three_segments_of_one_sequence(backend):
    """Window 8, ring 9, 11 cached, valid from 5: positions 3, 4 are zeros, 5..8 are rows 5..8,
    9 and 10 are rows 0 and 1. Three segments."""
    layout = make_layout(FORMATS["interleaved"], 9)
    plan = rs.plan_prefill([1], [2], [13], window=8, ring_len=9, swa_valid_start=5)
    assert plan.segments.tolist() == [[-1, 0, 2], [14, 2, 4], [9, 6, 2]]
    slab = filled_slab(layout, 2)
    found = load(backend, slab, layout, 0, plan)
    rows = layout.view(slab, 0)[1, :, 0]
    np.testing.assert_array_equal(found[2:6], rows[5:9])
    np.testing.assert_array_equal(found[6:8], rows[0:2])
    assert not found[:2].any()


def test_r14_history_across_the_wrap(backend):
    """2,048 cached, ring 134, window 128: rows 44..133 (90), then 0..37 (38); nothing of the next
    state, which is poisoned."""
    layout = make_layout(FORMATS["interleaved"], 134, num_layers=1)
    slab = filled_slab(layout, 2)
    slab[layout.slot_bytes :] = 0xFF
    plan = rs.plan_prefill([0], [1], [2049], window=128, ring_len=134)
    found = load(backend, slab, layout, 0, plan, extra_rows=0)
    rows = layout.view(slab, 0)[0, :, 0]
    np.testing.assert_array_equal(found, np.concatenate([rows[44:134], rows[0:38]]))


def test_new_prompt_is_zeros(backend):
    """q_start 0: one zero segment of `window` rows, whatever the slot holds."""
    layout = make_layout(FORMATS["interleaved"], 9)
    plan = rs.plan_prefill([0], [3], [3], window=5, ring_len=9)
    assert not load(backend, poisoned_slab(layout, 1), layout, 0, plan)[:5].any()


def test_no_sequences(backend):
    """An empty batch touches nothing."""
    layout = make_layout(FORMATS["interleaved"], 9)
    plan = rs.plan_prefill(i32([]), i32([]), i32([]), window=5, ring_len=9)
    assert (load(backend, poisoned_slab(layout, 1), layout, 0, plan) == 0xFF).all()


def test_public_entry(fast_backend):
    """Without `out` the history alone is allocated; with it the joint buffer may be passed."""
    layout = make_layout(FORMATS["interleaved"], 9)
    slab = to_backend(filled_slab(layout, 2), fast_backend)
    plan = to_backend(rs.plan_prefill([1], [2], [40], window=5, ring_len=9), fast_backend)
    alone = rs.load_history(slab, layout, 1, plan)
    assert alone.shape == (5, 66)
    joint = to_backend(np.zeros((7, 66), np.uint8), fast_backend)
    assert rs.load_history(slab, layout, 1, plan, out=joint) is joint
    np.testing.assert_array_equal(to_host(joint)[:5], to_host(alone))


def test_refuses_wrong_arguments():
    """A plan for another ring, too small an `out`, a state id past the slab."""
    layout = make_layout(FORMATS["interleaved"], 9)
    slab = filled_slab(layout, 2)
    plan = rs.plan_prefill([1], [2], [40], window=5, ring_len=9)
    with pytest.raises(rs.errors.ArgumentError, match=r"out\.shape\[0\]=4"):
        rs.load_history(slab, layout, 0, plan, out=np.zeros((4, 66), np.uint8))
    other = rs.plan_prefill([1], [2], [40], window=5, ring_len=10)
    with pytest.raises(rs.errors.ArgumentError, match=r"ring_len=10 .*ring_len=9"):
        rs.load_history(slab, layout, 0, other)
    beyond = rs.plan_prefill([2], [2], [40], window=5, ring_len=9)
    with pytest.raises(rs.errors.ArgumentError, match="segment sources"):
        rs.load_history(slab, layout, 0, beyond)
