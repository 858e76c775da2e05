"""Prefill plans against worked values, the public bug cases, and the reference's loops."""

import numpy as np
import pytest
from plan_cases import assert_same_prefill, fill_prefill, random_prefill

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION
from ringslab.rawkernels.reference.plan_prefill import plan_prefill as reference

V41 = {"window": 128, "ring_len": 134}


def keys_of(plan, lengths_q, lengths_k, rings):
    """Values that each query reads, by carrying out the plan. `rings` maps a row of the ring tensor
    to its value; the new records hold their own positions."""
    joint = np.full(plan.history_rows + plan.num_tokens, np.nan)
    for source, destination, rows in plan.segments[: plan.num_segments[0]]:
        for i in range(rows):
            joint[destination + i] = 0.0 if source < 0 else rings[source + i]
    joint[plan.history_rows :] = plan.positions
    keys = []
    for a, a_len, b, b_len in plan.pivots:
        keys.append([*joint[a : a + a_len], *joint[b : b + b_len]])
    return keys


def test_r14_history_across_the_wrap():
    """2,048 cached, ring 134: positions 1,920..2,047 are ring indices 44..133 (90 rows), then 0..37
    (38 rows)."""
    plan = rs.plan_prefill([0], [300], [2348], **V41)
    assert plan.segments.tolist() == [[44, 0, 90], [0, 90, 38]]
    assert plan.num_segments.tolist() == [2]
    assert rs.plan_prefill([5], [1], [2049], **V41).segments.tolist() == [
        [5 * 134 + 44, 0, 90],
        [5 * 134, 90, 38],
    ]


def test_new_prompt_is_one_zero_segment():
    """q_start 0: 128 zero rows, and queries see 1, 2, .. 128 new records."""
    plan = rs.plan_prefill([7], [300], [300], **V41)
    assert plan.segments.tolist() == [[-1, 0, 128]]
    assert plan.pivots[:, 1].tolist() == [0] * 300
    assert plan.pivots[:, 3].tolist() == [min(j + 1, 128) for j in range(300)]


def test_pivots_of_the_design():
    """2,048 cached and 300 new: query 0 is (1, 127, 128, 1), query 200 is (128, 0, 201, 128)."""
    plan = rs.plan_prefill([3], [300], [2348], **V41)
    assert plan.pivots[0].tolist() == [1, 127, 128, 1]
    assert plan.pivots[200].tolist() == [128, 0, 201, 128]
    assert plan.positions.tolist() == list(range(2048, 2348))
    assert plan.token_state_ids.tolist() == [3] * 300
    assert plan.cu_seqlens_q.tolist() == [0, 300]
    assert plan.history_rows == 128
    for name in ("segments", "num_segments", "pivots", "positions", "token_state_ids"):
        assert getattr(plan, name).dtype == np.int32


def test_three_segments_when_young_and_valid_start_meet_the_wrap():
    """W 8, R 8, q_start 10, valid start 4: history 2..9 has two zero rows, then 4..7 in rows 4..7,
    then 8 and 9 in rows 0 and 1."""
    plan = rs.plan_prefill([1], [1], [11], window=8, ring_len=8, swa_valid_start=4)
    assert plan.segments.tolist() == [[-1, 0, 2], [12, 2, 4], [8, 6, 2]]


def test_m11_m12_every_row_of_a_long_prefill_has_keys():
    """n = 10, W 4, one call: 1, 2, 3, then 4 keys in each of 10 rows."""
    plan = rs.plan_prefill([0], [10], [10], window=4, ring_len=6)
    assert (plan.pivots[:, 1] + plan.pivots[:, 3]).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert [keys[-1] for keys in keys_of(plan, [10], [10], {})] == list(range(10))


