"""Decode plans on the device: a Numba CUDA kernel, without host synchronisation.

grid (T); block 128 threads: a block fills one token's row, a thread every 128th column of `index`
bound by writing index, T x W' x 4 B; a launch costs more than that (numba_cuda.py)
"""

from typing import Any

import numpy as np
from numba import cuda

from ...layouts.errors import PlanError
from ...layouts.plans import DecodePlan
from ..arrays import backend_of
from ..checks import I32, check_array, check_output
from ..device.streams import cupy_stream
from ..plan_checks import BLOCK, CAUSAL, MAX_ROW, check_sizes, index_width, mode_code
from .numba_cuda import configured, device_view, numba_stream, read_back, ready_numba

OP = "plan_decode"
THREADS = 128

# Operands are np.int64 throughout: the simulator computes with NumPy scalars, where int32 wraps.
# No min() and max(): Numba 0.68 compiles them to calls, and only with a GPU there.


@cuda.jit
def decode_kernel(
    state_ids,  # int32 [T]
    positions,  # int32 [T]
    cu_seqlens_q,  # int32 [num_seqs + 1]; not read in mode causal
    valid,  # int32 [T]; read where has_valid is 1
    has_valid,
    valid_all,
    window,
    ring_len,
    mode,
    offset_len,  # int32 [T, 2]
    index,  # int32 [T, W']
):
    t = np.int64(cuda.blockIdx.x)
    state = np.int64(state_ids[t])
    first = np.int64(positions[t])
    newest = first
    if mode != CAUSAL:
        # The sequence of token t: the last one that begins at or before it (so never an empty one).
        low = np.int64(0)
        high = np.int64(cu_seqlens_q.shape[0]) - np.int64(1)
        while high - low > np.int64(1):
            middle = (low + high) >> np.int64(1)
            if np.int64(cu_seqlens_q[middle]) <= t:
                low = middle
            else:
                high = middle
        begin = np.int64(cu_seqlens_q[low])
        end = np.int64(cu_seqlens_q[high])
        if t >= end:
            state = np.int64(-1)  # past the last sequence: padding
        else:
            first = np.int64(positions[begin])
            if mode == BLOCK or t > begin:
                last = t
                while last + np.int64(1) < end and state_ids[last + np.int64(1)] >= 0:
                    last += np.int64(1)
                newest = np.int64(positions[last])

    oldest = first - window + np.int64(1)
    if mode == BLOCK:
        oldest -= np.int64(1)  # the anchor is the position before the block
    start = valid_all
    if has_valid != 0:
        start = np.int64(valid[t])
    if oldest < start:
        oldest = start
    if oldest < 0:
        oldest = np.int64(0)
    base = state * ring_len
    length = newest - oldest + np.int64(1)
    if length < 0 or state < 0 or base + ring_len - np.int64(1) > MAX_ROW:
        length = np.int64(0)
    at = oldest % ring_len

    thread = np.int64(cuda.threadIdx.x)
    if thread == 0:
        offset_len[t, 0] = base + at if length > 0 else np.int64(0)
        offset_len[t, 1] = length
    column = thread
    while column < index.shape[1]:
        row = np.int64(-1)
        if column < length:
            row = base + (at + column) % ring_len
        index[t, column] = row
        column += np.int64(cuda.blockDim.x)


