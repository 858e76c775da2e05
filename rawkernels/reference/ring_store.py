"""ring_store is encode_records, then store_records."""

from typing import Any

import numpy as np

from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..record_checks import check_ring_store
from .encode_records import encode_records
from .store_records import store_records


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
    access, _ = check_ring_store(slab, layout, layer, kv, state_ids, positions, rope, kind)
    records = np.empty((state_ids.shape[0], access.format.record_bytes), np.uint8)
    encode_records(kv, positions, records, record_format=access.format, rope=rope)
    store_records(slab, layout, layer, records, state_ids, positions, kind=kind)
