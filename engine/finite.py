"""Non-finite activations: found in bf16 bits, and named."""

import numpy as np

from ..layouts.errors import ActivationError

BF16_EXPONENT = 0x7F80  # all ones: infinity or NaN
CHECK_ROWS = 4096  # rows looked at together, so that a recorded file is never held twice


def check_finite_bits(bits: np.ndarray, what: str) -> None:
    """Raises ActivationError naming the first element of `bits` (uint16 bf16 [n, ...]) that is NaN
    or infinite."""
    for start in range(0, bits.shape[0], CHECK_ROWS):
        part = np.asarray(bits[start : start + CHECK_ROWS])
        wrong = (part & BF16_EXPONENT) == BF16_EXPONENT
        if wrong.any():
            at = np.argwhere(wrong)[0]
            value = int(part[tuple(at)])
            name = "NaN" if value & 0x7F else "-Inf" if value >> 15 else "Inf"
            at[0] += start
            raise ActivationError(f"{what}[{', '.join(map(str, at.tolist()))}] is {name}")
