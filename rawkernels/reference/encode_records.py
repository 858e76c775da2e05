"""encode_records: rotate, round to bf16, quantize. This is the rule of a record's bytes."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from ..arrays import FP16, kv_parts, value_bits
from ..record_checks import check_encode_records
from .apply_rope import apply_rope, cos_sin, rotate
from .fp16 import float_to_fp16
from .quantize_mxfp8 import quantize_mxfp8


def encode_records(
    kv: Any,
    positions: Any,
    out: Any,
    *,
    record_format: RecordFormat,
    rope: Rope | None = None,
    stream: Any = None,
) -> None:
    """kv bf16 [T, D], or (k, v) of bf16 or float16 [T, H, D] each; positions int32 [T] (None
    without rope) -> out uint8 [T, record_bytes].

    With `rope` the vectors, or K alone, are rotated in float32 and rounded to their own type;
    without it they are taken as they are. The part of an mxfp8 record is then H * D elements and
    H * D / 32 scales, that of a bf16 or fp16 record the bits.
    """
    tokens = check_encode_records(kv, positions, out, record_format, rope)
    heads, dim = record_format.num_kv_heads, record_format.head_dim
    split, end = record_format.part_value_bytes, record_format.part_bytes
    for i, part in enumerate(kv_parts(kv)):
        vectors = part.reshape(tokens, heads, dim)  # [T, H, D]
        turned = rotated_bits(vectors, positions, rope if i == 0 else None)
        flat = turned.reshape(tokens, heads * dim)  # uint16 [T, H * D]
        record = out[:, i * end : (i + 1) * end]
        if record_format.type != "mxfp8":
            record[...] = np.ascontiguousarray(flat).view(np.uint8)
            continue
        values = np.empty(flat.shape, np.uint8)
        scales = np.empty((tokens, end - split), np.uint8)
        quantize_mxfp8(
            flat,
            values,
            scales,
            scale_rounding=record_format.scale_rounding,
            amax_floor=record_format.amax_floor,
        )
        record[:, :split], record[:, split:] = values, scales


def rotated_bits(vectors: np.ndarray, positions: Any, rope: Rope | None) -> np.ndarray:
    """Bits uint16 [T, H, D] of bf16 or float16 vectors, rotated where `rope` is given."""
    bits = value_bits(vectors, "kv")
    if rope is None:
        return bits
    turned = bits.copy()
    if vectors.dtype != FP16:
        apply_rope(bits, positions, turned, rope=rope)
        return turned
    first = vectors.shape[2] - rope.dims
    cos, sin = (part[:, None] for part in cos_sin(rope, positions))  # [T, 1, dims / 2]
    exact = vectors[:, :, first:].astype(np.float32)
    turned[:, :, first:] = float_to_fp16(rotate(exact, cos, sin, rope, False))
    return turned
