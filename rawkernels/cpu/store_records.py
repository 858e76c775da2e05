"""store_records on the CPU."""

from typing import Any

import numpy as np

from ...layouts.slots import SlotLayout
from ..record_checks import check_store_records
from ..value_checks import check_store_values
from .record_kernels import buffer_addresses, copy_records, ring_addresses, rows_to_store


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
    stage: a second slab and its state ids."""
    access, num_slots, num_places = check_store_records(
        slab, layout, layer, records, state_ids, positions, kind, stage
    )
    check_store_values("store_records", state_ids, positions, num_slots)
    if stage is not None:
        check_store_values("store_records", stage[1], positions, num_places, "places")
    if records.shape[0] == 0:
        return
    source = buffer_addresses(np.arange(records.shape[0]), access.format)
    for target_slab, ids in ((slab, state_ids), *(() if stage is None else (stage,))):
        target = ring_addresses(rows_to_store(ids, positions, access), access)
        copy_records(records.reshape(-1), source, access.format, target_slab, target)
