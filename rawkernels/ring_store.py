"""ring_store: encode vectors and store them in the rings of a slab, in one pass."""

from typing import Any

from ..layouts.rope import Rope
from ..layouts.slots import RingKind, SlotLayout
from .arrays import as_array, as_kv, backend_of
from .operations import operation
from .record_checks import kv_places


def ring_store(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    kv: Any,
    state_ids: Any,
    positions: Any,
    *,
    rope: Rope | None = None,
    kind: RingKind = "swa",
    stream: Any = None,
) -> None:
    """The same bytes in the slab as `encode_records` followed by `store_records`.

    slab: flat uint8; kv as in `encode_records`: bf16 [T, head_dim], or (k, v) for rings of K and V,
    not rotated; state_ids and positions int32 [T]. Padding, duplicates and errors are those of
    `store_records`.
    """
    slab, kv = as_array(slab, "slab"), as_kv(kv)
    state_ids, positions = as_array(state_ids, "state_ids"), as_array(positions, "positions")
    backend = backend_of(slab=slab, **kv_places(kv), state_ids=state_ids, positions=positions)
    operation(backend, "ring_store")(
        slab, layout, layer, kv, state_ids, positions, rope=rope, kind=kind, stream=stream
    )
