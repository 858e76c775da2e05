"""Reference of prefill plans: the definition written out, one record and one token at a time."""

from typing import Any

from ..plan_checks import check_sizes


def plan_prefill(
    state_ids: Any,
    seqlens_q: Any,
    seqlens_k: Any,
    swa_valid_start: Any,
    cu_seqlens_q: Any,
    positions: Any,
    token_state_ids: Any,
    segments: Any,
    num_segments: Any,
    pivots: Any,
    *,
    window: int,
    ring_len: int,
    stream: Any = None,
) -> None:
    """Fill the arrays of a `PrefillPlan` (int32) for num_seqs sequences.

    In: state_ids, seqlens_q, seqlens_k int [num_seqs]; swa_valid_start an int or int [num_seqs].
    Out: cu_seqlens_q [num_seqs + 1], positions and token_state_ids [T], segments [3 * num_seqs, 3]
    (rows past num_segments are (-1, 0, 0)), num_segments [1], pivots [T, 4]. Tokens past the last
    sequence's, where T is larger, and tokens of a state id below 0 have no keys.
    """
    check_sizes("plan_prefill", window, ring_len)
    num_seqs = len(state_ids)
    positions[...], token_state_ids[...], pivots[...] = 0, -1, 0
    segments[...] = (-1, 0, 0)
    found: list[tuple[int, int, int]] = []
    cu_seqlens_q[0] = t = 0
    for i in range(num_seqs):
        state, q_len = int(state_ids[i]), int(seqlens_q[i])
        q_start = int(seqlens_k[i]) - q_len
        valid = swa_valid_start if isinstance(swa_valid_start, int) else int(swa_valid_start[i])
        history = range(q_start - window, q_start)
        present = [state >= 0 and p >= max(valid, 0) for p in history]
        sources = [
            state * ring_len + p % ring_len if here else -1
            for p, here in zip(history, present, strict=True)
        ]
        found += runs(sources, i * window)
        for j in range(q_len):
            p = q_start + j
            positions[t], token_state_ids[t] = p, state
            if state >= 0:
                keys = range(max(p - window + 1, valid, 0), p + 1)
                old = sum(key < q_start for key in keys)
                # With no old key, section 1 is the empty range at the history's end.
                first_old = i * window + window - old
                first_new = num_seqs * window + int(cu_seqlens_q[i]) + j + 1 - (len(keys) - old)
                pivots[t] = first_old, old, first_new, len(keys) - old
            t += 1
        cu_seqlens_q[i + 1] = t
    for row, segment in enumerate(found):
        segments[row] = segment
    num_segments[0] = len(found)


def runs(sources: list[int], first_row: int) -> list[tuple[int, int, int]]:
    """(source row or -1, destination row, rows): neighbouring rows joined into copies."""
    joined: list[tuple[int, int, int]] = []
    for i, source in enumerate(sources):
        if joined:
            start, row, length = joined[-1]
            goes_on = source == -1 if start == -1 else source == start + length
            if goes_on:
                joined[-1] = (start, row, length + 1)
                continue
        joined.append((source, first_row + i, 1))
    return joined
