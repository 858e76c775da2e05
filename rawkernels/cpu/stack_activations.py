"""stack_activations on the CPU."""

from typing import Any

import numpy as np
from numba import prange

from ..arrays import bf16_bits
from ..checks import check_stack_activations
from .activation_hash import element, row_key
from .codec import bf16_round, bf16_value
from .kernels import kernel, launch
from .seeded_activations import SEED_MASK


@kernel
def _mix_tokens(previous, seed_q, seed_kv, layer, token_ids, positions, q, kv):
    tokens, heads, dim = previous.shape
    half = np.float32(0.5)
    for t in prange(tokens):
        key = row_key(seed_q, layer, token_ids[t], positions[t])
        for h in range(heads):
            source = (h + 1) % heads
            for d in range(dim):
                x = half * element(key, h * dim + d) + bf16_value(previous[t, source, d])
                q[t, h, d] = bf16_round(np.float32(x))
        key = row_key(seed_kv, layer, token_ids[t], positions[t])
        for d in range(dim):
            x = half * element(key, d) + bf16_value(previous[t, d % heads, d])
            kv[t, d] = bf16_round(np.float32(x))


def stack_activations(
    previous: Any,
    seed: int,
    layer: int,
    token_ids: Any,
    positions: Any,
    q: Any,
    kv: Any,
    *,
    stream: Any = None,
) -> None:
    """previous bf16 [T, H, D] (output of layer - 1) -> q bf16 [T, H, D], kv bf16 [T, D]."""
    check_stack_activations(previous, token_ids, positions, q, kv)
    if previous.size == 0:
        return
    launch(
        _mix_tokens,
        previous.size,
        bf16_bits(previous, "previous"),
        np.uint64((2 * seed + 1) & SEED_MASK),
        np.uint64((2 * seed) & SEED_MASK),
        np.uint64(layer),
        token_ids,
        positions,
        bf16_bits(q, "q"),
        bf16_bits(kv, "kv"),
    )
