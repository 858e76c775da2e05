"""window_attention from its definition, in float64: one query token after the other."""

from typing import Any

import numpy as np

from ..arrays import FP16, bf16_bits
from ..attention_checks import check_sequence_values, check_window_attention
from .bf16 import bf16_to_float32, float_to_bf16


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

    `round_weights`: see `attend_query`. `rows`: of q that are computed, all where None; the other
    rows of out and lse stay as they are.
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
        exact[i], lse[row] = attend_query(
            wide(q[row]),
            wide(k[visible]),
            wide(v[visible]),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sink=sink,
            rounded_to=(q.dtype if round_weights else None),
        )
    out[rows] = exact if out.dtype == np.float64 else narrow(exact, out.dtype)


def keys_of(position: int, window: int | None, sink_tokens: int) -> np.ndarray:
    """The keys, ascending, that a query at `position` sees, from the definition."""
    key = np.arange(position + 1)
    near = key > position - window if window is not None else key >= 0
    return key[near | (key < sink_tokens)]


def attend_query(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float,
    softcap: float,
    sink: np.ndarray | None,
    rounded_to: np.dtype | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q float64 [Hq, D], k, v float64 [n, Hkv, D] -> out float64 [Hq, D], lse float64 [Hq].

    s = (q . k) * softmax_scale, then softcap * tanh(s / softcap) where softcap > 0;
    out = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m)); lse = m + ln sum exp(s - m), without
    the sink. No key: out 0, lse -inf. `rounded_to` rounds exp(s - m) to that dtype for the sum over
    v: what tensor cores are given.
    """
    num_q_heads, num_kv_heads = q.shape[0], k.shape[1]
    if k.shape[0] == 0:
        return np.zeros(q.shape), np.full(num_q_heads, -np.inf)
    grouped = q.reshape(num_kv_heads, -1, q.shape[1])  # heads of one KV head follow each other
    with np.errstate(invalid="ignore", over="ignore"):
        scores = (grouped @ k.transpose(1, 2, 0)).reshape(num_q_heads, -1)  # [Hq, n]
        scores = scores * softmax_scale
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        m = scores.max(axis=1, keepdims=True)  # [Hq, 1]; NaN where a score is NaN
        weights = np.exp(scores - m)  # [Hq, n]
        total = weights.sum(axis=1, keepdims=True)
        denominator = total if sink is None else total + np.exp(sink[:, None] - m)
        if rounded_to is not None:
            weights = wide(narrow(weights, rounded_to))
        grouped = weights.reshape(num_kv_heads, -1, k.shape[0])
        out = (grouped @ v.transpose(1, 0, 2)).reshape(q.shape) / denominator  # [Hq, D]
        return out, (m + np.log(total))[:, 0]


def wide(x: np.ndarray) -> np.ndarray:
    """float64 of a bf16 (bfloat16 or uint16 bits) or float16 array, exact."""
    if x.dtype == FP16:
        return x.astype(np.float64)
    return bf16_to_float32(bf16_bits(x, "x")).astype(np.float64)


def narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 values rounded to float16, or to bf16 as `dtype` (bfloat16 or uint16 bits)."""
    if dtype == FP16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    return float_to_bf16(x).view(dtype)
