"""store_records: records into the rings of a slab."""

from typing import Any

from ..layouts.errors import ArgumentError
from ..layouts.slots import RingKind, SlotLayout
from .arrays import as_array, backend_of
from .operations import operation


def store_records(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    records: Any,
    state_ids: Any,
    positions: Any,
    *,
    kind: RingKind = "swa",
    stage: tuple[Any, Any] | None = None,
    stream: Any = None,
) -> None:
    """Write each token's record at its ring index (`position % ring_len`, where the ring pins no
    positions) of its state slot.

    slab: flat uint8 [num_state_slots * slot_bytes]; records uint8 [T, record_bytes]; state_ids and
    positions int32 [T]. state_id -1 is padding and is not stored. A whole prefill chunk may be
    given: a token whose row is taken by a later token of the call (T > ring_len) is skipped. Other
    duplicates of a row in one call are the caller's mistake, and which one stays is undefined.

    stage: a second slab of the same layout, and which of its slots take each token's record as
    well, int32 [T], -1 for none, by the same rules: a slot as it is in the middle of the call.

    Raises ArgumentError for other shapes or dtypes and, on the host, for a state_id outside
    -1..num_state_slots - 1 or a negative position (a GPU skips those tokens).
    """
    slab, records = as_array(slab, "slab"), as_array(records, "records")
    state_ids, positions = as_array(state_ids, "state_ids"), as_array(positions, "positions")
    backend = backend_of(slab=slab, records=records, state_ids=state_ids, positions=positions)
    if stage is not None:
        stage = as_stage(stage)
    operation(backend, "store_records")(
        slab, layout, layer, records, state_ids, positions, kind=kind, stage=stage, stream=stream
    )


def as_stage(stage: Any) -> tuple[Any, Any]:
    """The pair as arrays. Raises ArgumentError for what is no pair, and as `as_array`."""
    if not isinstance(stage, tuple) or len(stage) != 2:
        raise ArgumentError("store_records: stage must be the pair (slab, places)")
    return as_array(stage[0], "stage slab"), as_array(stage[1], "places")
