"""digest_outputs: add a layer's outputs to each token's digest.

Measures `tokens` tokens of `heads` heads. Bound by bytes: the outputs read once and 8 B a token
read and written; a 64-bit mix a number has to stay hidden behind the loads.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import host_rows, random_bf16, sample_rows
from .records import kv_bytes, require_equal

AXES = {"tokens": (4096,), "heads": (64,)}
SMOKE = {"tokens": 9, "heads": 8}
LAYER = 3
DIGEST_BYTES = 8


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens, heads}."""
    tokens, width = shape["tokens"], shape["heads"] * cfg.head_dim
    size = tokens * (shape["heads"] * kv_bytes(cfg) + 2 * DIGEST_BYTES)
    inputs, digests, calls = [], [], []
    for _ in range(num_sets(size)):
        out = random_bf16(place, (tokens, width), rng)
        sums = place.memory.empty((tokens,), np.uint64)
        sums.fill(0)
        calls.append(partial(place.ops.digest_outputs, out, LAYER, sums))
        inputs.append(out)
        digests.append(sums)

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng)
        wanted = np.zeros(len(rows), np.uint64)
        operation("reference", "digest_outputs")(host_rows(place, inputs[0], rows), LAYER, wanted)
        # One call was made on digests of zero.
        return require_equal(host_rows(place, digests[0], rows), wanted, "digests")

    return Work(calls=tuple(calls), outputs=(), bytes=size, flops=0, check=check)
