"""ring_load: what the queries of each prefill chunk see, decoded, in the order of the positions."""

from typing import Any

import numpy as np

from ...layouts.plans import PrefillPlan, history_lengths
from ...layouts.rings import ring_index
from ...layouts.slots import SlotLayout
from ..record_checks import check_ring_load
from ..value_checks import check_load_values
from .paged_load import decode_into
from .store_records import read_records, ring_pieces


def ring_load(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    records: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """slab flat uint8, records uint8 [>= T, record_bytes] -> cu_seqlens_k int32 [num_seqs + 1],
    k, v bf16 or float16 [rows, H, D]: for each sequence its pinned history, the history of its
    window, its new records."""
    access, num_slots = check_ring_load(
        slab, layout, layer, plan, records, cu_seqlens_k, k, v, kind
    )
    check_load_values("ring_load", plan, num_slots)
    pieces = ring_pieces(slab, access)
    end = cu_seqlens_k[0] = 0
    for i, (pinned, recent) in enumerate(zip(*history_lengths(plan), strict=True)):
        first, last = plan.cu_seqlens_q[i : i + 2].tolist()
        if plan.state_ids[i] >= 0 and last > first:
            q_start = int(plan.positions[first])
            positions = np.concatenate([np.arange(pinned), np.arange(q_start - recent, q_start)])
            indices = ring_index(positions.astype(int), access.ring_len, access.sink_tokens)
            history = read_records(pieces, (int(plan.state_ids[i]), indices))
            visible = np.concatenate([history, records[first:last]])
            rows = slice(end, end + len(visible))
            decode_into(visible, access.format, k[rows], v[rows])
            end += len(visible)
        cu_seqlens_k[i + 1] = end
