"""What the benches of ring_store, store_records, encode_records and load_history share."""

from typing import Any

import numpy as np

from ...layouts.config import Config, LayerConfig
from .common import BenchError, Place
from .inputs import Sequences, sample_of, sample_slots, token_rows

INDEX_BYTES = 4  # a position or a state id


def kv_bytes(cfg: Config) -> int:
    """Bytes of one bf16 vector."""
    return 2 * cfg.head_dim


def require_equal(found: np.ndarray, wanted: np.ndarray, what: str) -> dict[str, Any]:
    """Bytes are compared exactly: BenchError with the number of differing ones."""
    if found.shape != wanted.shape:
        raise BenchError(f"{what}: shape {found.shape}, reference {wanted.shape}")
    different = int((found != wanted).sum())
    if different:
        raise BenchError(f"{what}: {different} of {wanted.size} differ from the reference")
    return {"compared": int(wanted.size), "different": 0}


def check_stored(
    place: Place,
    cfg: Config,
    layer: LayerConfig,
    slab: Any,
    sequences: Sequences,
    store: Any,
) -> dict[str, Any]:
    """Compare the first and the last sequence's rings with what `store(slab, state_ids, positions,
    rows)` puts into a poisoned slab on the host; `rows` are the rows of their tokens."""
    chosen, which = sample_of(sequences)
    found = sample_slots(place, slab, cfg.slot_layout, sequences, which)
    wanted = np.full(found.shape, 0xFF, np.uint8)
    rows = token_rows(which, sequences.queries)
    store(wanted, chosen.token_state_ids, chosen.positions, rows)
    ring = cfg.slot_layout.ring(layer.id)
    cut = slice(ring.offset, ring.offset + ring.used_bytes)
    shape = (chosen.num_slots, cfg.slot_layout.slot_bytes)
    return require_equal(found.reshape(shape)[:, cut], wanted.reshape(shape)[:, cut], ring.name)
