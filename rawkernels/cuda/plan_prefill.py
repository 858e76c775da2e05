"""Prefill plans on the device: two Numba CUDA kernels, without host synchronisation.

sequences_kernel  grid (1); block 256 threads, each with a run of neighbouring sequences:
                  prefix sums of tokens and of segments, then the segments
tokens_kernel     a thread a token: positions, state ids, pivots
"""

from typing import Any

import numpy as np
from numba import cuda, int64

from ...layouts.plans import MAX_SEGMENTS, PrefillPlan
from ...layouts.sizes import div_ceil
from ..arrays import backend_of
from ..checks import I32, check_array, check_output
from ..device.streams import cupy_stream
from ..plan_checks import check_sizes
from .numba_cuda import configured, device_view, numba_stream, read_back, ready_numba

OP = "plan_prefill"
SEQUENCE_THREADS = 256
TOKEN_THREADS = 128

# Operands are np.int64 throughout: the simulator computes with NumPy scalars, where int32 wraps.
# No min() and max(): Numba 0.68 compiles them to calls, and only with a GPU there.


@cuda.jit(device=True, inline="always")
def history_pieces(state, q_start, start, window, ring_len):
    """Rows of zeros, ring index of the first record, records before the ring's wrap and after."""
    oldest = q_start - window
    pad = start - oldest
    if pad < 0:
        pad = np.int64(0)
    if pad > window or state < 0:
        pad = window
    rows = window - pad
    at = np.int64(0)
    if rows > 0:
        at = (oldest + pad) % ring_len  # not negative: start >= 0 pads what is below 0
    before_wrap = ring_len - at
    if before_wrap > rows:
        before_wrap = rows
    return pad, at, before_wrap, rows - before_wrap


@cuda.jit(device=True, inline="always")
def place(segments, at, source, destination, rows, writing):
    """Number of segments (0 or 1) that these rows need; written where it is time to."""
    if rows > 0 and writing == 1:
        segments[at, 0] = source
        segments[at, 1] = destination
        segments[at, 2] = rows
    return np.int64(rows > 0)


@cuda.jit
def sequences_kernel(
    state_ids,  # int32 [num_seqs]
    seqlens_q,  # int32 [num_seqs]
    seqlens_k,  # int32 [num_seqs]
    valid,  # int32 [num_seqs]; read where has_valid is 1
    has_valid,
    valid_all,
    window,
    ring_len,
    cu_seqlens_q,  # int32 [num_seqs + 1]
    segments,  # int32 [3 * num_seqs, 3]
    num_segments,  # int32 [1]
):
    part_tokens = cuda.shared.array(SEQUENCE_THREADS, int64)
    part_copies = cuda.shared.array(SEQUENCE_THREADS, int64)
    thread = np.int64(cuda.threadIdx.x)
    threads = np.int64(cuda.blockDim.x)
    num_seqs = np.int64(state_ids.shape[0])
    each = (num_seqs + threads - np.int64(1)) // threads  # rounded up
    begin = thread * each
    end = begin + each
    if end > num_seqs:
        end = num_seqs

    # Pass 0 counts tokens and copies of this thread's sequences; pass 1 writes, knowing how many
    # come before.
    tokens = np.int64(0)
    copies = np.int64(0)
    for writing in range(2):
        for i in range(begin, end):
            state = np.int64(state_ids[i])
            q_start = np.int64(seqlens_k[i]) - np.int64(seqlens_q[i])
            start = valid_all
            if has_valid != 0:
                start = np.int64(valid[i])
            pad, at, before_wrap, after_wrap = history_pieces(
                state, q_start, start, window, ring_len
            )
            if writing == 1:
                cu_seqlens_q[i] = tokens
            row = i * window
            copies += place(segments, copies, np.int64(-1), row, pad, writing)
            row += pad
            copies += place(segments, copies, state * ring_len + at, row, before_wrap, writing)
            row += before_wrap
            copies += place(segments, copies, state * ring_len, row, after_wrap, writing)
            tokens += np.int64(seqlens_q[i])
        if writing == 0:
            part_tokens[thread] = tokens
            part_copies[thread] = copies
            cuda.syncthreads()
            tokens = np.int64(0)
            copies = np.int64(0)
            for other in range(thread):
                tokens += part_tokens[other]
                copies += part_copies[other]

    if thread == threads - np.int64(1):  # its sums, its own included, are the batch's
        cu_seqlens_q[num_seqs] = tokens
        num_segments[0] = copies
    total = np.int64(0)
    for other in range(threads):
        total += part_copies[other]
    unused = total + thread
    while unused < segments.shape[0]:
        segments[unused, 0] = np.int64(-1)
        segments[unused, 1] = np.int64(0)
        segments[unused, 2] = np.int64(0)
        unused += threads


