"""window_attention: causal attention over grouped heads, in a window or over all keys."""

from typing import Any

import numpy as np

from .arrays import BF16, FP16, as_array, backend_of, empty_like_backend
from .operations import operation


def window_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sink: Any = None,
    sink_tokens: int = 0,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention output and log-sum-exp (out, lse) of a batch of sequences: whole prompts, chunks
    after earlier keys, or decode steps.

    q: [Tq, num_q_heads, head_dim], k and v: [Tk, num_kv_heads, head_dim] (k rotated), all bf16
    (bfloat16 or uint16 bits) or all float16; query head h reads KV head h // (num_q_heads /
    num_kv_heads). cu_seqlens_q, cu_seqlens_k: int32 [num_seqs + 1], where each sequence starts, and
    the ends; the keys of a sequence are its positions 0, 1, .., and its queries are the last ones
    of them: query i of a sequence sits at p = seqlen_k - seqlen_q + i and sees keys max(0, p -
    window + 1) .. p, and keys below `sink_tokens` up to p. window: None for all keys up to p.
    softcap c > 0: scores become c tanh(s / c). sink: float32 [num_q_heads], a logit in the
    denominator only. out like q, lse float32 [Tq, num_q_heads], natural, without the sink. A query
    that sees no key (seqlen_q > seqlen_k) gives 0 and -inf. Formulas:
    s = (q . k) * softmax_scale, o = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m)).
    Raises ArgumentError for other shapes, dtypes, strides or devices; for sequence ends that fall
    or leave their arrays on the host only, where looking at them costs nothing.
    """
    q, k, v = as_array(q, "q"), as_array(k, "k"), as_array(v, "v")
    cu_seqlens_q = as_array(cu_seqlens_q, "cu_seqlens_q")
    cu_seqlens_k = as_array(cu_seqlens_k, "cu_seqlens_k")
    sink = None if sink is None else as_array(sink, "sink")
    dtype = FP16 if q.dtype == FP16 else BF16
    out = empty_like_backend(q.shape, dtype, q) if out is None else out
    lse = empty_like_backend(q.shape[:2], np.float32, q) if lse is None else lse
    out_array, lse_array = as_array(out, "out"), as_array(lse, "lse")
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    backend = backend_of(q=q, k=k, v=v, **ends, sink=sink, out=out_array, lse=lse_array)
    operation(backend, "window_attention")(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out_array,
        lse_array,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sink=sink,
        sink_tokens=sink_tokens,
        stream=stream,
    )
    return out, lse
