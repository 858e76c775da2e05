"""Launcher of store_records.cu, and what it shares with load_history's."""

from functools import cache
from typing import Any

from ...layouts.sizes import div_ceil, div_exact
from ...layouts.slots import SlotLayout
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from ..record_checks import check_store_records
from ..ring_access import RingAccess
from .record_params import RING_DOCS, RING_FIELDS, ring_values
from .widths import piece_bytes

THREADS = 128
TARGET_UNITS = 4 * THREADS  # pieces of a thread block

PARAMS = ParamsStruct(
    "StoreRecordsParams",
    (
        ("records", "const uint8_t*"),
        ("state_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("slab", "uint8_t*"),
        ("places", "const int32_t*"),
        ("stage", "uint8_t*"),
        ("num_tokens", "int64_t"),
        *RING_FIELDS,
        ("ring_len", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("num_state_slots", "int32_t"),
        ("num_places", "int32_t"),
    ),
    docs=(
        ("records", "[num_tokens, RECORD_UNITS * UNIT_BYTES]"),
        ("state_ids", "[num_tokens]; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("slab", "[num_state_slots * slot_bytes]"),
        ("places", "[num_tokens], -1 for none; null without a stage"),
        ("stage", "[num_places * slot_bytes]"),
        *RING_DOCS,
    ),
)


@cache
def copy_macros(unit_bytes: int, value_bytes: int, record_bytes: int, parts: int = 1) -> MacroItems:
    """Macros of the copying kernels: pieces of a record and of its `parts`, each `value_bytes` of
    values and then its scales, and records of a thread block."""
    record_units = div_exact(record_bytes, unit_bytes)
    return macro_set(
        UNIT_BYTES=unit_bytes,
        VALUE_UNITS=div_exact(value_bytes, unit_bytes),
        RECORD_UNITS=record_units,
        PARTS=parts,
        LAUNCH_BLOCK_TOKENS=block_records(record_units),
    )


def block_records(record_units: int) -> int:
    """Records that a thread block copies: about TARGET_UNITS pieces, at least one record."""
    return max(TARGET_UNITS // record_units, 1)  # rounded down: whole records


def ring_copy_macros(ring: RingAccess, slab: Any, buffer: Any) -> MacroItems:
    """Macros to copy whole records of `buffer` to or from a ring of `slab`."""
    fmt = ring.format
    sides = (device_pointer(slab), device_pointer(buffer), fmt.record_bytes, ring.slot_bytes)
    if fmt.plane_order == "interleaved":  # whole in the ring too: one run of bytes
        unit = piece_bytes(*sides, ring.value_offset)
        return copy_macros(unit, fmt.record_bytes, fmt.record_bytes)
    pieces = (fmt.part_value_bytes, fmt.part_scale_bytes)  # both strides are multiples of these
    unit = piece_bytes(*sides, *pieces, ring.value_offset, ring.scale_offset)
    return copy_macros(unit, fmt.part_value_bytes, fmt.record_bytes, fmt.num_parts)


COPY_BUILDS = (
    copy_macros(16, 528, 528),  # V4.1, interleaved
    copy_macros(16, 512, 528),  # V4.1, planar
    copy_macros(16, 1024, 1024),  # bf16
    copy_macros(2, 66, 66),  # small records of head_dim 64
    copy_macros(1, 32, 33),  # head_dim 32, planar
    copy_macros(16, 2112, 2112),  # Mistral 7B, interleaved
    copy_macros(16, 512, 1056, 2),  # gpt-oss, planar
)
STORE = KernelSource("store_records", PARAMS, macro_sets=COPY_BUILDS)
KERNELS = (STORE,)


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
    stage: a second slab and its state ids.

    Tokens whose state_id names no slot are skipped: a GPU cannot raise for a value.
    """
    arrays = (records, state_ids, positions)
    ring, num_slots, num_places = check_store_records(slab, layout, layer, *arrays, kind, stage)
    check_current_device("store_records", slab)
    stage_slab, places = (None, None) if stage is None else stage

    num_tokens = records.shape[0]
    macros = ring_copy_macros(ring, slab, records)  # a stage begins at a multiple of 16
    grid = (div_ceil(num_tokens, dict(macros)["LAUNCH_BLOCK_TOKENS"]),)

    params = PARAMS.pack(
        records=device_pointer(records),
        state_ids=device_pointer(state_ids),
        positions=device_pointer(positions),
        slab=device_pointer(slab),
        places=device_pointer(places),
        stage=device_pointer(stage_slab),
        num_tokens=num_tokens,
        **ring_values(ring),
        ring_len=ring.ring_len,
        sink_tokens=ring.sink_tokens,
        num_state_slots=num_slots,
        num_places=num_places,
    )

    get_kernel(STORE, macros).launch(grid, (THREADS,), params, stream)
