"""Decode plans against worked values, the public bug cases, and the reference's loops."""

import ml_dtypes
import numpy as np
import pytest
from plan_cases import assert_same_decode, fill_decode, i32, random_decode

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION
from ringslab.rawkernels.reference.plan_decode import plan_decode as reference
from ringslab.schedules.plan_decode import build_decode_plan


def mean_of_keys(plan, ring):
    """Plain mean of what each query reads from `ring` (value of each row), by both ways to read a
    plan: the rows of `index`, and `offset_len` with the wrap at the ring's end."""
    means = []
    for t in range(plan.num_tokens):
        rows = plan.index[t][plan.index[t] >= 0]
        offset, length = plan.offset_len[t]
        base = offset - offset % plan.ring_len
        walked = base + (offset - base + np.arange(length)) % plan.ring_len
        np.testing.assert_array_equal(rows, walked)
        means.append(float(np.mean(ring[rows])) if length else None)
    return means


def ring_of_positions(last, ring_len):
    """A ring (state 0) in which every position 0 .. last was stored, holding its own number."""
    ring = np.full(ring_len, np.nan)
    for position in range(last + 1):
        ring[position % ring_len] = position
    return ring


def test_r14_worked_example_of_the_design():
    """State 3, position 1,000, W 128, ring 134: rows 471..535 (65) then 402..464 (63), the query's
    own key in row 464; nothing of state 4, whose rows begin at 536."""
    plan = rs.plan_decode([3], [1000], window=128, ring_len=134)
    assert plan.offset_len.tolist() == [[471, 128]]
    assert plan.index[0, :65].tolist() == list(range(471, 536))
    assert plan.index[0, 65:].tolist() == list(range(402, 465))
    assert plan.index[0, -1] == 464
    for array in (plan.offset_len, plan.index, plan.positions, plan.state_ids, plan.cu_seqlens_q):
        assert array.dtype == np.int32


def test_short_sequence_leaves_the_rest_minus_one():
    """Position 50: 51 keys, rows 402..452, columns 51..127 are -1."""
    plan = rs.plan_decode([3], [50], window=128, ring_len=134)
    assert plan.offset_len.tolist() == [[402, 51]]
    assert plan.index[0, :51].tolist() == list(range(402, 453))
    assert (plan.index[0, 51:] == -1).all()


@pytest.mark.parametrize("position", [0, 1, 126, 127, 128, 133, 134, 267, 268, MAX_POSITION])
def test_own_key_is_always_the_last(position):
    """min(p + 1, 128) keys, the last in row p % 134 of the state, at every edge of the ring and at
    the largest position, 2^31 - 2."""
    plan = rs.plan_decode([7], [position], window=128, ring_len=134)
    length = min(position + 1, 128)
    assert plan.offset_len[0, 1] == length
    assert plan.index[0, length - 1] == 7 * 134 + position % 134
    assert plan.offset_len[0, 0] == 7 * 134 + (position - length + 1) % 134


def test_m02_m07_window_includes_the_query():
    """W 4 at position 5 with v = i: 3.5, not 3.0 (5 keys) nor 4.0 (3). W 1 at 7: exactly 7.0."""
    ring = ring_of_positions(9, 10)
    assert mean_of_keys(rs.plan_decode([0], [5], window=4, ring_len=10), ring) == [3.5]
    assert mean_of_keys(rs.plan_decode([0], [7], window=1, ring_len=10), ring) == [7.0]
    assert mean_of_keys(rs.plan_decode([0], [9], window=4, ring_len=10), ring) == [7.5]


def test_r01_ring_too_small_for_the_step():
    """W 4, three tokens at 10: 6 rows give 8.5 for the first query. 4 or 5 rows are refused, where
    drafts would have overwritten keys that it still reads."""
    args = {"window": 4, "cu_seqlens_q": [0, 3]}
    ring = ring_of_positions(12, 6)
    plan = rs.plan_decode([0, 0, 0], [10, 11, 12], ring_len=6, **args)
    assert mean_of_keys(plan, ring)[0] == 8.5
    for ring_len in (4, 5):
        with pytest.raises(rs.errors.PlanError, match=f"6 records, but ring_len={ring_len}"):
            rs.plan_decode([0, 0, 0], [10, 11, 12], ring_len=ring_len, **args)
    assert rs.required_ring_len(4, 3) == 6


