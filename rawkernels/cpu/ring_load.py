"""ring_load on the CPU."""

from typing import Any

import numpy as np

from ...layouts.plans import PrefillPlan, history_lengths
from ...layouts.rings import ring_index
from ...layouts.slots import SlotLayout
from ..record_checks import check_ring_load
from ..value_checks import check_load_values
from .record_kernels import buffer_addresses, ring_addresses, unpack_rows


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
    first = plan.cu_seqlens_q[:-1].astype(np.int64)
    real = plan.state_ids >= 0
    new = np.where(real, np.diff(plan.cu_seqlens_q), 0)
    pinned, recent = (np.where(real, part, 0) for part in history_lengths(plan))
    lengths = pinned + recent + new
    cu_seqlens_k[0], cu_seqlens_k[1:] = 0, np.cumsum(lengths)
    total = int(lengths.sum())
    if total == 0:
        return
    # One entry a row: its sequence, and its place in it.
    sequence = np.repeat(np.arange(lengths.shape[0]), lengths)
    place = np.arange(total) - (np.cumsum(lengths) - lengths)[sequence]
    behind = place - (pinned + recent)[sequence]  # in the chunk; below 0 in the history
    q_start = plan.positions[first[sequence]].astype(np.int64)
    position = np.where(place < pinned[sequence], place, q_start + behind)
    index = ring_index(position, access.ring_len, access.sink_tokens)
    row = plan.state_ids[sequence].astype(np.int64) * access.ring_len + index
    old = np.where(behind < 0, row, -1)
    unpack_rows(slab, ring_addresses(old, access), access.format, k, v)
    fresh = np.where(behind >= 0, first[sequence] + behind, -1)
    addresses = buffer_addresses(fresh, access.format)
    unpack_rows(records.reshape(-1), addresses, access.format, k, v)
