"""The stage: snapshots of boundaries that a prefill chunk passes, made of the chunk's new records.

After a chunk its slot holds the chunk's end only. But all its records go by on their way into the
rings: `store_records` puts those before a boundary into a place of the stage, as it does into a
slot. A place has a slot's layout, and serves the next batch again: all of it is in stream order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.slots import Ring
from ..rawkernels.memory import Memory
from ..schedules.batch import HostBatch
from ..schedules.prefix_orders import Stage, StagedBoundary

MAX_PLACES = 16


def plan_stage(cfg: Config, num_bytes: int) -> Stage | None:
    """The stage for snapshots of a slot's first `num_bytes` bytes. None where chunks had better end
    at snapshots: positions are pinned (a chunk rarely has those), two snapshots would share tokens,
    or no chunk is as long as a ring."""
    rings = _rings_within(cfg, num_bytes)
    ring_len = max(ring.ring_len for ring in rings)
    places = min(MAX_PLACES, cfg.engine.token_budget // ring_len)  # rounded down
    overlap = cfg.prefix.block_size * cfg.prefix.snapshot_blocks < ring_len
    if places == 0 or overlap or any(ring.sink_tokens for ring in rings):
        return None
    return Stage(places, ring_len)


def stage_bytes(cfg: Config, num_bytes: int) -> int:
    """Device bytes of the stage."""
    room = plan_stage(cfg, num_bytes)
    return 0 if room is None else room.places * cfg.slot_layout.slot_bytes


@dataclass(frozen=True)
class SnapshotStage:
    """slab    flat uint8 [room.places * slot_bytes], of the engine's slot layout
    layers  whose rings a snapshot holds
    """

    room: Stage
    slab: Any
    layers: frozenset[int]

    def places_of(self, host: HostBatch, staged: Sequence[StagedBoundary]) -> np.ndarray:
        """The place that takes the record of each token of a batch that passes these boundaries,
        int32 [T], -1 for none."""
        places = np.full(host.num_tokens, -1, np.int32)
        sequence_of = {row: i for i, row in enumerate(host.slots.tolist())}
        for one in staged:
            i = sequence_of[one.row]
            # Counted from the sequence's last token of the batch, at seqlens_k - 1.
            end = int(host.cu_seqlens_q[i + 1]) - (int(host.seqlens_k[i]) - one.boundary)
            places[end - self.room.ring_len : end] = one.place
        return places


def take_stage(cfg: Config, num_bytes: int, memory: Memory) -> SnapshotStage | None:
    """The stage of an engine, or None as `plan_stage`. Raises DeviceMemoryError."""
    room = plan_stage(cfg, num_bytes)
    if room is None:
        return None
    layers = frozenset(ring.layer for ring in _rings_within(cfg, num_bytes))
    return SnapshotStage(room, memory.empty((stage_bytes(cfg, num_bytes),), np.uint8), layers)


def _rings_within(cfg: Config, num_bytes: int) -> list[Ring]:
    """Rings of records in a slot's first bytes."""
    return [
        ring
        for ring in cfg.slot_layout.rings
        if ring.kind != "compression" and ring.offset < num_bytes
    ]
