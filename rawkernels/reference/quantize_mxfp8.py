"""quantize_mxfp8, from the definition (OCP MX v1.0, sections 5 and 6.3; DeepSeek's rule)."""

from typing import Any

import ml_dtypes
import numpy as np

from ...layouts.formats import (
    E4M3_MAX,
    E4M3_NAN_BYTE,
    E8M0_BIAS,
    E8M0_MAX_CODE,
    E8M0_NAN_BYTE,
    MX_BLOCK,
)
from ..checks import check_quantize_mxfp8
from .bf16 import values_of

E4M3_MAX_EXPONENT = 8  # 448 = 1.75 * 2^8


def quantize_mxfp8(
    x: Any, values: Any, scales: Any, *, scale_rounding: str, amax_floor: float, stream: Any = None
) -> None:
    """x float32 or bf16 [n, D] -> values uint8 [n, D] (E4M3), scales uint8 [n, div_ceil(D, 32)].

    The last block of a row may be short. Finite values saturate at +-448 times the scale. A block
    with a NaN: scale 0xFF, all elements 0x7F. A block with an infinity and no NaN: scale 2^127.
    A block of zeros takes the scale of `amax_floor` (105 for 1e-4), or 0 where that is 0; -0 stays.
    """
    check_quantize_mxfp8(x, values, scales, scale_rounding, amax_floor)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        numbers = values_of(x).astype(np.float64)  # [n, D]
    for block in range(scales.shape[1]):
        columns = slice(block * MX_BLOCK, min((block + 1) * MX_BLOCK, x.shape[1]))
        part = numbers[:, columns]  # [n, 32], or fewer in the last block
        codes = scale_codes(np.abs(part).max(axis=1, initial=0.0), scale_rounding, amax_floor)
        elements = e4m3_bytes(np.ldexp(part, (E8M0_BIAS - codes)[:, None]))
        has_nan = np.isnan(part).any(axis=1)
        values[:, columns] = np.where(has_nan[:, None], E4M3_NAN_BYTE, elements)
        scales[:, block] = np.where(has_nan, E8M0_NAN_BYTE, codes)


def scale_codes(amax: np.ndarray, scale_rounding: str, amax_floor: float) -> np.ndarray:
    """E8M0 codes of block maxima, int64 [n]; a NaN maximum counts as 0 (its block is all NaN).

    ceil:  the smallest power of two 2^e with amax <= 448 * 2^e
    floor: 2^(floor(log2(amax)) - 8)
    Clamped to the codes 0..254. `amax_floor` is compared in float32.
    """
    floored = np.maximum(np.nan_to_num(amax, nan=0.0, posinf=np.inf), np.float32(amax_floor))
    finite = np.where(np.isinf(floored), 1.0, floored)
    mantissa, exponent = np.frexp(finite)  # floored = mantissa * 2^exponent, mantissa in [0.5, 1)
    e = exponent.astype(np.int64) - 1 - E4M3_MAX_EXPONENT
    if scale_rounding == "ceil":
        e += mantissa > E4M3_MAX / 2.0 ** (E4M3_MAX_EXPONENT + 1)
    codes = np.where(finite == 0.0, 0, np.clip(e + E8M0_BIAS, 0, E8M0_MAX_CODE))
    return np.where(np.isinf(floored), E8M0_MAX_CODE, codes)


def e4m3_bytes(scaled: np.ndarray) -> np.ndarray:
    """E4M3 bytes of float64 values, round to nearest even, saturated at +-448.

    Clipped before the cast: ml_dtypes turns 465 into NaN.
    """
    clipped = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(np.float32)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
