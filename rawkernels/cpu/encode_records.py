"""encode_records on the CPU."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from ..record_checks import check_encode_records
from .record_kernels import buffer_addresses, encode_rows


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
    without rope) -> out uint8 [T, record_bytes]."""
    tokens = check_encode_records(kv, positions, out, record_format, rope)
    if tokens == 0:
        return
    addresses = buffer_addresses(np.arange(tokens), record_format)
    encode_rows(kv, positions, rope, record_format, out.reshape(-1), addresses)
