"""ring_load: the keys of prefill chunks, out of rings and new records, decoded to K and V in bf16.

Measures `sequences` chunks of `tokens` tokens each, past the window, window 1,024, 8 KV heads of
128, MXFP8: 16 x 1,024 is 32,752 rows. Input sets are layers of one slab. Bound by bytes: a record
read and K and V written for each key.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.slots import Ring, build_slot_layout
from ...rawkernels.operations import operation
from ...schedules.plan_prefill import plan_prefill
from .common import Place, Shape, Work, num_sets
from .inputs import (
    host_rows,
    poisoned_slab,
    random_records,
    random_sequences,
    sample_slots,
    upload,
    upload_plan,
)
from .pages import FORMAT, HEAD_DIM, KV_HEADS, VECTOR_BYTES
from .records import require_equal

AXES = {"sequences": (16,), "tokens": (1024,)}
SMOKE = {"sequences": 3, "tokens": 20}
WINDOW = 1024
RING_LEN = WINDOW + 2
ALIGN_BYTES = 32


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, tokens}."""
    tokens = shape["tokens"]
    sequences = random_sequences(shape["sequences"], tokens, rng)
    keys = sequences.num_seqs * (WINDOW - 1 + tokens)
    size = keys * (VECTOR_BYTES + FORMAT.record_bytes)
    layout = build_slot_layout(
        [
            Ring(f"layer{i}", i, "swa", RING_LEN, FORMAT.record_bytes, True, FORMAT)
            for i in range(num_sets(size))
        ],
        ALIGN_BYTES,
    )
    plan = _plan(sequences.state_ids, sequences.first, tokens)
    device_plan = upload_plan(place, plan)
    slab = poisoned_slab(place, layout, sequences.num_slots)
    new = upload(place, random_records(plan.num_tokens, FORMAT, rng))
    outputs, calls = [], []
    for ring in layout.rings:
        view = layout.view(slab, ring.layer)
        rows = random_records(view.shape[0] * RING_LEN, FORMAT, rng)
        view[...] = upload(place, rows).reshape(view.shape)
        ends = place.memory.empty((plan.num_seqs + 1,), np.int32)
        k, v = (place.memory.empty((keys, KV_HEADS, HEAD_DIM), np.uint16) for _ in range(2))
        arguments = (slab, layout, ring.layer, device_plan, new, ends, k, v)
        calls.append(partial(place.ops.ring_load, *arguments))
        outputs.append((ends, k, v))

    def check() -> dict[str, Any]:
        last = sequences.num_seqs - 1
        host = sample_slots(place, slab, layout, sequences, np.array([last]))
        some = _plan(np.zeros(1, np.int32), sequences.first[last:], tokens)
        records = host_rows(place, new, np.arange(plan.num_tokens - tokens, plan.num_tokens))
        rows = (some.most_keys, KV_HEADS, HEAD_DIM)
        ends, k, v = np.empty(2, np.int32), np.empty(rows, np.uint16), np.empty(rows, np.uint16)
        operation("reference", "ring_load")(host, layout, 0, some, records, ends, k, v)
        chosen = np.arange(keys - rows[0], keys)
        found = [host_rows(place, part, chosen) for part in outputs[0][1:]]
        require_equal(place.memory.to_host(outputs[0][0])[-1:], np.int32([keys]), "the last end")
        return require_equal(np.stack(found), np.stack([k, v]), "K and V of a sequence")

    return Work(calls=tuple(calls), outputs=outputs[0], bytes=size, flops=0, check=check)


def _plan(state_ids: np.ndarray, first: np.ndarray, tokens: int) -> Any:
    counts = np.full(state_ids.shape, tokens, np.int32)
    return plan_prefill(state_ids, counts, first + counts, window=WINDOW, ring_len=RING_LEN)
