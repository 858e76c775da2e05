"""dequantize_mxfp8 on the CPU."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numba import prange

from ...layouts.formats import MX_BLOCK
from ..checks import check_dequantize_mxfp8
from .codec import power_of_two
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


def dequantize_mxfp8(values: Any, scales: Any, out: Any, *, stream: Any = None) -> None:
    """values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)] -> out float32 [n, D]."""
    check_dequantize_mxfp8(values, scales, out)
    if values.size == 0:
        return
    launch(
        _dequantize_rows,
        values.size,
        values.reshape(-1),
        scales.reshape(-1),
        values.shape[1],
        scales.shape[1],
        e4m3_values(),
        out.reshape(-1),
    )
