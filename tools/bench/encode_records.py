"""encode_records: rotate and quantize new vectors into records, in a prefill.

Measures `tokens` vectors, or pairs of K and V, of prefilled sequences, SEQUENCE_TOKENS consecutive
positions each. Bound by bytes: bf16 vectors and a position read, a record written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.sizes import div_ceil
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import (
    FIRST_POSITIONS,
    host_rows,
    host_vectors,
    new_vectors,
    sample_rows,
    upload,
    vector_bytes,
    window_layers,
)
from .records import INDEX_BYTES, require_equal

AXES = {"tokens": (65536,)}
SMOKE = {"tokens": 37}
SEQUENCE_TOKENS = 4096


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens}."""
    tokens = shape["tokens"]
    layers = window_layers(cfg)
    fmt = layers[0].record_format
    size = tokens * (vector_bytes(fmt) + INDEX_BYTES + fmt.record_bytes)
    first = rng.integers(*FIRST_POSITIONS, div_ceil(tokens, SEQUENCE_TOKENS))
    host_positions = (first[:, None] + np.arange(SEQUENCE_TOKENS)).ravel()[:tokens].astype(np.int32)
    positions = upload(place, host_positions)
    vectors, outputs, calls = [], [], []
    for i in range(num_sets(size)):
        kv = new_vectors(place, fmt, tokens, rng)
        out = place.memory.empty((tokens, fmt.record_bytes), np.uint8)
        options = {"record_format": fmt, "rope": layers[i % len(layers)].rope}
        calls.append(partial(place.ops.encode_records, kv, positions, out, **options))
        vectors.append(kv)
        outputs.append(out)

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng)
        kv = host_vectors(place, vectors[0], rows)
        wanted = np.empty((len(rows), fmt.record_bytes), np.uint8)
        reference = operation("reference", "encode_records")
        reference(kv, host_positions[rows], wanted, record_format=fmt, rope=layers[0].rope)
        return require_equal(host_rows(place, outputs[0], rows), wanted, "records")

    return Work(calls=tuple(calls), outputs=(outputs[0],), bytes=size, flops=0, check=check)
