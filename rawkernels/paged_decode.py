"""paged_decode: attention of decode steps over all keys of their sequences in a paged pool."""

from typing import Any

import numpy as np

from ..layouts.paged import PagedLayout
from .arrays import BF16, FP16, as_array, backend_of, empty_like_backend
from .operations import operation


def paged_decode(
    q: Any,
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: Any = None,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention output and log-sum-exp (out, lse) of T query tokens, each over positions 0 .. p of
    its sequence.

    q: bf16 (bfloat16 or uint16 bits), or float16 for fp16 records, [T, num_q_heads, head_dim],
    rotated; query head h reads KV head h // (num_q_heads / num_kv_heads). pool: flat uint8, the new
    keys stored already; block_tables: int32 [num_seqs, max_blocks]; seq_ids: int32 [T], the row of
    each token, -1 for padding; positions: int32 [T]. sink: float32 [num_q_heads], a logit in the
    denominator only; softcap c > 0: scores become c tanh(s / c). out like q, lse float32 [T,
    num_q_heads], natural, without the sink. Padding gives 0 and -inf. Formulas:
    s = (q . k) * softmax_scale, o = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m)).

    Raises ArgumentError for other shapes, dtypes, strides or devices and, on the host, for an id, a
    position or a block out of range.
    """
    q, pool = as_array(q, "q"), as_array(pool, "pool")
    sink = None if sink is None else as_array(sink, "sink")
    arrays = {
        "block_tables": as_array(block_tables, "block_tables"),
        "seq_ids": as_array(seq_ids, "seq_ids"),
        "positions": as_array(positions, "positions"),
    }
    out = empty_like_backend(q.shape, FP16 if q.dtype == FP16 else BF16, q) if out is None else out
    lse = empty_like_backend(q.shape[:2], np.float32, q) if lse is None else lse
    results = {"out": as_array(out, "out"), "lse": as_array(lse, "lse")}
    backend = backend_of(q=q, pool=pool, **arrays, **results)
    operation(backend, "paged_decode")(
        q,
        pool,
        layout,
        layer,
        *arrays.values(),
        *results.values(),
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        stream=stream,
    )
    return out, lse