def plan_decode(
    state_ids: Any,
    positions: Any,
    cu_seqlens_q: Any,
    swa_valid_start: Any,
    offset_len: Any,
    index: Any,
    *,
    window: int,
    ring_len: int,
    mode: str,
    stream: Any = None,
    threads: int = THREADS,
) -> None:
    """Fill offset_len [T, 2] and index [T, W'] for T tokens; all arrays int32, CuPy (or NumPy in
    Numba's simulator), none allocated here, so that a CUDA graph can hold this call.

    state_ids, positions [T]; cu_seqlens_q [num_seqs + 1]; swa_valid_start an int or int32 [T].
    Values are not checked. Padding (state id below 0, or a token past cu_seqlens_q in the modes
    that read it) and tokens that see nothing have offset 0, length 0 and index -1.
    Raises ArgumentError for shapes, dtypes and places, PlanError for sizes.
    """
    window, ring_len = check_sizes(OP, window, ring_len)
    code = mode_code(OP, mode)
    check_array(OP, "state_ids", state_ids, I32, ((None, ""),))
    num_tokens = state_ids.shape[0]
    tokens = (num_tokens, "number of state_ids")
    check_array(OP, "positions", positions, I32, (tokens,))
    check_array(OP, "cu_seqlens_q", cu_seqlens_q, I32, ((None, ""),))
    check_output(OP, "offset_len", offset_len, I32, (tokens, (2, "offset and length")))
    check_output(OP, "index", index, I32, (tokens, (None, "")))
    each = not isinstance(swa_valid_start, (int, np.integer))
    if each:
        check_array(OP, "swa_valid_start", swa_valid_start, I32, (tokens,))
    backend_of(
        state_ids=state_ids,
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        swa_valid_start=swa_valid_start if each else None,
        offset_len=offset_len,
        index=index,
    )
    if num_tokens == 0:
        return  # an empty CuPy array has a null pointer, and a grid of 0 blocks is an error
    if cu_seqlens_q.shape[0] < 2:
        raise PlanError(f"{OP}: {num_tokens} tokens but cu_seqlens_q has no sequence")

    ready_numba()
    on = numba_stream(stream, state_ids)
    configured(decode_kernel, num_tokens, threads, on)(
        device_view(state_ids),
        device_view(positions),
        device_view(cu_seqlens_q),
        device_view(swa_valid_start if each else positions),
        np.int64(each),
        np.int64(0 if each else swa_valid_start),
        np.int64(window),
        np.int64(ring_len),
        np.int64(code),
        device_view(offset_len),
        device_view(index),
    )


def build_decode_plan(
    state_ids: Any,
    positions: Any,
    *,
    window: int,
    ring_len: int,
    mode: str,
    swa_valid_start: Any = 0,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    stream: Any = None,
) -> DecodePlan:
    """A decode plan in CuPy arrays, allocated here; `schedules.plan_decode` says what it holds.

    state_ids, positions and cu_seqlens_q become part of the plan (no copies). Only where
    max_seqlen_q is left out and the mode needs it does this wait for the device.
    """
    import cupy

    window, ring_len = check_sizes(OP, window, ring_len)
    check_array(OP, "state_ids", state_ids, I32, ((None, ""),))
    if cu_seqlens_q is not None:
        check_array(OP, "cu_seqlens_q", cu_seqlens_q, I32, ((None, ""),))
        backend_of(state_ids=state_ids, cu_seqlens_q=cu_seqlens_q)
    if max_seqlen_q is None:
        if cu_seqlens_q is None:
            max_seqlen_q = min(1, state_ids.shape[0])
        elif mode == "causal":
            max_seqlen_q = state_ids.shape[0]  # a bound: only the modes with blocks need it
        else:
            lengths = np.diff(read_back(OP, cu_seqlens_q, "max_seqlen_q", stream))
            max_seqlen_q = int(lengths.max(initial=0))
    num_tokens = state_ids.shape[0]
    with cupy_stream(stream):
        if cu_seqlens_q is None:
            cu_seqlens_q = cupy.arange(num_tokens + 1, dtype=np.int32)
        offset_len = cupy.empty((num_tokens, 2), np.int32)
        index = cupy.empty((num_tokens, index_width(mode, window, max_seqlen_q)), np.int32)
    plan_decode(
        state_ids,
        positions,
        cu_seqlens_q,
        swa_valid_start,
        offset_len,
        index,
        window=window,
        ring_len=ring_len,
        mode=mode,
        stream=stream,
    )
    return DecodePlan(
        window=window,
        ring_len=ring_len,
        num_seqs=cu_seqlens_q.shape[0] - 1,
        max_seqlen_q=int(max_seqlen_q),
        cu_seqlens_q=cu_seqlens_q,
        state_ids=state_ids,
        positions=positions,
        offset_len=offset_len,
        index=index,
    )
