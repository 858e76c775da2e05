"""dequantize_mxfp8, from the definition: element times 2^(code - 127)."""

from typing import Any

import ml_dtypes
import numpy as np

from ...layouts.formats import E8M0_BIAS, E8M0_NAN_BYTE, MX_BLOCK
from ..checks import check_dequantize_mxfp8
from .bf16 import float_to_bf16


def dequantize_mxfp8(values: Any, scales: Any, out: Any, *, stream: Any = None) -> None:
    """values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)] -> out float32 or bf16 [n, D].

    Exact in float32, subnormal results too; 256 * 2^120 and above is inf. bf16 has the same
    exponents and enough bits for all but its own subnormals, below 2^-126, which are rounded to
    nearest even. Scale 0xFF, or element 0x7F or 0xFF, is NaN (0x7FC0 in bf16).
    """
    check_dequantize_mxfp8(values, scales, out)
    exact = dequantized(values, scales)
    if out.dtype == np.float32:
        with np.errstate(over="ignore"):
            out[...] = exact
    else:
        out.view(np.uint16)[...] = float_to_bf16(exact)


def dequantized(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [n, D], exact."""
    elements = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # [n, D]
    powers = np.ldexp(1.0, scales.astype(np.int64) - E8M0_BIAS)
    powers = np.where(scales == E8M0_NAN_BYTE, np.nan, powers)  # [n, blocks]
    return elements * np.repeat(powers, MX_BLOCK, axis=1)[:, : values.shape[1]]
