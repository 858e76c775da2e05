"""window_attention on the CPU: the window is loop bounds, a token's keys are two ranges of rows."""

from typing import Any

import numpy as np

from ..arrays import FP16, bf16_bits
from ..attention_checks import check_sequence_values, check_window_attention
from .attention_kernel import attend


def window_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sink: Any = None,
    sink_tokens: int = 0,
    stream: Any = None,
) -> None:
    """q bf16 or fp16 [Tq, Hq, D], k, v [Tk, Hkv, D] -> out like q, lse float32 [Tq, Hq]."""
    scalars = {
        "softmax_scale": softmax_scale,
        "window": window,
        "softcap": softcap,
        "sink_tokens": sink_tokens,
    }
    check_window_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, sink=sink, **scalars)
    check_sequence_values(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    if q.size == 0:
        return
    ranges = visible_ranges(cu_seqlens_q, cu_seqlens_k, window, sink_tokens)
    attend(
        q,
        widened(k),
        widened(v),
        ranges,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        rope_out=None,
        positions=np.zeros(q.shape[0], np.int32),  # only an inverse rotation reads them
    )


def visible_ranges(
    cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray, window: int | None, sink_tokens: int
) -> np.ndarray:
    """int64 [Tq, 4]: (start, length, start, length) in rows of k of each token's keys, first keys
    that lie before its window and the window."""
    ends_q, ends_k = cu_seqlens_q.astype(np.int64), cu_seqlens_k.astype(np.int64)
    seqlens_q, seqlens_k = np.diff(ends_q), np.diff(ends_k)
    sequence = np.repeat(np.arange(len(seqlens_q)), seqlens_q)
    row = np.arange(ends_q[-1]) - ends_q[sequence]
    position = seqlens_k[sequence] - seqlens_q[sequence] + row
    span = position + 1 if window is None else min(window, np.iinfo(np.int32).max)
    oldest = np.maximum(position - span + 1, 0)
    start = ends_k[sequence]
    kept = np.minimum(oldest, min(sink_tokens, np.iinfo(np.int32).max))
    length = np.maximum(position - oldest + 1, 0)  # 0 before all keys
    return np.stack([start, kept, start + oldest, length], axis=1)


def widened(x: np.ndarray) -> np.ndarray:
    """float32 of bf16 (bfloat16 or uint16 bits) or float16 values, exact."""
    if x.dtype == FP16:
        return x.astype(np.float32)
    return (bf16_bits(x, "x").astype(np.uint32) << np.uint32(16)).view(np.float32)
