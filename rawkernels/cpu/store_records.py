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
    stream: Any = None,
) -> None:
    """records uint8 [T, record_bytes] into the slab, flat uint8; state_ids, positions int32 [T]."""
    access, num_slots = check_store_records(
        slab, layout, layer, records, state_ids, positions, kind
    )
    check_store_values("store_records", state_ids, positions, num_slots)
    if records.shape[0] == 0:
        return
    source = buffer_addresses(np.arange(records.shape[0]), access.format)
    target = ring_addresses(rows_to_store(state_ids, positions, access), access)
    copy_records(records.reshape(-1), source, access.format, slab, target)
