"""dequantize_mxfp8 on the CPU."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numba import prange

from ...layouts.formats import MX_BLOCK
from ..arrays import bf16_bits
from ..checks import check_dequantize_mxfp8
from .codec import bf16_round, power_of_two
from .kernels import kernel, launch


@cache
def e4m3_values() -> np.ndarray:
    """float32 [256], the value of each E4M3 byte."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@kernel
def _dequantize_rows(values, scales, width, num_blocks, table, out):
    rows = out.shape[0] // width
    for row in prange(rows):
        for block in range(num_blocks):
            scale = power_of_two(np.int64(scales[row * num_blocks + block]))
            first = row * width + block * MX_BLOCK
            last = min(first + MX_BLOCK, (row + 1) * width)
            for i in range(first, last):
                out[i] = table[values[i]] * scale


@kernel
def _dequantize_rows_bf16(values, scales, width, num_blocks, table, out):
    rows = out.shape[0] // width
    for row in prange(rows):
        for block in range(num_blocks):
            scale = power_of_two(np.int64(scales[row * num_blocks + block]))
            first = row * width + block * MX_BLOCK
            last = min(first + MX_BLOCK, (row + 1) * width)
            for i in range(first, last):
                out[i] = bf16_round(table[values[i]] * scale)


def dequantize_mxfp8(values: Any, scales: Any, out: Any, *, stream: Any = None) -> None:
    """values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)] -> out float32 or bf16 [n, D]."""
    check_dequantize_mxfp8(values, scales, out)
    if values.size == 0:
        return
    is_float32 = out.dtype == np.float32
    launch(
        _dequantize_rows if is_float32 else _dequantize_rows_bf16,
        values.size,
        values.reshape(-1),
        scales.reshape(-1),
        values.shape[1],
        scales.shape[1],
        e4m3_values(),
        out.reshape(-1) if is_float32 else bf16_bits(out, "out").reshape(-1),
    )
