"""window_attention from its definition, in float64: one query token after the other."""

from typing import Any

import numpy as np

from ..attention_checks import check_sequence_values, check_window_attention
from .attention import attend_token, narrow, wide


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
    round_weights: bool = False,
    rows: Any = None,
    stream: Any = None,
) -> None:
    """q bf16 or fp16 [Tq, Hq, D], k, v [Tk, Hkv, D] -> out like q, or float64 [Tq, Hq, D], lse
    float32 [Tq, Hq].

    `round_weights`: see `rounded_to` of `attend_token`. `rows`: of q that are computed, all where
    None; the other rows of out and lse stay as they are.
    """
    scalars = {
        "softmax_scale": softmax_scale,
        "window": window,
        "softcap": softcap,
        "sink_tokens": sink_tokens,
    }
    check_window_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, sink=sink, **scalars)
    check_sequence_values(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    rows = np.arange(q.shape[0]) if rows is None else np.asarray(rows)
    sequences = np.searchsorted(cu_seqlens_q, rows, side="right") - 1
    exact = np.zeros((len(rows), *q.shape[1:]))
    for i, (row, sequence) in enumerate(zip(rows.tolist(), sequences.tolist(), strict=True)):
        first_key, end = cu_seqlens_k[sequence : sequence + 2].tolist()
        position = (end - first_key) - (int(cu_seqlens_q[sequence + 1]) - row)
        visible = first_key + keys_of(position, window, sink_tokens)
        exact[i], lse[row] = attend_token(
            wide(q[row]),
            wide(k[visible]),
            wide(v[visible]),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sink=sink,
            rounded_to=(q.dtype if round_weights else None),
        )
    out[rows] = narrow(exact, out.dtype)


def keys_of(position: int, window: int | None, sink_tokens: int) -> np.ndarray:
    """The keys, ascending, that a query at `position` sees, from the definition."""
    key = np.arange(position + 1)
    near = key > position - window if window is not None else key >= 0
    return key[near | (key < sink_tokens)]
