"""fp16 as NumPy sees it: float16. Rounding is to nearest, ties to even; from 65,520 on it gives an
infinity. A NaN becomes 0x7E00, whatever its sign and payload, so that every backend makes the same
bits."""

import numpy as np

FP16_NAN = np.uint16(0x7E00)


def float_to_fp16(x: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 values; NaN becomes 0x7E00."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = x.astype(np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), FP16_NAN, bits)
