"""encode_records: rotate, round to bf16, quantize. This is the rule of a record's bytes."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from ..arrays import bf16_bits
from ..checks import check_encode_records
from .apply_rope import apply_rope
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
    """kv bf16 [T, D], positions int32 [T] (None without rope) -> out uint8 [T, record_bytes].

    With `rope` the vectors are rotated in float32 and rounded to bf16; without it they are taken as
    they are. An mxfp8 record is then D elements and D / 32 scales, a bf16 record the bits.
    """
    check_encode_records(kv, positions, out, record_format, rope)
    turned = bf16_bits(kv, "kv")  # [T, D]
    if rope is not None:
        turned = np.empty_like(turned)
        apply_rope(bf16_bits(kv, "kv")[:, None], positions, turned[:, None], rope=rope)
    if record_format.type == "bf16":
        out[...] = turned.view(np.uint8)
        return
    values = np.empty(turned.shape, np.uint8)
    scales = np.empty((turned.shape[0], record_format.scale_bytes), np.uint8)
    quantize_mxfp8(
        turned,
        values,
        scales,
        scale_rounding=record_format.scale_rounding,
        amax_floor=record_format.amax_floor,
    )
    out[:, : record_format.value_bytes] = values
    out[:, record_format.value_bytes :] = scales
