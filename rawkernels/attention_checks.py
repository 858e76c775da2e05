"""What every backend of window_attention checks first, and the checks of values on the host."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.sizes import is_count
from .arrays import BF16, FP16, UINT16
from .checks import (
    EXACT_OUT,
    F32,
    I32,
    check_array,
    check_output,
    check_place,
    check_score_numbers,
)

OP = "window_attention"
_SAME_VALUES = ((BF16, UINT16), (FP16,))  # dtypes of one call


def check_window_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: Any,
    window: Any,
    softcap: Any,
    sink: Any,
    sink_tokens: Any,
) -> None:
    """ArgumentError unless shapes, dtypes, strides, devices and scalars are those of the
    operation."""
    any_axis = (None, "")
    check_array(OP, "q", q, (BF16, UINT16, FP16), (any_axis, any_axis, any_axis))
    dtypes = next(group for group in _SAME_VALUES if q.dtype in group)
    head_dim = (q.shape[2], "q.shape[2]")
    check_array(OP, "k", k, dtypes, (any_axis, any_axis, head_dim))
    tokens, kv_heads = (k.shape[0], "k.shape[0]"), (k.shape[1], "k.shape[1]")
    check_array(OP, "v", v, dtypes, (tokens, kv_heads, head_dim))
    rows, heads = (q.shape[0], "q.shape[0]"), (q.shape[1], "q.shape[1]")
    check_output(OP, "out", out, (*dtypes, EXACT_OUT), (rows, heads, head_dim))
    check_output(OP, "lse", lse, F32, (rows, heads))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ArgumentError(
            f"{OP}: num_q_heads={q.shape[1]} is no multiple of num_kv_heads={k.shape[1]}"
        )
    check_array(OP, "cu_seqlens_q", cu_seqlens_q, I32, (any_axis,))
    if cu_seqlens_q.shape[0] == 0:
        raise ArgumentError(f"{OP}: cu_seqlens_q is empty but has num_seqs + 1 numbers")
    ends = (cu_seqlens_q.shape[0], "cu_seqlens_q.shape[0]")
    check_array(OP, "cu_seqlens_k", cu_seqlens_k, I32, (ends,))
    if sink is not None:
        check_array(OP, "sink", sink, F32, (heads,))
    check_place(
        OP,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sink=sink,
        out=out,
        lse=lse,
    )
    check_score_numbers(OP, softmax_scale, softcap)
    _check_window(window, sink_tokens)


def _check_window(window: Any, sink_tokens: Any) -> None:
    if window is not None and (not is_count(window) or window < 1):
        raise ArgumentError(
            f"{OP}: window={window!r} but must be an integer of at least 1, the number of keys "
            "that a query sees, itself included; None: all"
        )
    if not is_count(sink_tokens) or sink_tokens < 0:
        raise ArgumentError(
            f"{OP}: sink_tokens={sink_tokens!r} but must be an integer of at least 0"
        )


def check_sequence_values(cu_seqlens_q: Any, cu_seqlens_k: Any, q_rows: int, k_rows: int) -> None:
    """The sequences of q fill it, and those of k lie inside it; on the host only."""
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if ends[0] != 0:
            raise ArgumentError(f"{OP}: {name}[0]={ends[0]} but must be 0")
        falls = np.flatnonzero(ends[1:] < ends[:-1])
        if falls.size:
            i = int(falls[0]) + 1
            raise ArgumentError(f"{OP}: {name}[{i}]={ends[i]} but {name}[{i - 1}]={ends[i - 1]}")
    if cu_seqlens_q[-1] != q_rows:
        raise ArgumentError(f"{OP}: cu_seqlens_q[-1]={cu_seqlens_q[-1]} but q.shape[0]={q_rows}")
    if cu_seqlens_k[-1] > k_rows:
        raise ArgumentError(f"{OP}: cu_seqlens_k[-1]={cu_seqlens_k[-1]} but k.shape[0]={k_rows}")
