"""seeded_activations: bf16 rows that are a pure function of seed, layer, token and position."""

from typing import Any

import numpy as np

from ..checks import check_seeded_activations
from .activation_hash import hash_values
from .bf16 import float_to_bf16


def seeded_activations(
    seed: int, layer: int, token_ids: Any, positions: Any, out: Any, *, stream: Any = None
) -> None:
    """token_ids, positions int32 [T], both >= 0 -> out bf16 [T, width]. `seed` modulo 2^64."""
    check_seeded_activations(token_ids, positions, out)
    values = hash_values(seed, layer, token_ids, positions, out.shape[1])
    out.view(np.uint16)[...] = float_to_bf16(values)
