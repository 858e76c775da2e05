"""stack_activations: the inputs of a layer from the output of the layer before, so that an error
or a missing key travels through the layers as it does in a model."""

from typing import Any

import numpy as np

from ..checks import check_stack_activations
from .activation_hash import hash_values
from .bf16 import bf16_to_float32, float_to_bf16


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
    """previous bf16 [T, H, D] (output of layer - 1) -> q bf16 [T, H, D], kv bf16 [T, D].

    q[t, h, d] = 0.5 hash_q[t, h D + d] + previous[t, (h + 1) % H, d], with seed 2 seed + 1;
    kv[t, d] = 0.5 hash_kv[t, d] + previous[t, d % H, d], with seed 2 seed; float32, rounded once.
    """
    check_stack_activations(previous, token_ids, positions, q, kv)
    tokens, heads, dim = previous.shape
    before = bf16_to_float32(previous.view(np.uint16))  # [T, H, D]
    half = np.float32(0.5)
    hash_q = hash_values(2 * seed + 1, layer, token_ids, positions, heads * dim)
    hash_kv = hash_values(2 * seed, layer, token_ids, positions, dim)
    next_head = np.roll(before, -1, axis=1)  # [t, h] holds head (h + 1) % H
    q_sum = half * hash_q.reshape(tokens, heads, dim) + next_head
    dims = np.arange(dim)
    kv_sum = half * hash_kv + before[:, dims % max(heads, 1), dims]
    q.view(np.uint16)[...] = float_to_bf16(q_sum)
    kv.view(np.uint16)[...] = float_to_bf16(kv_sum)
