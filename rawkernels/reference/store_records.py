"""store_records: put each token's record at the ring index of its position."""

from typing import Any

import numpy as np

from ...layouts.rings import ring_index
from ...layouts.slots import SlotLayout
from ..record_checks import check_store_records
from ..ring_access import RingAccess
from ..value_checks import check_store_values


def store_records(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    records: Any,
    state_ids: Any,
    positions: Any,
    *,
    kind: str = "swa",
    stage: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> None:
    """records uint8 [T, record_bytes] into the slab, flat uint8; state_ids, positions int32 [T].

    state_id -1 is padding and is not stored. Where a call holds a later record for the same row
    (a chunk longer than the ring), only the later one is written. stage: a second slab and its
    state ids, likewise.
    """
    access, num_slots, num_places = check_store_records(
        slab, layout, layer, records, state_ids, positions, kind, stage
    )
    check_store_values("store_records", state_ids, positions, num_slots)
    if stage is not None:
        check_store_values("store_records", stage[1], positions, num_places, "places")
        _store(stage[0], access, records, stage[1], positions)
    _store(slab, access, records, state_ids, positions)


def _store(
    slab: np.ndarray,
    access: RingAccess,
    records: np.ndarray,
    state_ids: np.ndarray,
    positions: np.ndarray,
) -> None:
    pieces = ring_pieces(slab, access)
    for t in range(records.shape[0]):
        if state_ids[t] < 0 or is_overwritten(t, state_ids, positions, access):
            continue
        index = ring_index(int(positions[t]), access.ring_len, access.sink_tokens)
        write_record(pieces, (state_ids[t], index), records[t])


def is_overwritten(
    t: int, state_ids: np.ndarray, positions: np.ndarray, access: RingAccess
) -> bool:
    """Whether a later token of the same call takes the row of token t: that one turn of the ring
    ahead. Pinned positions are never overwritten."""
    turn = access.ring_len - access.sink_tokens
    later = t + turn
    return (
        later < state_ids.shape[0]
        and positions[t] >= access.sink_tokens
        and state_ids[later] == state_ids[t]
        and int(positions[later]) == int(positions[t]) + turn
    )


def ring_pieces(slab: np.ndarray, access: RingAccess) -> list[np.ndarray]:
    """Views of a ring's bytes in the order of a whole record, uint8 [num_state_slots, ring_len,
    bytes]: values and scales of its one part, or of K and then of V."""
    by_slot = slab.reshape(-1, access.slot_bytes)
    fmt = access.format

    def piece(offset: int, stride: int, width: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(
            by_slot[:, offset:],
            shape=(by_slot.shape[0], access.ring_len, width),
            strides=(access.slot_bytes, stride, 1),
        )

    pieces = []
    for part in range(fmt.num_parts):
        values = access.value_offset + part * access.value_part_stride
        scales = access.scale_offset + part * access.scale_part_stride
        pieces.append(piece(values, access.value_stride, fmt.part_value_bytes))
        pieces.append(piece(scales, access.scale_stride, fmt.part_scale_bytes))
    return pieces


def write_record(pieces: list[np.ndarray], at: tuple, record: np.ndarray) -> None:
    """Put whole records [..., record_bytes] at `at` of each piece of a ring."""
    start = 0
    for piece in pieces:
        piece[at] = record[..., start : start + piece.shape[2]]
        start += piece.shape[2]


def read_records(pieces: list[np.ndarray], at: tuple) -> np.ndarray:
    """The whole records at `at`, uint8 [..., record_bytes]; a copy."""
    return np.concatenate([piece[at] for piece in pieces], axis=-1)
