"""Decode plans: which rows of a layer's rings each query token of a decode batch reads."""

from typing import Any

import numpy as np

from ..layouts.errors import PlanError
from ..layouts.plans import DecodePlan
from ..layouts.rings import MAX_POSITION, ring_index
from ..layouts.sizes import is_flag
from ..rawkernels.plan_checks import MAX_ROW, DecodeMode, check_sizes, index_width, mode_code
from .plan_arrays import (
    from_caller,
    host_cu_seqlens,
    host_extent,
    host_integers,
    host_valid_start,
    refuse_pinned_and_missing,
    refuse_pinned_on_device,
)

OP = "plan_decode"


def plan_decode(
    state_ids: Any,
    positions: Any,
    *,
    window: int,
    ring_len: int,
    swa_valid_start: Any = 0,
    cu_seqlens_q: Any = None,
    block: bool = False,
    max_seqlen_q: int | None = None,
    sink_tokens: int = 0,
    stream: Any = None,
) -> DecodePlan:
    """Plan of a decode batch of T query tokens.

    state_ids, positions: integers [T], one a token; state id -1 is padding, which sees nothing.
    cu_seqlens_q: integers [num_seqs + 1]; tokens cu_seqlens_q[i] .. cu_seqlens_q[i + 1] are
    consecutive positions of one sequence (padding after them is allowed). Without it each token
    is a sequence of its own. swa_valid_start: positions below it are missing; one integer, or one
    for each token.

    A query at p sees n = min(p + 1, window) keys, clipped at swa_valid_start; the oldest is
    p - n + 1, at row state_id * ring_len + oldest % ring_len. `block=True` is a draft
    block: with p = (first position of the sequence here) - 1 the last committed position, all its
    queries see max(0, p - window + 1) .. the block's last position; it needs cu_seqlens_q, and
    p = -1 is a block with nothing before it. sink_tokens S: the ring pins the first S positions and
    every query sees those of them that are no later than its newest key; on the host only, and not
    beside swa_valid_start.

    Where the arrays live decides where the plan is built. Host arrays or lists: here, with every
    value checked. CuPy arrays: on the device, on `stream`, where values cannot be checked without
    waiting for them, so they are not. There `max_seqlen_q` is the caller's to state (the longest
    sequence's tokens; larger is allowed): left out, it is T without `block`, and with `block` the
    lengths are read back once, which waits and so cannot be captured in a graph.

    Raises PlanError for shapes, dtypes, sizes that do not fit together and, on the host, for
    values: negative positions, a sequence that is not consecutive, keys that the ring cannot hold.
    """
    if not is_flag(block):
        raise PlanError(f"{OP}: block={block!r} but must be True or False")
    if block and cu_seqlens_q is None:
        raise PlanError(
            f"{OP}: block=True needs cu_seqlens_q, which says where each draft block begins"
        )
    return build_decode_plan(
        state_ids,
        positions,
        window=window,
        ring_len=ring_len,
        mode="block" if block else "causal",
        swa_valid_start=swa_valid_start,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        sink_tokens=sink_tokens,
        stream=stream,
    )


def build_decode_plan(
    state_ids: Any,
    positions: Any,
    *,
    window: int,
    ring_len: int,
    mode: DecodeMode,
    swa_valid_start: Any = 0,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    sink_tokens: int = 0,
    stream: Any = None,
) -> DecodePlan:
    """`plan_decode` with the mode by name, and one mode more.

    "draft_step" is the plan of a draft layer in a decode step: the first token of each sequence is
    the committed one and is causal, the others are a draft block that hangs on it. It needs
    cu_seqlens_q. Raises PlanError as `plan_decode` does.
    """
    mode_code(OP, mode)
    if mode != "causal" and cu_seqlens_q is None:
        raise PlanError(f"{OP}: mode={mode!r} needs cu_seqlens_q")
    given, device = from_caller(
        state_ids=state_ids,
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        swa_valid_start=swa_valid_start,
    )
    state_ids, positions, cu_seqlens_q, swa_valid_start = given
    if device:
        refuse_pinned_on_device(OP, sink_tokens)
        from ..rawkernels.cuda.plan_decode import build_decode_plan as build_on_device

        return build_on_device(
            state_ids,
            positions,
            window=window,
            ring_len=ring_len,
            mode=mode,
            swa_valid_start=swa_valid_start,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            stream=stream,
        )
    window, ring_len = check_sizes(OP, window, ring_len, sink_tokens)
    return _host_plan(
        state_ids,
        positions,
        window,
        ring_len,
        mode,
        swa_valid_start,
        cu_seqlens_q,
        max_seqlen_q,
        int(sink_tokens),
    )


