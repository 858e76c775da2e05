"""encode_records: vectors to the bytes of records."""

from typing import Any

import numpy as np

from ..layouts.formats import RecordFormat
from ..layouts.rope import Rope
from .arrays import as_array, as_kv, backend_of, empty_like_backend, kv_parts
from .checks import check_record_format
from .operations import operation
from .record_checks import check_kv, kv_places


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

    kv, not rotated: for a latent format bf16 (bfloat16 or uint16 bits) [T, head_dim]; for K and V
    apart the pair (k, v), each [T, num_kv_heads, head_dim], bf16, or float16 for an fp16 format.
    positions int32 [T], needed with `rope`. The vector, or K alone of a pair, is rotated in
    float32 and rounded to its own type, then all is quantized as the format says.
    Raises ArgumentError for a latent fp16 format, and for other shapes or dtypes.
    """
    check_record_format("encode_records", record_format)
    kv = as_kv(kv)
    positions = None if positions is None else as_array(positions, "positions")
    if out is None:
        tokens = check_kv("encode_records", kv, positions, rope, record_format)
        like = kv_parts(kv)[0]
        out = empty_like_backend((tokens, record_format.record_bytes), np.uint8, like)
    target = as_array(out, "out")
    backend = backend_of(**kv_places(kv), positions=positions, out=target)
    operation(backend, "encode_records")(
        kv, positions, target, record_format=record_format, rope=rope, stream=stream
    )
    return out
