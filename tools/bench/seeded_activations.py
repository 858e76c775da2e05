"""seeded_activations: the counter hash to bf16, as a run's queries are made.

Measures `tokens` rows of heads * head_dim numbers. Bound by bytes: 2 written a number; the hash is
four integer multiplications for two numbers, which has to stay hidden behind the stores.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import FIRST_POSITIONS, host_rows, sample_rows, upload
from .records import INDEX_BYTES, kv_bytes, require_equal

AXES = {"tokens": (4096,), "heads": (64,)}
SMOKE = {"tokens": 9, "heads": 8}
LAYER = 3


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens, heads}."""
    tokens, width = shape["tokens"], shape["heads"] * cfg.head_dim
    size = tokens * (shape["heads"] * kv_bytes(cfg) + 2 * INDEX_BYTES)
    host = [rng.integers(*FIRST_POSITIONS, tokens).astype(np.int32) for _ in range(2)]
    token_ids, positions = (upload(place, array) for array in host)
    outputs, calls = [], []
    for seed in range(num_sets(size)):
        out = place.memory.empty((tokens, width), np.uint16)
        arguments = (seed, LAYER, token_ids, positions, out)
        calls.append(partial(place.ops.seeded_activations, *arguments))
        outputs.append(out)

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng)
        wanted = np.empty((len(rows), width), np.uint16)
        reference = operation("reference", "seeded_activations")
        reference(0, LAYER, host[0][rows], host[1][rows], wanted)
        return require_equal(host_rows(place, outputs[0], rows), wanted, "activations")

    return Work(calls=tuple(calls), outputs=(outputs[0],), bytes=size, flops=0, check=check)
