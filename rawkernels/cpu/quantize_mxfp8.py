"""quantize_mxfp8 on the CPU, one row a core at a time."""

from typing import Any

import numpy as np
from numba import prange

from ..arrays import bf16_bits
from ..checks import check_quantize_mxfp8
from .codec import bf16_value, quantize_vector, rule_arguments
from .kernels import kernel, launch


@kernel
def _quantize_rows(bits, is_bf16, width, ceil, floor_bits, values, scales, num_blocks):
    """bits: uint16 [n * width] of bf16, or [2 * n * width] halves of float32."""
    rows = values.shape[0] // width
    for row in prange(rows):
        x = np.empty(width, np.float32)
        for i in range(width):
            at = row * width + i
            if is_bf16:
                x[i] = bf16_value(bits[at])
            else:
                low, high = np.uint32(bits[2 * at]), np.uint32(bits[2 * at + 1])
                x[i] = np.uint32(low | (high << np.uint32(16))).view(np.float32)
        quantize_vector(x, ceil, floor_bits, values, row * width, scales, row * num_blocks)


def quantize_mxfp8(
    x: Any, values: Any, scales: Any, *, scale_rounding: str, amax_floor: float, stream: Any = None
) -> None:
    """x float32 or bf16 [n, D] -> values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)]."""
    check_quantize_mxfp8(x, values, scales, scale_rounding, amax_floor)
    if x.size == 0:
        return
    is_bf16 = x.dtype != np.float32
    # One kernel for both dtypes: a float32 is two uint16 halves, the low one first.
    bits = bf16_bits(x, "x") if is_bf16 else x.view(np.uint16)
    ceil, floor_bits = rule_arguments(scale_rounding, amax_floor)
    launch(
        _quantize_rows,
        x.size,
        bits.reshape(-1),
        is_bf16,
        x.shape[1],
        ceil,
        floor_bits,
        values.reshape(-1),
        scales.reshape(-1),
        scales.shape[1],
    )