def test_r04_the_step_where_the_length_equals_w():
    """W = R = 8: 7, 8, 8, 8 keys at positions 6, 7, 8, 9."""
    plan = rs.plan_decode([0] * 4, [6, 7, 8, 9], window=8, ring_len=8)
    assert plan.offset_len[:, 1].tolist() == [7, 8, 8, 8]


def test_r08_r09_young_sequence_sees_only_its_own_rows():
    """W 4, R 6, a reused slot at p = 1: two keys, rows 0 and 1, whatever the rest holds."""
    ring = np.array([0.0, 1.0, 100, 100, np.nan, 100])
    assert mean_of_keys(rs.plan_decode([0], [1], window=4, ring_len=6), ring) == [0.5]


def test_r13_padding_sees_nothing():
    """State id -1: offset 0, length 0, index -1, at any position, between live tokens."""
    plan = rs.plan_decode([3, -1, 4], [5, -9, 5], window=4, ring_len=8)
    assert plan.offset_len.tolist() == [[3 * 8 + 2, 4], [0, 0], [4 * 8 + 2, 4]]
    assert (plan.index[1] == -1).all()
    assert plan.positions.tolist() == [5, -9, 5]


def test_s01_each_query_has_its_own_window():
    """W 4, queries 10, 11, 12, v = i: 8.5, 9.5, 10.5."""
    plan = rs.plan_decode([0] * 3, [10, 11, 12], window=4, ring_len=9, cu_seqlens_q=[0, 3])
    assert mean_of_keys(plan, ring_of_positions(12, 9)) == [8.5, 9.5, 10.5]


def test_s02_rows_of_rejected_drafts_are_not_read():
    """W 4, R 9, 10..15 written, two drafts accepted, then 13 alone: 10..13, 11.5."""
    plan = rs.plan_decode([0], [13], window=4, ring_len=9)
    assert mean_of_keys(plan, ring_of_positions(15, 9)) == [11.5]
    assert not {14 % 9, 15 % 9} & set(plan.index[0].tolist())


def test_s07_ragged_verify_lengths():
    """Verify lengths 3, 1, 2: offsets 0, 3, 4, 6; longest 3."""
    cu = np.concatenate([[0], np.cumsum([3, 1, 2])])
    plan = rs.plan_decode(
        [5, 5, 5, 2, 9, 9],
        [40, 41, 42, 7, 0, 1],
        window=4,
        ring_len=8,
        cu_seqlens_q=cu,
    )
    assert plan.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert (plan.num_seqs, plan.max_seqlen_q, plan.num_tokens) == (3, 3, 6)


def test_n04_empty_sequences():
    """Lengths 2, 0, 1: a draft block's tokens belong to sequences 0, 0, 2. Lengths 0, 0, 0: no
    token, three sequences."""
    plan = rs.plan_decode(
        [0, 0, 2], [4, 5, 9], window=3, ring_len=6, cu_seqlens_q=[0, 2, 2, 3], block=True
    )
    assert plan.offset_len.tolist() == [[1, 5], [1, 5], [2 * 6 + 0, 4]]
    empty = rs.plan_decode([], [], window=3, ring_len=6, cu_seqlens_q=[0, 0, 0, 0])
    assert empty.num_tokens == 0
    assert (empty.num_seqs, empty.max_seqlen_q) == (3, 0)
    assert empty.index.shape == (0, 3)
    nothing = rs.plan_decode([], [], window=3, ring_len=6)
    assert (nothing.num_seqs, nothing.num_tokens, nothing.cu_seqlens_q.tolist()) == (0, 0, [0])


