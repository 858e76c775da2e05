"""bf16 as NumPy sees it: float32 values and uint16 bits.

bf16 is the upper half of a float32. Rounding is to nearest, ties to even; a NaN becomes 0x7FC0,
whatever its sign and payload, so that every backend makes the same bits.
"""

import ml_dtypes
import numpy as np

BF16_NAN = np.uint16(0x7FC0)


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """float32 of the same shape, exact."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def float_to_bf16(x: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 or float64 values, rounded to nearest even; NaN becomes 0x7FC0.

    A float64 is rounded to float32 first, so it may be rounded twice: harmless where it stands for
    a value that a kernel holds in float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single = x.astype(np.float32)
        bits = single.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(single), BF16_NAN, bits)


def values_of(x: np.ndarray) -> np.ndarray:
    """float32 values of a float32 array, or of a bf16 array given as bfloat16 or uint16."""
    if x.dtype == np.float32:
        return x
    return bf16_to_float32(x.view(np.uint16))
