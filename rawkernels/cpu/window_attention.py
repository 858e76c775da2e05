"""window_attention on the CPU: the window is loop bounds, a token's keys are two ranges of rows."""

import math
from typing import Any

import numpy as np
from numba import prange

from ..arrays import BF16, FP16, UINT16, bf16_bits
from ..attention_checks import check_sequence_values, check_window_attention
from .attention_kernel import ATTENTION_TURNS, HEADS_PER_TILE, _scores, _softmax, _weigh
from .codec import BF16_NAN
from .kernels import attention_function, kernel, launch


@attention_function
def _cap(weight, softcap):
    """weight [4, n] = softcap * tanh(weight / softcap)."""
    for h in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            weight[h, j] = softcap * np.float32(math.tanh(weight[h, j] / softcap))


@kernel
def _attend_grouped(q, keys, values, ranges, scale, softcap, sink, out, lse):
    """q, out float32 [T, Hq, D]; keys, values float32 [Hkv, rows, D]; ranges int64 [T, 4]; sink
    float32 [Hq]; lse float32 [T, Hq]. Up to four heads of one group read each key together."""
    tokens, heads, dim = q.shape
    group = heads // keys.shape[0]  # exact
    tiles = (group + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    per_token = keys.shape[0] * tiles
    for item in prange(tokens * per_token):
        t, kv_head = item // per_token, item % per_token // tiles
        first = item % tiles * HEADS_PER_TILE
        h0, tile_heads = kv_head * group + first, min(HEADS_PER_TILE, group - first)
        length = ranges[t, 1] + ranges[t, 3]
        query = np.zeros((HEADS_PER_TILE, dim), np.float32)  # heads past the last one stay 0
        for h in range(tile_heads):
            for d in range(dim):
                query[h, d] = q[t, h0 + h, d]
        weight = np.zeros((HEADS_PER_TILE, length), np.float32)
        _scores(query, keys[kv_head], ranges, t, scale, weight)
        if softcap > np.float32(0):
            _cap(weight, softcap)
        divisor = np.ones(HEADS_PER_TILE, np.float32)
        for h in range(tile_heads):
            lse[t, h0 + h] = np.float32(-np.inf)
            if length > 0:
                m, total = _softmax(weight, h)
                lse[t, h0 + h] = m + math.log(total)
                divisor[h] = total + math.exp(sink[h0 + h] - m)
        acc = np.zeros((HEADS_PER_TILE, dim), np.float32)
        _weigh(weight, values[kv_head], ranges, t, acc)
        for h in range(tile_heads):
            for d in range(dim):
                out[t, h0 + h, d] = acc[h, d] / divisor[h]


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
    # exp(-inf) = 0: no sink.
    logits = np.full(q.shape[1], -np.inf, np.float32) if sink is None else sink
    exact = np.empty(q.shape, np.float32)
    work = int(ranges[:, 1::2].sum()) * q.shape[1] * q.shape[2]
    launch(
        _attend_grouped,
        work // ATTENTION_TURNS,
        widened(q),
        np.ascontiguousarray(widened(k).swapaxes(0, 1)),
        np.ascontiguousarray(widened(v).swapaxes(0, 1)),
        ranges,
        np.float32(softmax_scale),
        np.float32(softcap),
        logits,
        exact,
        lse,
    )
    narrow_to(exact, out)


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


def narrow_to(exact: np.ndarray, out: np.ndarray) -> None:
    """Rounds float32 values to the dtype of `out`, to nearest even; a NaN of bf16 is 0x7FC0."""
    if out.dtype in (BF16, UINT16):
        bits = exact.astype(BF16).view(np.uint16)
        bits[np.isnan(exact)] = BF16_NAN
        bf16_bits(out, "out")[...] = bits
    else:
        out[...] = exact
