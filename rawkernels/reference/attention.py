"""Attention of one query token over its visible keys, from the definition."""

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from ..arrays import FP16, bf16_bits
from .apply_rope import cos_sin, rotate
from .bf16 import bf16_to_float32, float_to_bf16
from .dequantize_mxfp8 import dequantized
from .fp16 import float_to_fp16


def decode_records(records: np.ndarray, fmt: RecordFormat) -> tuple[np.ndarray, np.ndarray]:
    """records uint8 [n, record_bytes] -> K and V, float64 [n, num_kv_heads, head_dim] each, as
    float32 would hold them. A latent record is both."""
    parts = [
        decode_part(records[:, i * fmt.part_bytes : (i + 1) * fmt.part_bytes], fmt)
        for i in range(fmt.num_parts)
    ]
    return parts[0], parts[-1]


def decode_part(part: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """part uint8 [n, part_bytes] -> float64 [n, num_kv_heads, head_dim]."""
    shape = (part.shape[0], fmt.num_kv_heads, fmt.head_dim)
    if fmt.type == "mxfp8":
        values, scales = part[:, : fmt.part_value_bytes], part[:, fmt.part_value_bytes :]
        with np.errstate(over="ignore"):
            return dequantized(values, scales).astype(np.float32).astype(np.float64).reshape(shape)
    words = np.ascontiguousarray(part).view(np.uint16 if fmt.type == "bf16" else np.float16)
    return wide(words).reshape(shape)


def wide(x: np.ndarray) -> np.ndarray:
    """float64 of bf16 (bfloat16 or uint16 bits) or float16 values, exact."""
    if x.dtype == FP16:
        return x.astype(np.float64)
    return bf16_to_float32(bf16_bits(x, "x")).astype(np.float64)


def attend_token(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    softmax_scale: float,
    sink: np.ndarray | None,
    softcap: float = 0.0,
    rounded_to: np.dtype | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q float64 [H, D], keys and values float64 [n, Hkv, D] -> out float64 [H, D], lse float64 [H].
    Query head h reads KV head h // (H / Hkv).

    s = (q . k) * softmax_scale, then softcap * tanh(s / softcap) where softcap is not 0;
    out = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m));
    lse = m + ln sum exp(s - m), without the sink. No key: out 0, lse -inf.
    `rounded_to` rounds exp(s - m) to that dtype for the sum over v: what tensor cores are given.
    """
    heads, kv_heads = q.shape[0], keys.shape[1]
    if keys.shape[0] == 0:
        return np.zeros(q.shape), np.full(heads, -np.inf)
    group = heads // kv_heads  # exact: checked
    groups = q.reshape(kv_heads, group, q.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        scores = (groups @ keys.transpose(1, 2, 0)).reshape(heads, keys.shape[0])
        scores = scores * softmax_scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        m = scores.max(axis=1, keepdims=True)  # [H, 1]; NaN where a score is NaN
        weights = np.exp(scores - m)  # [H, n]
        total = weights.sum(axis=1, keepdims=True)  # [H, 1]
        denominator = total if sink is None else total + np.exp(sink[:, None] - m)
        if rounded_to is not None:
            weights = wide(narrow(weights, rounded_to))
        by_group = weights.reshape(kv_heads, group, keys.shape[0])
        out = (by_group @ values.transpose(1, 0, 2)).reshape(q.shape) / denominator  # [H, D]
        return out, (m + np.log(total))[:, 0]


def narrow(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 values as float64, as float16, or as bf16 (bfloat16 or uint16 bits)."""
    if dtype == np.float64:
        return x
    if dtype == FP16:
        with np.errstate(over="ignore"):
            return float_to_fp16(x.astype(np.float32)).view(np.float16)
    return float_to_bf16(x).view(dtype)


def rotate_back(out: np.ndarray, positions: np.ndarray, rope: Rope | None) -> np.ndarray:
    """out float64 [T, H, D] with its last dims rotated backwards by the query's position."""
    if rope is None:
        return out
    cos, sin = (part.astype(np.float64)[:, None] for part in cos_sin(rope, positions))
    first = out.shape[2] - rope.dims
    turned = rotate(out[:, :, first:], cos, sin, rope, inverse=True)
    return np.concatenate([out[:, :, :first], turned], axis=2)


def write_output(exact: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` (float64, float16, or bf16 as bfloat16 or uint16) from float64 values."""
    out[...] = narrow(exact, out.dtype)
