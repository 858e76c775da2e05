"""store_records: scatter encoded records into their rings, after a prefill.

Measures `sequences` sequences of `queries` consecutive tokens each, all of them stored. Input sets
are layers of one slab. Bound by bytes: a record, a position and a state id read, a record written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import (
    host_rows,
    poisoned_slab,
    random_records,
    random_sequences,
    upload,
    window_layers,
)
from .records import INDEX_BYTES, check_stored

AXES = {"sequences": (512,), "queries": (128,)}
SMOKE = {"sequences": 3, "queries": 4}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, queries}; queries is at most the ring's length."""
    layout = cfg.slot_layout
    sequences = random_sequences(shape["sequences"], shape["queries"], rng)
    layers = window_layers(cfg)
    fmt = layers[0].record_format
    tokens = sequences.num_seqs * sequences.queries
    size = tokens * (2 * fmt.record_bytes + 2 * INDEX_BYTES)
    layers = layers[: num_sets(size, len(layers))]
    slab = poisoned_slab(place, layout, sequences.num_slots)
    state_ids = upload(place, sequences.token_state_ids)
    positions = upload(place, sequences.positions)
    buffers, calls = [], []
    for layer in layers:
        records = upload(place, random_records(tokens, fmt, rng))
        arguments = (slab, layout, layer.id, records, state_ids, positions)
        calls.append(partial(place.ops.store_records, *arguments))
        buffers.append(records)

    def store(host: np.ndarray, states: np.ndarray, where: np.ndarray, rows: np.ndarray) -> None:
        records = host_rows(place, buffers[0], rows)
        operation("reference", "store_records")(host, layout, layers[0].id, records, states, where)

    def check() -> dict[str, Any]:
        return check_stored(place, cfg, layers[0], slab, sequences, store)

    return Work(calls=tuple(calls), outputs=(), bytes=size, flops=0, check=check)
