"""Rotation on the CPU by the rule of layouts/rope.py; strict arithmetic, so its bits are fixed."""

import numpy as np

from ...layouts.rope import COARSE_ROWS, FINE_BITS, FINE_ROWS, MIDDLE_BITS, MIDDLE_ROWS, Rope
from ..rope_tables import cached_rope_table
from .kernels import device_function

NO_PAIRING, ADJACENT, HALF = 0, 1, 2  # how kernels are told a pairing


@device_function
def cos_sin(table, position, pair):
    """float32 cosine and sine of one pair's angle; a negative position counts as 0."""
    p = max(np.int64(position), np.int64(0))
    coarse = p >> np.int64(MIDDLE_BITS + FINE_BITS)
    middle = np.int64(COARSE_ROWS) + ((p >> np.int64(FINE_BITS)) & np.int64(MIDDLE_ROWS - 1))
    fine = np.int64(COARSE_ROWS + MIDDLE_ROWS) + (p & np.int64(FINE_ROWS - 1))
    c0, s0 = table[coarse, pair, 0], table[coarse, pair, 1]
    c1, s1 = table[middle, pair, 0], table[middle, pair, 1]
    c2, s2 = table[fine, pair, 0], table[fine, pair, 1]
    c, s = c0 * c1 - s0 * s1, c0 * s1 + s0 * c1
    return np.float32(c * c2 - s * s2), np.float32(c * s2 + s * c2)


@device_function
def rotate_vector(x, first, position, table, pairing, inverse):
    """Rotate x[first : first + dims] in place, float32; dims = 2 * table.shape[1]."""
    num_pairs = table.shape[1]
    for pair in range(num_pairs):
        c, s = cos_sin(table, position, pair)
        if inverse:
            s = -s
        i0 = first + 2 * pair if pairing == ADJACENT else first + pair
        i1 = i0 + 1 if pairing == ADJACENT else i0 + num_pairs
        x0, x1 = x[i0], x[i1]
        x[i0] = np.float32(np.float32(x0 * c) - np.float32(x1 * s))
        x[i1] = np.float32(np.float32(x0 * s) + np.float32(x1 * c))


_NO_TABLE = np.zeros((1, 1, 2), np.float64)


def rope_arguments(rope: Rope | None) -> tuple[int, np.ndarray]:
    """(pairing, table) for kernels."""
    if rope is None:
        return NO_PAIRING, _NO_TABLE
    return ADJACENT if rope.pairing == "adjacent" else HALF, cached_rope_table(rope)
