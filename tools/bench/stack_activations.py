"""stack_activations: a layer's queries and keys from the output of the layer before.

Measures `tokens` tokens of `heads` heads. Bound by bytes: the output read, the queries and the key
written, 2 x heads + 1 bf16 vectors a token, with the hash of each number hidden behind them.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import FIRST_POSITIONS, host_rows, random_bf16, sample_rows, upload
from .records import INDEX_BYTES, kv_bytes, require_equal

AXES = {"tokens": (4096,), "heads": (64,)}
SMOKE = {"tokens": 9, "heads": 8}
LAYER = 3


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens, heads}."""
    tokens, heads = shape["tokens"], shape["heads"]
    size = tokens * ((2 * heads + 1) * kv_bytes(cfg) + 2 * INDEX_BYTES)
    host = [rng.integers(*FIRST_POSITIONS, tokens).astype(np.int32) for _ in range(2)]
    token_ids, positions = (upload(place, array) for array in host)
    inputs, outputs, calls = [], [], []
    for seed in range(num_sets(size)):
        previous = random_bf16(place, (tokens, heads, cfg.head_dim), rng)
        q = place.memory.empty(previous.shape, np.uint16)
        kv = place.memory.empty((tokens, cfg.head_dim), np.uint16)
        arguments = (previous, seed, LAYER, token_ids, positions, q, kv)
        calls.append(partial(place.ops.stack_activations, *arguments))
        inputs.append(previous)
        outputs.append((q, kv))

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng)
        previous = host_rows(place, inputs[0], rows)
        q, kv = np.empty(previous.shape, np.uint16), np.empty(previous.shape[::2], np.uint16)
        reference = operation("reference", "stack_activations")
        reference(previous, 0, LAYER, host[0][rows], host[1][rows], q, kv)
        found = [host_rows(place, part, rows).reshape(len(rows), -1) for part in outputs[0]]
        wanted = np.concatenate([q.reshape(len(rows), -1), kv], axis=1)
        return require_equal(np.concatenate(found, axis=1), wanted, "queries and keys")

    return Work(calls=tuple(calls), outputs=outputs[0], bytes=size, flops=0, check=check)
