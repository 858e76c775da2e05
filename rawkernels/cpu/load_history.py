"""load_history on the CPU."""

from typing import Any

import numpy as np

from ...layouts.plans import PrefillPlan
from ...layouts.slots import SlotLayout
from ..record_checks import check_load_history
from ..value_checks import check_segment_values
from .record_kernels import buffer_addresses, copy_records, ring_addresses


def load_history(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    out: Any,
    *,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """slab flat uint8 -> out uint8 [>= num_seqs * window, record_bytes], records whole."""
    access, num_slots = check_load_history(slab, layout, layer, plan, out, kind)
    segments = check_segment_values("load_history", plan, num_slots).astype(np.int64)
    source, target, rows = segments.T
    total = int(rows.sum())
    if total == 0:
        return
    # One entry a row: its segment, and its place in that segment.
    segment = np.repeat(np.arange(rows.shape[0]), rows)
    place = np.arange(total) - (np.cumsum(rows) - rows)[segment]
    from_rows = np.where(source[segment] < 0, -1, source[segment] + place)
    copy_records(
        slab,
        ring_addresses(from_rows, access),
        access.format,
        out.reshape(-1),
        buffer_addresses(target[segment] + place, access.format),
    )
