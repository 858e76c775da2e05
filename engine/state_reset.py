"""Compression state of a slot that was just given to a sequence: values 0, scores -inf."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.slots import SlotLayout
from ..rawkernels.memory import Memory


@dataclass(frozen=True)
class StateReset:
    """The fresh bytes of a slot from `start` (its first compression state) to its end, uint8 on
    the engine's device; compression state lies last in a slot, so they are one run."""

    start: int
    fresh: Any


def take_reset(layout: SlotLayout, memory: Memory) -> StateReset | None:
    """The bytes to write at admission, or None where the layout has no compression state."""
    rings = [ring for ring in layout.rings if ring.kind == "compression"]
    if not rings:
        return None
    start = min(ring.offset for ring in rings)
    host = np.zeros(layout.slot_bytes - start, np.uint8)
    for ring in rings:
        entries = host[ring.offset - start : ring.offset - start + ring.used_bytes]
        # An entry is float32 [2, dim]: values, then scores.
        pairs = entries.view(np.float32).reshape(ring.ring_len, 2, ring.record_bytes // 8)
        pairs[:, 1] = -np.inf
    fresh = memory.empty(host.shape, np.uint8)
    memory.upload(fresh, host)
    return StateReset(start, fresh)


def reset_states(
    slab: Any, layout: SlotLayout, reset: StateReset | None, state_ids: np.ndarray
) -> None:
    """Writes the fresh compression state of each slot."""
    if reset is None:
        return
    for state_id in state_ids.tolist():
        end = (state_id + 1) * layout.slot_bytes
        slab[end - reset.fresh.shape[0] : end] = reset.fresh
