"""Attention of one query token over its visible keys, from the definition."""

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from .apply_rope import cos_sin, rotate
from .bf16 import bf16_to_float32, float_to_bf16
from .dequantize_mxfp8 import dequantized


def decode_records(records: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """records uint8 [n, record_bytes] -> float64 [n, head_dim], as float32 would hold them."""
    if fmt.type == "bf16":
        return bf16_to_float32(records.view(np.uint16)).astype(np.float64)
    values, scales = records[:, : fmt.value_bytes], records[:, fmt.value_bytes :]
    with np.errstate(over="ignore"):
        return dequantized(values, scales).astype(np.float32).astype(np.float64)


def attend_token(
    q: np.ndarray,
    keys: np.ndarray,
    *,
    softmax_scale: float,
    sink: np.ndarray | None,
    round_weights: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """q float64 [H, D], keys (values too) float64 [n, D] -> out float64 [H, D], lse float64 [H].

    s = (q . k) * softmax_scale; out = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m));
    lse = m + ln sum exp(s - m), without the sink. No key: out 0, lse -inf.
    `round_weights` rounds exp(s - m) to bf16 for the sum over v: what tensor cores are given.
    """
    if keys.shape[0] == 0:
        return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        scores = (q @ keys.T) * softmax_scale  # [H, n]
        m = scores.max(axis=1, keepdims=True)  # [H, 1]; NaN where a score is NaN
        weights = np.exp(scores - m)  # [H, n]
        total = weights.sum(axis=1, keepdims=True)  # [H, 1]
        denominator = total if sink is None else total + np.exp(sink[:, None] - m)
        if round_weights:
            weights = bf16_to_float32(float_to_bf16(weights)).astype(np.float64)
        out = (weights @ keys) / denominator  # [H, D]
        return out, (m + np.log(total))[:, 0]


def rotate_back(out: np.ndarray, positions: np.ndarray, rope: Rope | None) -> np.ndarray:
    """out float64 [T, H, D] with its last dims rotated backwards by the query's position."""
    if rope is None:
        return out
    cos, sin = (part.astype(np.float64)[:, None] for part in cos_sin(rope, positions))
    first = out.shape[2] - rope.dims
    turned = rotate(out[:, :, first:], cos, sin, rope, inverse=True)
    return np.concatenate([out[:, :, :first], turned], axis=2)


def write_output(exact: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` (float64, or bf16 as bfloat16 or uint16) from float64 values."""
    if out.dtype == np.float64:
        out[...] = exact
    else:
        out.view(np.uint16)[...] = float_to_bf16(exact)