def test_draft_block_has_no_mask_inside():
    """Last committed 9, block 10..12, W 4: all three see 6..12, and the index is W + 3 wide."""
    plan = rs.plan_decode(
        [0] * 3, [10, 11, 12], window=4, ring_len=9, cu_seqlens_q=[0, 3], block=True
    )
    assert plan.offset_len.tolist() == [[6, 7]] * 3
    assert plan.index.shape == (3, 7)
    assert mean_of_keys(plan, ring_of_positions(12, 9)) == [9.0] * 3


def test_draft_block_at_the_start():
    """No committed position (the block begins at 0): each query sees the block alone."""
    plan = rs.plan_decode([1] * 2, [0, 1], window=4, ring_len=9, cu_seqlens_q=[0, 2], block=True)
    assert plan.offset_len.tolist() == [[9, 2]] * 2
    assert plan.index.tolist() == [[9, 10, -1, -1, -1, -1]] * 2


def test_draft_step_has_a_causal_first_token():
    """Committed 10, drafts 11 and 12, W 4: 10 sees 7..10, the drafts see 7..12."""
    plan = build_decode_plan(
        [0] * 3, [10, 11, 12], window=4, ring_len=9, cu_seqlens_q=[0, 3], mode="draft_step"
    )
    assert mean_of_keys(plan, ring_of_positions(12, 9)) == [8.5, 9.5, 9.5]
    assert plan.index.shape == (3, 6)


