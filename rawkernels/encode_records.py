"""encode_records: vectors to the bytes of records."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.formats import RecordFormat
from ..layouts.rope import Rope
from .arrays import as_array, backend_of, empty_like_backend
from .checks import check_latent_format
from .operations import operation


def encode_records(
    kv: Any,
    record_format: RecordFormat,
    positions: Any = None,
    rope: Rope | None = None,
    out: Any = None,
    *,
    stream: Any = None,
) -> Any:
    """Records of `kv`, uint8 [T, record_bytes]; returns `out`.

    kv: bf16 (bfloat16 or uint16 bits) [T, head_dim], not rotated; positions int32 [T], needed with
    `rope`. Rotated in float32, rounded to bf16, then quantized as the format says.
    Raises ArgumentError for a format that is not latent mxfp8 or bf16, and for other shapes.
    """
    check_latent_format("encode_records", record_format)
    kv = as_array(kv, "kv")
    positions = None if positions is None else as_array(positions, "positions")
    if out is None:
        if len(kv.shape) != 2:
            raise ArgumentError(f"encode_records: kv.shape={tuple(kv.shape)} but must be [T, D]")
        out = empty_like_backend((kv.shape[0], record_format.record_bytes), np.uint8, kv)
    target = as_array(out, "out")
    operation(backend_of(kv=kv, positions=positions, out=target), "encode_records")(
        kv, positions, target, record_format=record_format, rope=rope, stream=stream
    )
    return out