def test_m04_r05_chunk_sees_its_history():
    """Three queries at 7, 8, 9 on 10 keys, W 4: 5.5, 6.5, 7.5. W = R = 8 and a chunk of 3 from 10:
    the first sees 3..10, 6.5."""
    plan = rs.plan_prefill([0], [3], [10], window=4, ring_len=6)
    rings = {p % 6: p for p in range(7)}
    assert [np.mean(keys) for keys in keys_of(plan, [3], [10], rings)] == [5.5, 6.5, 7.5]
    plan = rs.plan_prefill([0], [3], [13], window=8, ring_len=8)
    rings = {p % 8: p for p in range(10)}
    assert np.mean(keys_of(plan, [3], [13], rings)[0]) == 6.5


def test_r02_chunk_longer_than_the_ring():
    """W 4, R 8, chunk 8..15 after 0..7: query 8 sees 5, 6, 7, 8 (6.5), read before the store."""
    plan = rs.plan_prefill([0], [8], [16], window=4, ring_len=8)
    assert keys_of(plan, [8], [16], {p % 8: p for p in range(8)})[0] == [5, 6, 7, 8]


def test_n04_empty_sequences():
    """Lengths 2, 0, 1: offsets 0, 2, 2, 3, tokens of states 5, 5, 7; the empty sequence has its
    window of history rows too. Lengths 0, 0, 0: no token."""
    plan = rs.plan_prefill([5, 6, 7], [2, 0, 1], [2, 4, 1], window=4, ring_len=6)
    assert plan.cu_seqlens_q.tolist() == [0, 2, 2, 3]
    assert plan.token_state_ids.tolist() == [5, 5, 7]
    assert plan.history_rows == 12
    assert plan.segments.tolist() == [[-1, 0, 4], [36, 4, 4], [-1, 8, 4]]
    assert plan.pivots.tolist() == [[4, 0, 12, 1], [4, 0, 12, 2], [12, 0, 14, 1]]
    empty = rs.plan_prefill([5, 6, 7], [0] * 3, [0] * 3, window=4, ring_len=6)
    assert (empty.num_tokens, empty.num_seqs, empty.max_seqlen_q) == (0, 3, 0)
    assert empty.pivots.shape == (0, 4)
    nothing = rs.plan_prefill([], [], [], window=4, ring_len=6)
    assert nothing.segments.shape == (0, 3)
    assert nothing.num_segments.tolist() == [0]
    assert nothing.cu_seqlens_q.tolist() == [0]


def test_padded_sequence():
    """State id -1: zero history, no keys, nothing to store; capacity beyond T is padding too."""
    plan = rs.plan_prefill([-1, 2], [2, 1], [9, 9], window=4, ring_len=6, num_tokens=5)
    assert plan.segments[0].tolist() == [-1, 0, 4]
    assert plan.pivots[:2].tolist() == [[0] * 4] * 2
    assert plan.token_state_ids.tolist() == [-1, -1, 2, -1, -1]
    assert plan.positions.tolist() == [7, 8, 8, 0, 0]
    assert plan.pivots[3:].tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("valid", [0, 3, 5, 8, 10])