def _host_plan(
    state_ids: Any,
    positions: Any,
    window: int,
    ring_len: int,
    mode: DecodeMode,
    swa_valid_start: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    sink_tokens: int,
) -> DecodePlan:
    most_state = (MAX_ROW + 1) // ring_len - 1  # rounded down: all rows of a state must fit
    states = host_integers(OP, "state_ids", state_ids, least=-1, most=most_state)
    num_tokens = states.shape[0]
    where = host_integers(OP, "positions", positions, least=-(2**31), most=MAX_POSITION)
    if where.shape[0] != num_tokens:
        raise PlanError(
            f"{OP}: positions has {where.shape[0]} values for {num_tokens} state_ids; "
            "both are one a token"
        )
    valid = host_valid_start(OP, swa_valid_start, num_tokens, "token", 2**31 - 1)
    refuse_pinned_and_missing(OP, sink_tokens, valid)
    real = states >= 0
    if np.any(real & (where < 0)):
        at = int(np.flatnonzero(real & (where < 0))[0])
        raise PlanError(f"{OP}: positions[{at}]={where[at]} but must be at least 0")
    if cu_seqlens_q is None:
        cu = np.arange(num_tokens + 1, dtype=np.int64)
        longest = min(num_tokens, 1)
        first = last = where
        is_first = np.ones(num_tokens, dtype=bool)
    else:
        cu = host_cu_seqlens(OP, cu_seqlens_q, num_tokens)
        longest = int(np.diff(cu).max(initial=0))
        first, last, is_first = _sequence_ends(states, where, cu)
    max_seqlen_q = host_extent(OP, "max_seqlen_q", max_seqlen_q, longest, "the longest has")

    oldest, newest = _visible(mode, window, where, first, last, is_first)
    oldest = np.maximum(np.maximum(oldest, valid), sink_tokens)
    length = np.where(real, np.maximum(newest - oldest + 1, 0), 0)
    _check_span(oldest, last, length, ring_len - sink_tokens)
    pinned = np.where(real, np.clip(newest + 1, 0, sink_tokens), 0)
    start = np.where(length > 0, ring_index(oldest, ring_len, sink_tokens), 0)
    offset_len = np.empty((num_tokens, 2), dtype=np.int32)
    offset_len[:, 0] = np.where(length + pinned > 0, states * ring_len + start, 0)
    offset_len[:, 1] = length

    width = index_width(mode, window, max_seqlen_q)
    index = _index(states * ring_len, start, length, pinned, width, ring_len, sink_tokens)
    return DecodePlan(
        window=window,
        ring_len=ring_len,
        num_seqs=cu.shape[0] - 1,
        max_seqlen_q=max_seqlen_q,
        cu_seqlens_q=cu.astype(np.int32),
        state_ids=states.astype(np.int32),
        positions=where.astype(np.int32),
        offset_len=offset_len,
        index=index,
        sink_tokens=sink_tokens,
        num_pinned=pinned.astype(np.int32) if sink_tokens else None,
    )


def _index(
    base: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    pinned: np.ndarray,
    width: int,
    ring_len: int,
    sink_tokens: int,
) -> np.ndarray:
    """Rows of each token's keys, int32 [T, sink_tokens + width], -1 behind the last: `pinned` rows
    from the ring's first one, `base`, then `length` rows from ring index `start`."""
    column = np.arange(sink_tokens + width, dtype=np.int32) - pinned.astype(np.int32)[:, None]
    # From here on a column counts the keys behind the pinned ones; below 0 are those.
    index = start.astype(np.int32)[:, None] + column  # below 2 * ring_len where it counts
    np.subtract(index, np.int32(ring_len - sink_tokens), out=index, where=index >= ring_len)
    if sink_tokens:
        index = np.where(column < 0, column + pinned.astype(np.int32)[:, None], index)
    index += base.astype(np.int32)[:, None]
    index[column >= length[:, None]] = -1
    return index


def _sequence_ends(
    states: np.ndarray, where: np.ndarray, cu: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and last position of each token's sequence in this batch, and whether the token is
    its first; int64, int64, bool [T]. Raises PlanError unless sequences are consecutive."""
    num_tokens = states.shape[0]
    lengths = np.diff(cu)
    begin = np.repeat(cu[:-1], lengths)
    offset = np.arange(num_tokens) - begin
    real = states >= 0
    wrong = real & ((states != states[begin]) | (where != where[begin] + offset))
    if np.any(wrong):
        at = int(np.flatnonzero(wrong)[0])
        raise PlanError(
            f"{OP}: token {at} is state_id={states[at]} position={where[at]}, but its sequence "
            f"began at token {begin[at]} with state_id={states[begin[at]]} "
            f"position={where[begin[at]]}; tokens of a sequence are consecutive, padding last"
        )
    # Padding follows the tokens of a sequence, so their number gives the last one.
    counted = np.concatenate([[0], np.cumsum(real)])
    num_real = np.repeat(counted[cu[1:]] - counted[cu[:-1]], lengths)
    gap = real & (offset >= num_real)
    if np.any(gap):
        at = int(np.flatnonzero(gap)[0])
        raise PlanError(f"{OP}: token {at} comes after padding in its own sequence")
    first = where[begin]
    return first, first + num_real - 1, offset == 0


def _visible(
    mode: DecodeMode,
    window: int,
    where: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    is_first: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Oldest (perhaps below 0) and newest visible position of each token, int64 [T]."""
    if mode == "causal":
        return where - window + 1, where
    if mode == "block":
        return first - window, last  # the anchor is first - 1
    return first - window + 1, np.where(is_first, where, last)


def _check_span(oldest: np.ndarray, last: np.ndarray, length: np.ndarray, ring_len: int) -> None:
    """A step stores all its tokens before its first query reads its oldest key, so the ring must
    hold everything from that key to the sequence's last token."""
    span = np.where(length > 0, last - oldest + 1, 0)
    if np.any(span > ring_len):
        at = int(np.flatnonzero(span > ring_len)[0])
        raise PlanError(
            f"{OP}: token {at} reads back to position {oldest[at]} after its step stored up to "
            f"{last[at]}: {span[at]} records, but ring_len={ring_len}"
        )
