"""Prefill plans: the copies that fill a layer's joint buffer with history, and the rows of it that
each query token of a prefill batch reads."""

from typing import Any

import numpy as np

from ..layouts.errors import PlanError
from ..layouts.plans import MAX_PINNED_SEGMENTS, MAX_SEGMENTS, PrefillPlan
from ..layouts.rings import MAX_POSITION, ring_index
from ..rawkernels.plan_checks import MAX_ROW, check_sizes
from .plan_arrays import (
    from_caller,
    host_extent,
    host_integers,
    host_valid_start,
    refuse_pinned_and_missing,
    refuse_pinned_on_device,
)

OP = "plan_prefill"


def plan_prefill(
    state_ids: Any,
    seqlens_q: Any,
    seqlens_k: Any,
    *,
    window: int,
    ring_len: int,
    swa_valid_start: Any = 0,
    num_tokens: int | None = None,
    max_seqlen_q: int | None = None,
    sink_tokens: int = 0,
    stream: Any = None,
) -> PrefillPlan:
    """Plan of a prefill batch, per sequence: state_ids, seqlens_q, seqlens_k integers [num_seqs].

    seqlens_q: new tokens of each sequence in this batch; seqlens_k: its tokens after them. With
    q_start = seqlens_k - seqlens_q, the joint buffer of a layer is num_seqs * window history rows
    (positions q_start - window .. q_start - 1 of each sequence, zeros where that is below 0 or
    below swa_valid_start) and then the new records. `segments` fill the history from the rings, at
    most three a sequence; `pivots` are the two ranges of rows that each query reads.
    State id -1 is padding: history of zeros, queries that see nothing, records that are not stored.
    sink_tokens S: the ring pins the first S positions, every query sees those of them up to its
    own, and each sequence has S more history rows for them, first; on the host only, and not beside
    swa_valid_start.

    Where the arrays live decides where the plan is built. Host arrays or lists: here, with every
    value checked. CuPy arrays: on the device, on `stream`; values are not checked there, and
    `segments` has 3 * num_seqs rows of which `num_segments` (on the device too) count. There the
    caller states num_tokens (T; larger is allowed, the rest is padding) and max_seqlen_q (larger
    is allowed). Left out, seqlens_q is read back once, which waits and so cannot be captured.

    Raises PlanError for shapes, dtypes, sizes that do not fit together and, on the host, for
    values: seqlens_q < 0, seqlens_k < seqlens_q, swa_valid_start < 0 or > q_start.
    """
    given, device = from_caller(
        state_ids=state_ids,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        swa_valid_start=swa_valid_start,
    )
    state_ids, seqlens_q, seqlens_k, swa_valid_start = given
    if device:
        refuse_pinned_on_device(OP, sink_tokens)
        from ..rawkernels.cuda.plan_prefill import build_prefill_plan as build_on_device

        return build_on_device(
            state_ids,
            seqlens_q,
            seqlens_k,
            window=window,
            ring_len=ring_len,
            swa_valid_start=swa_valid_start,
            num_tokens=num_tokens,
            max_seqlen_q=max_seqlen_q,
            stream=stream,
        )
    window, ring_len = check_sizes(OP, window, ring_len, sink_tokens)
    states, q, k, valid = _read(state_ids, seqlens_q, seqlens_k, swa_valid_start, ring_len)
    refuse_pinned_and_missing(OP, sink_tokens, valid)
    rings = (window, ring_len, int(sink_tokens))
    return _host_plan(states, q, k, valid, rings, num_tokens, max_seqlen_q)