def test_valid_start_clamps_what_is_seen(valid):
    """W 6, q_start 10, 8 new: query at p sees max(p - 5, v) .. p, and rows below v are zeros."""
    plan = rs.plan_prefill([0], [8], [18], window=6, ring_len=8, swa_valid_start=valid)
    rings = {p % 8: p for p in range(10)}
    for p, keys in zip(range(10, 18), keys_of(plan, [8], [18], rings), strict=True):
        assert keys == list(range(max(p - 5, valid), p + 1))
    zeros = sum(rows for source, _, rows in plan.segments if source < 0)
    assert zeros == max(0, valid - 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlens_q": [-1, 5]}, r"seqlens_q\[0\]=-1"),
        ({"seqlens_k": [-1, 5]}, r"seqlens_k\[0\]=-1"),
        ({"seqlens_k": [5, 4]}, r"seqlens_k\[1\]=4 is below seqlens_q\[1\]=5"),
        ({"seqlens_k": [5, MAX_POSITION + 2]}, r"seqlens_k\[1\]=2147483648"),
        ({"swa_valid_start": -1}, r"swa_valid_start\[0\]=-1"),
        ({"swa_valid_start": [0, 6]}, r"swa_valid_start\[1\]=6 is past q_start=5"),
        ({"swa_valid_start": 1}, r"swa_valid_start\[0\]=1 is past q_start=0"),
        ({"swa_valid_start": [0, 0, 0]}, "swa_valid_start has 3 values for 2 sequences"),
        ({"state_ids": [0, -2]}, r"state_ids\[1\]=-2"),
        ({"state_ids": [0]}, "seqlens_q has 2 values for 1 state_ids"),
        ({"seqlens_k": [5.0, 10.0]}, "seqlens_k.dtype=float64"),
        ({"window": 0}, "window=0"),
        ({"window": 9}, "ring_len=8 cannot hold the window=9"),
        ({"num_tokens": 9}, "num_tokens=9 but the batch has 10"),
        ({"num_tokens": "10"}, "num_tokens='10' but must be an integer"),
        ({"num_tokens": 10.5}, "num_tokens=10.5 but must be an integer"),
        ({"num_tokens": 2**60}, "int32 counts to"),
        ({"max_seqlen_q": 4}, "max_seqlen_q=4 but the longest has 5"),
    ],
)
def test_refused(change, message):
    """Each contradiction is a PlanError that shows the numbers."""
    call = {"state_ids": [0, 1], "seqlens_q": [5, 5], "seqlens_k": [5, 10]}
    call |= {"window": 4, "ring_len": 8, **change}
    with pytest.raises(rs.errors.PlanError, match=message):
        rs.plan_prefill(call.pop("state_ids"), call.pop("seqlens_q"), call.pop("seqlens_k"), **call)


def test_rows_beyond_int32_are_refused():
    """Two sequences of 2^30 window rows each are 2^31 rows: one more than int32 counts."""
    big = {"window": 2**30, "ring_len": 2**30}
    with pytest.raises(rs.errors.PlanError, match="more rows than"):
        rs.plan_prefill([0, 1], [0, 0], [0, 0], **big)


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_host_equals_reference(first_seed):
    """600 batches: empty and padded sequences, chunks longer than the ring, valid starts, ends at
    the largest position. The section has num_seqs * W rows, at most 3 segments a sequence."""
    for seed in range(first_seed, first_seed + 100):
        case = random_prefill(seed)
        plan = rs.plan_prefill(
            case.state_ids,
            case.seqlens_q,
            case.seqlens_k,
            window=case.window,
            ring_len=case.ring_len,
            swa_valid_start=case.swa_valid_start,
        )
        assert_same_prefill(plan, fill_prefill(reference, case), f"seed={seed} {case}")
        assert plan.segments[:, 2].sum() == plan.history_rows == plan.num_seqs * case.window
        sequence = plan.segments[:, 1] // case.window  # rounded down: which sequence's rows
        assert np.bincount(sequence, minlength=1).max(initial=0) <= 3
        ends = plan.segments[:, 1] + plan.segments[:, 2]
        np.testing.assert_array_equal(plan.segments[1:, 1], ends[:-1])


@pytest.mark.parametrize("chunk", [1, 7, 128, 133, 134, 135, 300])
def test_chunks_and_decodes_see_the_same_keys(chunk):
    """A prompt of 1,000 in chunks, carried out against a ring of 134: every query sees exactly
    max(0, p - 127) .. p, as one decode step after another would."""
    ring: dict[int, float] = {}
    for q_start in range(0, 1000, chunk):
        q_len = min(chunk, 1000 - q_start)
        plan = rs.plan_prefill([2], [q_len], [q_start + q_len], **V41)
        keys = keys_of(plan, [q_len], [q_start + q_len], ring)
        for p, seen in zip(range(q_start, q_start + q_len), keys, strict=True):
            assert seen == list(range(max(0, p - 127), p + 1))
        for p in range(q_start, q_start + q_len):
            ring[2 * 134 + p % 134] = p
    for p in range(1000, 1200):
        ring[2 * 134 + p % 134] = p
        plan = rs.plan_decode([2], [p], **V41)
        assert [ring[row] for row in plan.index[0]] == list(range(p - 127, p + 1))
