"""seeded_activations on the CPU."""

from typing import Any

import numpy as np
from numba import prange

from ..arrays import bf16_bits
from ..checks import check_seeded_activations
from .activation_hash import element, row_key
from .codec import bf16_round
from .kernels import kernel, launch

SEED_MASK = 2**64 - 1


@kernel
def _fill_rows(seed, layer, token_ids, positions, out):
    tokens, width = out.shape
    for t in prange(tokens):
        key = row_key(seed, layer, token_ids[t], positions[t])
        for e in range(width):
            out[t, e] = bf16_round(element(key, e))


def seeded_activations(
    seed: int, layer: int, token_ids: Any, positions: Any, out: Any, *, stream: Any = None
) -> None:
    """token_ids, positions int32 [T], both >= 0 -> out bf16 [T, width]. `seed` modulo 2^64."""
    check_seeded_activations(token_ids, positions, out)
    if out.size == 0:
        return
    launch(
        _fill_rows,
        out.size,
        np.uint64(seed & SEED_MASK),
        np.uint64(layer),
        token_ids,
        positions,
        bf16_bits(out, "out"),
    )