def _read(
    state_ids: Any, seqlens_q: Any, seqlens_k: Any, swa_valid_start: Any, ring_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of a host plan as int64 [num_seqs], checked against each other."""
    most_state = (MAX_ROW + 1) // ring_len - 1  # rounded down: all rows of a state must fit
    states = host_integers(OP, "state_ids", state_ids, least=-1, most=most_state)
    q = host_integers(OP, "seqlens_q", seqlens_q, least=0, most=MAX_POSITION + 1)
    k = host_integers(OP, "seqlens_k", seqlens_k, least=0, most=MAX_POSITION + 1)
    num_seqs = states.shape[0]
    for name, array in (("seqlens_q", q), ("seqlens_k", k)):
        if array.shape[0] != num_seqs:
            raise PlanError(
                f"{OP}: {name} has {array.shape[0]} values for {num_seqs} state_ids; "
                "all are one a sequence"
            )
    if np.any(k < q):
        at = int(np.flatnonzero(k < q)[0])
        raise PlanError(f"{OP}: seqlens_k[{at}]={k[at]} is below seqlens_q[{at}]={q[at]}")
    valid = host_valid_start(OP, swa_valid_start, num_seqs, "sequence", MAX_POSITION + 1)
    if np.any(valid > k - q):
        at = int(np.flatnonzero(valid > k - q)[0])
        raise PlanError(
            f"{OP}: swa_valid_start[{at}]={valid[at]} is past q_start={k[at] - q[at]}; "
            "the new tokens are always valid"
        )
    return states, q, k, valid


def _host_plan(
    states: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    valid: np.ndarray,
    rings: tuple[int, int, int],
    num_tokens: int | None,
    max_seqlen_q: int | None,
) -> PrefillPlan:
    """`rings`: window, ring_len, sink_tokens."""
    window, ring_len, sink_tokens = rings
    num_seqs = states.shape[0]
    cu = np.concatenate([[0], np.cumsum(q)])
    total, longest = int(cu[-1]), int(q.max(initial=0))
    if num_seqs * (window + sink_tokens) + total > MAX_ROW:
        pinned = f" and sink_tokens={sink_tokens}" if sink_tokens else ""
        raise PlanError(
            f"{OP}: {num_seqs} sequences * window={window}{pinned} + {total} tokens are more rows "
            f"than the {MAX_ROW} that int32 can count; use a smaller batch"
        )
    num_tokens = host_extent(OP, "num_tokens", num_tokens, total, "the batch has")
    max_seqlen_q = host_extent(OP, "max_seqlen_q", max_seqlen_q, longest, "the longest has")
    positions, token_states, pivots, pinned = _pivots(
        states, q, k, valid, cu, window, sink_tokens, num_tokens
    )
    segments = _segments(states, k - q, valid, window, ring_len, sink_tokens)
    return PrefillPlan(
        window=window,
        ring_len=ring_len,
        num_seqs=num_seqs,
        max_seqlen_q=max_seqlen_q,
        cu_seqlens_q=cu.astype(np.int32),
        state_ids=states.astype(np.int32),
        seqlens_k=k.astype(np.int32),
        positions=positions,
        token_state_ids=token_states,
        segments=segments,
        num_segments=np.array([segments.shape[0]], dtype=np.int32),
        pivots=pivots,
        sink_tokens=sink_tokens,
        pinned_pivots=pinned if sink_tokens else None,
    )


def _segments(
    states: np.ndarray,
    q_start: np.ndarray,
    valid: np.ndarray,
    window: int,
    ring_len: int,
    sink_tokens: int,
) -> np.ndarray:
    """Copies of the history section, int32 [S, 3]: source row or -1, destination row, rows."""
    num_seqs = states.shape[0]
    begin = q_start - window  # below 0 for a young sequence; valid >= 0 pads what is missing
    # Pinned positions have rows of their own and are not repeated in the window's.
    missing = np.maximum(valid, sink_tokens)
    pad = np.where(states >= 0, np.clip(missing - begin, 0, window), window)
    rows = window - pad
    at = np.where(rows > 0, ring_index(begin + pad, ring_len, sink_tokens), 0)
    before_wrap = np.minimum(rows, ring_len - at)
    base = states * ring_len
    first = np.arange(num_seqs, dtype=np.int64) * (window + sink_tokens)
    dst = first + sink_tokens
    pinned = np.where(states >= 0, np.minimum(q_start, sink_tokens), 0)
    none = np.full(num_seqs, -1)
    copies = [
        (base, first, pinned),
        (none, first + pinned, sink_tokens - pinned),
        (none, dst, pad),
        (base + at, dst + pad, before_wrap),
        (base + sink_tokens, dst + pad + before_wrap, rows - before_wrap),
    ]
    assert len(copies) == MAX_PINNED_SEGMENTS + MAX_SEGMENTS
    every = np.stack([np.stack(copy, axis=1) for copy in copies], axis=1).astype(np.int32)
    every = every.reshape(num_seqs * len(copies), 3)
    return np.ascontiguousarray(every[every[:, 2] > 0])


def _pivots(
    states: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    valid: np.ndarray,
    cu: np.ndarray,
    window: int,
    sink_tokens: int,
    num_tokens: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """positions int32 [T], token_state_ids int32 [T], pivots and pinned pivots int32 [T, 4].

    Tokens past the last sequence's are padding: position 0, state id -1, no keys.
    """
    num_seqs, total = states.shape[0], int(cu[-1])
    positions = np.zeros(num_tokens, dtype=np.int32)
    token_states = np.full(num_tokens, -1, dtype=np.int32)
    pivots = np.zeros((num_tokens, 4), dtype=np.int32)
    pinned_pivots = np.zeros((num_tokens, 4), dtype=np.int32)
    seq = np.repeat(np.arange(num_seqs), q)
    j = np.arange(total, dtype=np.int64) - cu[seq]
    q_start = (k - q)[seq]
    p = q_start + j
    positions[:total] = p
    token_states[:total] = states[seq]

    oldest = np.maximum(np.maximum(p - window + 1, valid[seq]), sink_tokens)
    first = seq * (window + sink_tokens)  # of the sequence's history rows
    new_first = num_seqs * (window + sink_tokens) + cu[seq]  # of its new records
    # Section 1: oldest .. q_start - 1, at the end of the sequence's window rows of history.
    skip = np.minimum(oldest, q_start) - (q_start - window)
    # Section 2: max(oldest, q_start) .. p, among the new records.
    new = np.maximum(oldest - q_start, 0)
    found = np.empty((total, 4), dtype=np.int64)
    found[:, 0] = first + sink_tokens + skip
    found[:, 1] = window - skip
    found[:, 2] = new_first + np.minimum(new, j)
    found[:, 3] = np.maximum(j - new + 1, 0)  # 0 for a query that is pinned itself
    found[states[seq] < 0] = 0
    pivots[:total] = found
    found[:, 0] = first
    found[:, 1] = np.minimum(q_start, sink_tokens)
    found[:, 2] = new_first
    found[:, 3] = np.maximum(np.minimum(p + 1, sink_tokens) - q_start, 0)
    found[states[seq] < 0] = 0
    pinned_pivots[:total] = found
    return positions, token_states, pivots, pinned_pivots
