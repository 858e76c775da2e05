"""Plans of random batches against models of one line each, many sequences to a call; and the two
builders against each other, call by call."""

import numpy as np
from plan_cases import (
    assert_same_decode,
    assert_same_prefill,
    fill_decode,
    fill_prefill,
    random_decode,
    random_prefill,
)

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION
from ringslab.rawkernels.reference.plan_decode import plan_decode as reference_decode
from ringslab.rawkernels.reference.plan_prefill import plan_prefill as reference_prefill
from ringslab.schedules.plan_decode import build_decode_plan

SEQUENCES_A_CALL = 20_000


def batch_shape(rng, most_window=40):
    """(window, tokens a step, ring_len) of a call: tight rings, roomy rings, windows of one."""
    window = int(rng.choice([1, 2, 3, 8, rng.integers(1, most_window)]))
    tokens = int(rng.integers(1, 7))
    spare = int(rng.choice([0, 0, 1, rng.integers(0, 2 * window + 9)]))
    return window, tokens, rs.required_ring_len(window, tokens) + spare


def first_positions(rng, count, room):
    """Positions near 0, near a wrap, anywhere, and at the end of int32, with room behind them."""
    small = rng.integers(0, 100, count)
    wide = rng.integers(0, MAX_POSITION - room, count)
    last = MAX_POSITION - room - rng.integers(0, 10, count)
    return np.choose(rng.integers(0, 4, count), [small, small, wide, last])


def test_decode_batches(fuzz_size, fuzz_rng):
    """40,000 (full: 1,000,000) sequences of 1 to 6 tokens: the index of a query is the row of each
    position max(0, p - W + 1, valid start) .. p, oldest first, then -1."""
    rng, left = fuzz_rng, fuzz_size(40_000, 1_000_000)
    while left > 0:
        window, most, ring_len = batch_shape(rng)
        count = min(left, SEQUENCES_A_CALL)
        lengths = rng.integers(0, most + 1, count)
        states = rng.integers(-1, 50, count)
        firsts = first_positions(rng, count, most)
        valid = np.where(rng.random(count) < 0.3, rng.integers(0, firsts + 1), 0)
        cu = np.concatenate([[0], np.cumsum(lengths)])
        seq = np.repeat(np.arange(count), lengths)
        state, p = states[seq], firsts[seq] + np.arange(cu[-1]) - cu[seq]
        start = valid[seq]
        plan = rs.plan_decode(
            state, p, window=window, ring_len=ring_len, cu_seqlens_q=cu, swa_valid_start=start
        )
        oldest = np.maximum(np.maximum(p - window + 1, start), 0)
        length = np.where(state >= 0, p - oldest + 1, 0)
        # The model.
        at = oldest[:, None] + np.arange(window)
        index = np.where(
            np.arange(window) < length[:, None], state[:, None] * ring_len + at % ring_len, -1
        )
        note = f"{window=} {ring_len=} tokens={most}"
        np.testing.assert_array_equal(plan.index, index, note)
        np.testing.assert_array_equal(plan.offset_len[:, 1], length, note)
        seen = length > 0
        np.testing.assert_array_equal(plan.offset_len[seen, 0], index[seen, 0], note)
        left -= count


def test_prefill_batches(fuzz_size, fuzz_rng):
    """20,000 (full: 1,000,000) sequences, 1,000 a call: every history row comes from the row of its
    position or is zero; every query's two ranges are max(0, p - W + 1, valid start) .. p, cut where
    the new tokens begin."""
    rng, left = fuzz_rng, fuzz_size(20_000, 1_000_000)
    while left > 0:
        window, _, ring_len = batch_shape(rng, 20)
        count = min(left, 1000)
        q = rng.integers(0, int(rng.choice([2, 8, 60])), count)
        starts = first_positions(rng, count, 61)
        states = rng.integers(-1, 50, count)
        valid = np.where(rng.random(count) < 0.3, rng.integers(0, starts + 1), 0)
        plan = rs.plan_prefill(
            states, q, starts + q, window=window, ring_len=ring_len, swa_valid_start=valid
        )
        note = f"{window=} {ring_len=}"
        # The model of the history: row h of a sequence is position q_start - W + h.
        position = (starts[:, None] - window + np.arange(window)).ravel()
        state, low = np.repeat(states, window), np.repeat(np.maximum(valid, 0), window)
        wanted = np.where(
            (position >= low) & (state >= 0), state * ring_len + position % ring_len, -1
        )
        source, target, rows = plan.segments.astype(np.int64).T
        assert (np.bincount(target // window, minlength=count) <= 3).all(), note
        row = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        found = np.full(count * window, -2)
        found[np.repeat(target, rows) + row] = np.where(
            np.repeat(source, rows) < 0, -1, np.repeat(source, rows) + row
        )
        np.testing.assert_array_equal(found, wanted, note)
        # The model of the queries.
        cu = np.concatenate([[0], np.cumsum(q)])
        seq = np.repeat(np.arange(count), q)
        p = starts[seq] + np.arange(cu[-1]) - cu[seq]
        oldest = np.maximum(np.maximum(p - window + 1, valid[seq]), 0)
        new = np.maximum(oldest, starts[seq])
        ranges = np.stack(
            [
                seq * window + np.minimum(oldest, starts[seq]) - starts[seq] + window,
                np.maximum(starts[seq] - oldest, 0),
                count * window + cu[seq] + new - starts[seq],
                p - new + 1,
            ],
            axis=1,
        )
        ranges[states[seq] < 0] = 0
        np.testing.assert_array_equal(plan.pivots, ranges, note)
        np.testing.assert_array_equal(plan.positions, p, note)
        left -= count


def test_host_builder_is_the_reference(fuzz_size, fuzz_rng):
    """300 (full: 20,000) small batches of every mode, draft blocks too, against the loops of the
    reference, value for value."""
    first = int(fuzz_rng.integers(0, 2**30))
    for seed in range(first, first + fuzz_size(300, 20_000)):
        case = random_decode(seed)
        plan = build_decode_plan(
            case.state_ids, case.positions, window=case.window, ring_len=case.ring_len,
            mode=case.mode, swa_valid_start=case.swa_valid_start, cu_seqlens_q=case.cu_seqlens_q,
        )  # fmt: skip
        assert_same_decode(plan, fill_decode(reference_decode, case), f"{seed=} {case}")
        case = random_prefill(seed)
        plan = rs.plan_prefill(
            case.state_ids, case.seqlens_q, case.seqlens_k, window=case.window,
            ring_len=case.ring_len, swa_valid_start=case.swa_valid_start,
        )  # fmt: skip
        assert_same_prefill(plan, fill_prefill(reference_prefill, case), f"{seed=} {case}")
