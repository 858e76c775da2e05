"""ring_store: rotate, quantize and scatter new vectors into their rings, fused.

Measures `sequences` sequences of `queries` consecutive tokens each: 512 x 6 is a decode step, 512 x
128 is 65,536 tokens, each of which is stored (a ring holds at least 128). Input sets are layers of
one slab. Bound by bytes: bf16 vectors, a position and a state id read and a record written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import (
    host_vectors,
    new_vectors,
    poisoned_slab,
    random_sequences,
    upload,
    vector_bytes,
    window_layers,
)
from .records import INDEX_BYTES, check_stored

AXES = {"sequences": (512,), "queries": (6, 128)}
SMOKE = {"sequences": 3, "queries": 4}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, queries}; queries is at most the ring's length."""
    layout = cfg.slot_layout
    sequences = random_sequences(shape["sequences"], shape["queries"], rng)
    layers = window_layers(cfg)
    tokens = sequences.num_seqs * sequences.queries
    fmt = layers[0].record_format
    size = tokens * (vector_bytes(fmt) + 2 * INDEX_BYTES + fmt.record_bytes)
    layers = layers[: num_sets(size, len(layers))]
    slab = poisoned_slab(place, layout, sequences.num_slots)
    state_ids = upload(place, sequences.token_state_ids)
    positions = upload(place, sequences.positions)
    vectors, calls = [], []
    for layer in layers:
        kv = new_vectors(place, fmt, tokens, rng)
        arguments = (slab, layout, layer.id, kv, state_ids, positions)
        calls.append(partial(place.ops.ring_store, *arguments, rope=layer.rope))
        vectors.append(kv)

    def store(host: np.ndarray, states: np.ndarray, where: np.ndarray, rows: np.ndarray) -> None:
        kv = host_vectors(place, vectors[0], rows)
        reference = operation("reference", "ring_store")
        reference(host, layout, layers[0].id, kv, states, where, rope=layers[0].rope)

    def check() -> dict[str, Any]:
        return check_stored(place, cfg, layers[0], slab, sequences, store)

    return Work(calls=tuple(calls), outputs=(), bytes=size, flops=0, check=check)
