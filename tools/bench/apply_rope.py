"""apply_rope: rotate queries into another array.

Measures `tokens` tokens of `heads` heads at random positions, bf16. Bound by bytes: every vector is
read and written whole (the dims that are not rotated are copied), and one position a token.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import FIRST_POSITIONS, host_rows, random_bf16, sample_rows, upload, window_layers
from .records import INDEX_BYTES, kv_bytes, require_equal

AXES = {"tokens": (4096,), "heads": (64,)}
SMOKE = {"tokens": 9, "heads": 8}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens, heads}."""
    tokens, heads = shape["tokens"], shape["heads"]
    rope = window_layers(cfg)[0].rope
    size = tokens * (2 * heads * kv_bytes(cfg) + INDEX_BYTES)
    host_positions = rng.integers(*FIRST_POSITIONS, tokens).astype(np.int32)
    positions = upload(place, host_positions)
    inputs, outputs, calls = [], [], []
    for _ in range(num_sets(size)):
        x = random_bf16(place, (tokens, heads, cfg.head_dim), rng)
        out = place.memory.empty(x.shape, np.uint16)
        calls.append(partial(place.ops.apply_rope, x, positions, out, rope=rope))
        inputs.append(x)
        outputs.append(out)

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng)
        x = host_rows(place, inputs[0], rows)
        wanted = np.empty(x.shape, np.uint16)
        operation("reference", "apply_rope")(x, host_positions[rows], wanted, rope=rope)
        return require_equal(host_rows(place, outputs[0], rows), wanted, "rotated")

    return Work(calls=tuple(calls), outputs=(outputs[0],), bytes=size, flops=0, check=check)