def test_valid_start_clips():
    """W 4 at p = 9: valid start 8 leaves 8 and 9; 6 changes nothing; 10 leaves no key. One value
    for all, or one a token."""
    args = {"window": 4, "ring_len": 16}
    plan = rs.plan_decode([0] * 3, [9] * 3, swa_valid_start=[8, 6, 10], **args)
    assert plan.offset_len.tolist() == [[8, 2], [6, 4], [0, 0]]
    assert rs.plan_decode([0], [9], swa_valid_start=8, **args).offset_len.tolist() == [[8, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window=0 but must be 1"),
        ({"window": -1}, "window=-1"),
        ({"window": True}, "window=True but must be an integer"),
        ({"window": None}, "window=None"),
        ({"ring_len": 3}, "ring_len=3 cannot hold the window=4"),
        ({"ring_len": 2**31}, "ring_len=2147483648"),
        ({"positions": [-1, 5]}, r"positions\[0\]=-1"),
        ({"positions": [5, MAX_POSITION + 1]}, r"positions\[1\]=2147483647"),
        ({"positions": [[5], [5, 6]]}, "positions is no array"),
        ({"positions": [5]}, "positions has 1 values for 2 state_ids"),
        ({"positions": [5.0, 6.0]}, "positions.dtype=float64"),
        ({"positions": [[5, 6]]}, r"positions.shape=\(1, 2\)"),
        ({"state_ids": [0, -2]}, r"state_ids\[1\]=-2"),
        ({"state_ids": [0, 2**31 // 8]}, r"state_ids\[1\]=268435456"),
        ({"swa_valid_start": -1}, r"swa_valid_start\[0\]=-1"),
        ({"swa_valid_start": [0]}, "swa_valid_start has 1 values for 2 tokens"),
        ({"cu_seqlens_q": [0, 1]}, "cu_seqlens_q runs 0 .. 1 but must run 0 .. 2"),
        ({"cu_seqlens_q": [1, 2]}, "cu_seqlens_q runs 1 .. 2"),
        ({"cu_seqlens_q": [0, 2, 1, 2]}, "falls from 2 to 1 at sequence 1"),
        ({"cu_seqlens_q": []}, "cu_seqlens_q runs nothing"),
        ({"cu_seqlens_q": [0, 2]}, "token 1 is state_id=0 position=5"),
        ({"block": True}, "block=True needs cu_seqlens_q"),
        ({"max_seqlen_q": "7"}, "max_seqlen_q='7' but must be an integer"),
        ({"max_seqlen_q": 2**60}, "int32 counts to"),
        ({"max_seqlen_q": 0}, "max_seqlen_q=0 but the longest has 1"),
    ],
)
def test_refused(change, message):
    """Each contradiction is a PlanError (an ArgumentError, a ValueError) that shows the numbers."""
    call = {"state_ids": [0, 0], "positions": [5, 5], "window": 4, "ring_len": 8, **change}
    with pytest.raises(rs.errors.PlanError, match=message):
        rs.plan_decode(call.pop("state_ids"), call.pop("positions"), **call)


def test_refused_sequences_that_are_not_consecutive():
    """State ids that change, positions with a gap, and tokens after padding, within a sequence."""
    args = {"window": 2, "ring_len": 8, "cu_seqlens_q": [0, 3]}
    for states, positions in (
        ([1, 1, 2], [5, 6, 7]),
        ([1, 1, 1], [5, 6, 8]),
        ([1, -1, 1], [5, 0, 7]),
        ([-1, 1, 1], [5, 6, 7]),
    ):
        with pytest.raises(rs.errors.PlanError):
            rs.plan_decode(states, positions, **args)
    padded = rs.plan_decode([1, 1, -1], [5, 6, 0], **args)
    assert padded.offset_len[:, 1].tolist() == [2, 2, 0]


def test_what_is_no_array_is_refused():
    with pytest.raises(rs.errors.ArgumentError, match="state_ids"):
        rs.plan_decode(object(), [1], window=4, ring_len=8)
    with pytest.raises(rs.errors.PlanError, match="bfloat16"):
        rs.plan_decode(np.zeros(1, ml_dtypes.bfloat16), [1], window=4, ring_len=8)


def test_a_plan_does_not_change_with_its_inputs():
    """The caller's arrays may be reused for the next step at once."""
    states, positions, cu = i32([3, 3]), i32([10, 11]), i32([0, 2])
    plan = rs.plan_decode(states, positions, window=4, ring_len=8, cu_seqlens_q=cu)
    for array in (states, positions, cu):
        array[:] = 0
    assert plan.positions.tolist() == [10, 11]
    assert plan.state_ids.tolist() == [3, 3]
    assert plan.cu_seqlens_q.tolist() == [0, 2]


def test_integer_dtypes_and_strides_do_not_matter():
    """int64, uint8, strided and big-endian inputs give the plan of int32."""
    want = rs.plan_decode([3, 4], [10, 20], window=4, ring_len=8)
    for dtype in (np.int64, np.uint8, np.dtype(">i4")):
        got = rs.plan_decode(
            np.array([3, 4], dtype), np.array([10, 0, 20], dtype)[::2], window=4, ring_len=8
        )
        assert_same_decode(got, want)


@pytest.mark.parametrize("first_seed", range(0, 600, 100))
def test_host_equals_reference(first_seed):
    """600 ragged batches of all modes: empty sequences, padding, valid starts, positions up to
    2^31 - 2."""
    for seed in range(first_seed, first_seed + 100):
        case = random_decode(seed)
        plan = build_decode_plan(
            case.state_ids,
            case.positions,
            window=case.window,
            ring_len=case.ring_len,
            mode=case.mode,
            swa_valid_start=case.swa_valid_start,
            cu_seqlens_q=case.cu_seqlens_q,
        )
        assert_same_decode(plan, fill_decode(reference, case), f"seed={seed} {case}")
        assert plan.max_seqlen_q == case.max_seqlen_q


def test_permuting_sequences_permutes_rows():
    """A token's row of the plan depends on its own sequence alone."""
    rng = np.random.default_rng(5)
    states, positions = rng.permutation(40), rng.integers(0, 9999, 40)
    order = rng.permutation(40)
    a = rs.plan_decode(states, positions, window=16, ring_len=20)
    b = rs.plan_decode(states[order], positions[order], window=16, ring_len=20)
    np.testing.assert_array_equal(a.index[order], b.index)
    np.testing.assert_array_equal(a.offset_len[order], b.offset_len)
