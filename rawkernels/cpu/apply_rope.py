"""apply_rope on the CPU."""

from typing import Any

import numpy as np
from numba import prange

from ...layouts.rope import Rope
from ..checks import check_apply_rope
from .codec import bf16_round, bf16_value
from .kernels import kernel, launch
from .rotation import rope_arguments, rotate_vector


@kernel
def _rotate_tokens(bits, is_bf16, heads, dim, positions, pairing, table, inverse):
    """bits: uint16 [T * heads * dim] of bf16, or twice as many halves of float32; in place."""
    dims = 2 * table.shape[1]
    for t in prange(positions.shape[0]):
        x = np.empty(dims, np.float32)
        for head in range(heads):
            first = (t * heads + head + 1) * dim - dims
            for i in range(dims):
                if is_bf16:
                    x[i] = bf16_value(bits[first + i])
                else:
                    low, high = bits[2 * (first + i)], bits[2 * (first + i) + 1]
                    word = np.uint32(low) | (np.uint32(high) << np.uint32(16))
                    x[i] = np.uint32(word).view(np.float32)
            rotate_vector(x, 0, positions[t], table, pairing, inverse)
            for i in range(dims):
                if is_bf16:
                    bits[first + i] = bf16_round(x[i])
                else:
                    word = np.float32(x[i]).view(np.uint32)
                    bits[2 * (first + i)] = np.uint16(word & np.uint32(0xFFFF))
                    bits[2 * (first + i) + 1] = np.uint16(word >> np.uint32(16))


def apply_rope(
    x: Any, positions: Any, out: Any, *, rope: Rope, inverse: bool = False, stream: Any = None
) -> None:
    """x bf16 or float32 [T, H, D], positions int32 [T] -> out like x (may be x itself)."""
    check_apply_rope(x, positions, out, rope)
    if x.size == 0:
        return
    bits = out.view(np.uint16).reshape(-1)
    if out is not x:
        bits[...] = x.view(np.uint16).reshape(-1)
    pairing, table = rope_arguments(rope)
    launch(
        _rotate_tokens,
        x.shape[0] * x.shape[1] * rope.dims,
        bits,
        x.dtype != np.float32,
        x.shape[1],
        x.shape[2],
        positions,
        pairing,
        table,
        inverse,
    )