@cuda.jit
def tokens_kernel(
    state_ids,  # int32 [num_seqs]
    seqlens_q,  # int32 [num_seqs]
    seqlens_k,  # int32 [num_seqs]
    valid,  # int32 [num_seqs]; read where has_valid is 1
    has_valid,
    valid_all,
    window,
    cu_seqlens_q,  # int32 [num_seqs + 1], from sequences_kernel
    positions,  # int32 [T]
    token_state_ids,  # int32 [T]
    pivots,  # int32 [T, 4]
):
    t = np.int64(cuda.grid(1))
    if t >= positions.shape[0]:
        return
    # The sequence of token t: the last one that begins at or before it (so never an empty one).
    num_seqs = np.int64(state_ids.shape[0])
    i = np.int64(0)
    high = num_seqs
    while high - i > np.int64(1):
        middle = (i + high) >> np.int64(1)
        if np.int64(cu_seqlens_q[middle]) <= t:
            i = middle
        else:
            high = middle
    inside = t < np.int64(cu_seqlens_q[high])
    j = t - np.int64(cu_seqlens_q[i])
    q_start = np.int64(seqlens_k[i]) - np.int64(seqlens_q[i])
    p = q_start + j
    state = np.int64(state_ids[i])
    start = valid_all
    if has_valid != 0:
        start = np.int64(valid[i])
    oldest = p - window + np.int64(1)
    if oldest < start:
        oldest = start
    if oldest < 0:
        oldest = np.int64(0)
    new = oldest - q_start  # new records before the oldest visible one
    skip = window  # history rows before it
    if new < 0:
        skip = window + new
        new = np.int64(0)

    positions[t] = p if inside else np.int64(0)
    token_state_ids[t] = state if inside else np.int64(-1)
    sees = inside and state >= 0
    pivots[t, 0] = i * window + skip if sees else np.int64(0)
    pivots[t, 1] = window - skip if sees else np.int64(0)
    pivots[t, 2] = num_seqs * window + t - j + new if sees else np.int64(0)
    pivots[t, 3] = j - new + np.int64(1) if sees else np.int64(0)


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
    sequence_threads: int = SEQUENCE_THREADS,
    token_threads: int = TOKEN_THREADS,
) -> None:
    """Fill the arrays of a `PrefillPlan` for num_seqs sequences; all arrays int32, CuPy (or NumPy
    in Numba's simulator), none allocated here, so that a CUDA graph can hold this call.

    In: state_ids, seqlens_q, seqlens_k [num_seqs]; swa_valid_start an int or int32 [num_seqs].
    Out: cu_seqlens_q [num_seqs + 1], positions and token_state_ids [T], segments [3 * num_seqs, 3]
    (rows past num_segments are (-1, 0, 0)), num_segments [1], pivots [T, 4]. Tokens past the last
    sequence's, where T is larger, are padding. Values are not checked.
    Raises ArgumentError for shapes, dtypes and places, PlanError for sizes.
    """
    window, ring_len = check_sizes(OP, window, ring_len)
    each = not isinstance(swa_valid_start, (int, np.integer))
    _check(
        {"seqlens_q": seqlens_q, "seqlens_k": seqlens_k, "state_ids": state_ids}
        | ({"swa_valid_start": swa_valid_start} if each else {}),
        {
            "cu_seqlens_q": cu_seqlens_q,
            "positions": positions,
            "token_state_ids": token_state_ids,
            "segments": segments,
            "num_segments": num_segments,
            "pivots": pivots,
        },
    )
    num_seqs, num_tokens = state_ids.shape[0], positions.shape[0]
    if num_seqs == 0:
        # Nothing to launch: an empty CuPy array has a null pointer. A fill is no kernel of ours.
        for array, value in ((cu_seqlens_q, 0), (num_segments, 0), (positions, 0), (pivots, 0)):
            array.fill(value)
        token_state_ids.fill(-1)
        return

    ready_numba()
    on = numba_stream(stream, state_ids)
    inputs = (
        device_view(state_ids),
        device_view(seqlens_q),
        device_view(seqlens_k),
        device_view(swa_valid_start if each else seqlens_q),
        np.int64(each),
        np.int64(0 if each else swa_valid_start),
        np.int64(window),
    )
    cu = device_view(cu_seqlens_q)
    copies = (device_view(segments), device_view(num_segments))
    sequences = configured(sequences_kernel, 1, sequence_threads, on)
    sequences(*inputs, np.int64(ring_len), cu, *copies)
    if num_tokens == 0:
        return
    per_token = (device_view(positions), device_view(token_state_ids), device_view(pivots))
    tokens = configured(tokens_kernel, div_ceil(num_tokens, token_threads), token_threads, on)
    tokens(*inputs, cu, *per_token)


