"""load_history: copy each sequence's last window out of its ring into a joint buffer.

Measures `sequences` sequences with a whole window of history each: 512 x 128 is 65,536 records.
Slots and positions are random, so most copies wrap. Input sets are layers of one slab. Bound by
bytes: a record read and a record written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from ...schedules.plan_prefill import plan_prefill
from .common import Place, Shape, Work, num_sets
from .inputs import (
    fill_ring,
    poisoned_slab,
    random_sequences,
    sample_of,
    sample_slots,
    token_rows,
    upload_plan,
    window_layers,
)
from .records import require_equal

AXES = {"sequences": (512,)}
SMOKE = {"sequences": 3}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences}."""
    layout = cfg.slot_layout
    sequences = random_sequences(shape["sequences"], 1, rng)
    layers = window_layers(cfg)
    fmt = layers[0].record_format
    plan = _plan(sequences, layers[0])
    size = 2 * plan.history_rows * fmt.record_bytes
    layers = layers[: num_sets(size, len(layers))]
    slab = poisoned_slab(place, layout, sequences.num_slots)
    device_plan = upload_plan(place, plan)
    outputs, calls = [], []
    for layer in layers:
        fill_ring(place, slab, layout, layer, rng)
        out = place.memory.empty((plan.history_rows, fmt.record_bytes), np.uint8)
        calls.append(partial(place.ops.load_history, slab, layout, layer.id, device_plan, out))
        outputs.append(out)

    def check() -> dict[str, Any]:
        chosen, which = sample_of(sequences)
        host = sample_slots(place, slab, layout, sequences, which)
        some = _plan(chosen, layers[0])
        wanted = np.empty((some.history_rows, fmt.record_bytes), np.uint8)
        operation("reference", "load_history")(host, layout, layers[0].id, some, wanted)
        rows = token_rows(which, plan.window)
        return require_equal(place.memory.to_host(outputs[0])[rows], wanted, "history")

    return Work(calls=tuple(calls), outputs=(outputs[0],), bytes=size, flops=0, check=check)


def _plan(sequences: Any, layer: Any) -> Any:
    """One new token a sequence, at `first`."""
    ones = np.ones(sequences.num_seqs, np.int32)
    return plan_prefill(
        sequences.state_ids,
        ones,
        sequences.first + 1,
        window=layer.window,
        ring_len=layer.ring_len,
    )
