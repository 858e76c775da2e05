"""apply_rope: the rotation rule of layouts/rope.py, which all backends' bytes follow."""

from typing import Any

import numpy as np

from ...layouts.rope import COARSE_ROWS, FINE_BITS, FINE_ROWS, MIDDLE_BITS, MIDDLE_ROWS, Rope
from ..checks import check_apply_rope
from ..rope_tables import cached_rope_table
from .bf16 import float_to_bf16, values_of


def apply_rope(
    x: Any, positions: Any, out: Any, *, rope: Rope, inverse: bool = False, stream: Any = None
) -> None:
    """x bf16 or float32 [T, H, D], positions int32 [T] -> out like x (may be x itself).

    The last `rope.dims` dims are rotated by the position (backwards with `inverse`), the ones
    before are copied bit for bit. A negative position (padding) counts as 0.
    """
    check_apply_rope(x, positions, out, rope)
    first = x.shape[2] - rope.dims
    cos, sin = cos_sin(rope, positions)  # [T, dims / 2] float32
    turned = rotate(values_of(x)[:, :, first:], cos[:, None], sin[:, None], rope, inverse)
    bits = np.uint32 if x.dtype == np.float32 else np.uint16
    source, target = x.view(bits), out.view(bits)
    target[:, :, :first] = source[:, :, :first]
    target[:, :, first:] = turned.view(bits) if bits is np.uint32 else float_to_bf16(turned)


def cos_sin(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of each position's angles, float32 [T, dims / 2] each.

    A position is coarse * 2^20 + middle * 2^10 + fine. The three unit complex numbers are
    multiplied in float64, coarse times middle, then times fine, and rounded to float32.
    """
    table = cached_rope_table(rope)  # float64 [4096, dims / 2, 2]
    position = np.maximum(positions.astype(np.int64), 0)
    coarse = table[position >> (MIDDLE_BITS + FINE_BITS)]  # [T, dims / 2, 2]
    middle = table[COARSE_ROWS + ((position >> FINE_BITS) & (MIDDLE_ROWS - 1))]
    fine = table[COARSE_ROWS + MIDDLE_ROWS + (position & (FINE_ROWS - 1))]

    def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
        imaginary = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
        return np.stack([real, imaginary], axis=-1)

    both = times(times(coarse, middle), fine).astype(np.float32)
    return both[..., 0], both[..., 1]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rope: Rope, inverse: bool) -> Any:
    """x [..., dims] rotated in x's own precision; cos and sin broadcast as [..., dims / 2].

    (x0, x1) becomes (x0 cos - x1 sin, x0 sin + x1 cos); products and sums rounded one by one.
    """
    sin = -sin if inverse else sin
    if rope.pairing == "adjacent":
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, rope.num_pairs), slice(rope.num_pairs, None)
    x0, x1 = x[..., first], x[..., second]
    out = np.empty_like(x)
    with np.errstate(invalid="ignore", over="ignore"):
        out[..., first] = x0 * cos - x1 * sin
        out[..., second] = x0 * sin + x1 * cos
    return out
