"""load_history: copy each sequence's history window out of its ring."""

from typing import Any

from ...layouts.plans import PrefillPlan
from ...layouts.slots import SlotLayout
from ..record_checks import check_load_history
from ..value_checks import check_segment_values
from .store_records import read_records, ring_pieces


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
    """slab flat uint8 -> out uint8 [>= num_seqs * window, record_bytes], records whole.

    A segment with source -1 gives records of zeros. Rows past num_seqs * window are untouched.
    """
    access, num_slots = check_load_history(slab, layout, layer, plan, out, kind)
    pieces = ring_pieces(slab, access)
    for source, target, rows in check_segment_values("load_history", plan, num_slots).tolist():
        if source < 0:
            out[target : target + rows] = 0
            continue
        state_id, index = divmod(source, access.ring_len)
        indices = slice(index, index + rows)
        out[target : target + rows] = read_records(pieces, (state_id, indices))
