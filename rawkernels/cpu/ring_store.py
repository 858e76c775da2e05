"""ring_store on the CPU: records are encoded where they lie in the slab."""

from typing import Any

from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..record_checks import check_ring_store
from ..value_checks import check_store_values
from .record_kernels import encode_rows, ring_addresses, rows_to_store


def ring_store(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    kv: Any,
    state_ids: Any,
    positions: Any,
    *,
    rope: Rope | None = None,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """kv bf16 [T, D], or (k, v), encoded (rotated where `rope` is given) and stored in the slab."""
    access, num_slots = check_ring_store(slab, layout, layer, kv, state_ids, positions, rope, kind)
    check_store_values("ring_store", state_ids, positions, num_slots)
    if state_ids.shape[0] == 0:
        return
    addresses = ring_addresses(rows_to_store(state_ids, positions, access), access)
    encode_rows(kv, positions, rope, access.format, slab, addresses)