def _check(inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """ArgumentError unless all arrays are int32, contiguous, in one place and fit together."""
    check_array(OP, "state_ids", inputs["state_ids"], I32, ((None, ""),))
    check_array(OP, "positions", outputs["positions"], I32, ((None, ""),))
    num_seqs = inputs["state_ids"].shape[0]
    tokens = (outputs["positions"].shape[0], "number of positions")
    axes = {
        "cu_seqlens_q": ((num_seqs + 1, "sequences + 1"),),
        "positions": (tokens,),
        "token_state_ids": (tokens,),
        "segments": (
            (MAX_SEGMENTS * num_seqs, f"{MAX_SEGMENTS} * sequences"),
            (3, "source, destination, rows"),
        ),
        "num_segments": ((1, "one count"),),
        "pivots": (tokens, (4, "two ranges")),
    }
    for name, array in inputs.items():
        check_array(OP, name, array, I32, ((num_seqs, "number of state_ids"),))
    for name, array in outputs.items():
        check_output(OP, name, array, I32, axes[name])
    backend_of(**inputs, **outputs)


def build_prefill_plan(
    state_ids: Any,
    seqlens_q: Any,
    seqlens_k: Any,
    *,
    window: int,
    ring_len: int,
    swa_valid_start: Any = 0,
    num_tokens: int | None = None,
    max_seqlen_q: int | None = None,
    stream: Any = None,
) -> PrefillPlan:
    """A prefill plan in CuPy arrays, allocated here; `schedules.plan_prefill` says what it holds.

    state_ids and seqlens_k become part of the plan (no copies). Only where num_tokens or
    max_seqlen_q is left out does this wait for the device.
    """
    import cupy

    window, ring_len = check_sizes(OP, window, ring_len)
    for name, array in (("state_ids", state_ids), ("seqlens_q", seqlens_q)):
        check_array(OP, name, array, I32, ((None, ""),))
    backend_of(state_ids=state_ids, seqlens_q=seqlens_q)
    if num_tokens is None or max_seqlen_q is None:
        lengths = read_back(OP, seqlens_q, "num_tokens and max_seqlen_q", stream)
        num_tokens = int(lengths.sum()) if num_tokens is None else num_tokens
        max_seqlen_q = int(lengths.max(initial=0)) if max_seqlen_q is None else max_seqlen_q
    num_seqs = state_ids.shape[0]
    with cupy_stream(stream):
        shapes = ((num_seqs + 1,), (num_tokens,), (num_tokens,))
        cu_seqlens_q, positions, token_states = (cupy.empty(shape, np.int32) for shape in shapes)
        segments = cupy.empty((MAX_SEGMENTS * num_seqs, 3), np.int32)
        num_segments = cupy.empty((1,), np.int32)
        pivots = cupy.empty((num_tokens, 4), np.int32)
        plan_prefill(
            state_ids,
            seqlens_q,
            seqlens_k,
            swa_valid_start,
            cu_seqlens_q,
            positions,
            token_states,
            segments,
            num_segments,
            pivots,
            window=window,
            ring_len=ring_len,
            stream=stream,
        )
    return PrefillPlan(
        window=window,
        ring_len=ring_len,
        num_seqs=num_seqs,
        max_seqlen_q=int(max_seqlen_q),
        cu_seqlens_q=cu_seqlens_q,
        state_ids=state_ids,
        seqlens_k=seqlens_k,
        positions=positions,
        token_state_ids=token_states,
        segments=segments,
        num_segments=num_segments,
        pivots=pivots,
    )
