"""Launcher of ring_store.cu."""

from typing import Any

from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_current_device, device_pointer, get_kernel
from ..record_checks import check_ring_store
from .encode_records import (
    ENCODE_BUILDS,
    THREADS,
    VECTOR_DOCS,
    check_kv_alignment,
    encode_grid,
    encode_macros,
    encode_values,
)
from .record_params import PARTED_RING_FIELDS, RING_DOCS, ring_values
from .widths import piece_bytes

PARAMS = ParamsStruct(
    "RingStoreParams",
    (
        ("k", "const uint16_t*"),
        ("v", "const uint16_t*"),
        ("state_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("table", "const double*"),
        ("slab", "uint8_t*"),
        ("num_tokens", "int64_t"),
        *PARTED_RING_FIELDS,
        ("ring_len", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("num_state_slots", "int32_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        *VECTOR_DOCS,
        ("state_ids", "[num_tokens]; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("slab", "[num_state_slots * slot_bytes]"),
        *RING_DOCS,
    ),
)
RING_STORE = KernelSource("ring_store", PARAMS, macro_sets=ENCODE_BUILDS)
KERNELS = (RING_STORE,)


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
    """kv bf16 [T, D], or (k, v), encoded (rotated where `rope` is given) into the slab, flat uint8.

    Tokens whose state_id names no slot are skipped: a GPU cannot raise for a value.
    """
    ring, num_slots = check_ring_store(slab, layout, layer, kv, state_ids, positions, rope, kind)
    check_current_device("ring_store", slab)
    check_kv_alignment("ring_store", kv)

    num_tokens = state_ids.shape[0]
    grid = encode_grid(ring.format, num_tokens)

    places = (ring.slot_bytes, ring.value_offset, ring.value_stride, ring.value_part_stride)
    store = piece_bytes(device_pointer(slab), *places)
    params = PARAMS.pack(
        **encode_values(ring.format, kv, positions, rope, num_tokens),
        state_ids=device_pointer(state_ids),
        slab=device_pointer(slab),
        **ring_values(ring, PARTED_RING_FIELDS),
        ring_len=ring.ring_len,
        sink_tokens=ring.sink_tokens,
        num_state_slots=num_slots,
    )

    kernel = get_kernel(RING_STORE, encode_macros(ring.format, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)
