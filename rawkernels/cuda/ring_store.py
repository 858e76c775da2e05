"""Launcher of ring_store.cu."""

from typing import Any

from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ...layouts.slots import SlotLayout
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_current_device, device_pointer, get_kernel
from ..record_checks import check_ring_store
from .encode_records import (
    ENCODE_BUILDS,
    THREADS,
    WARPS,
    check_kv_alignment,
    encode_macros,
    kv_pointers,
)
from .rope_tables import device_rope_table
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
        ("slot_bytes", "int64_t"),
        ("value_offset", "int64_t"),
        ("value_stride", "int64_t"),
        ("scale_offset", "int64_t"),
        ("scale_stride", "int64_t"),
        ("value_part_stride", "int64_t"),
        ("scale_part_stride", "int64_t"),
        ("ring_len", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("num_state_slots", "int32_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        ("k", "[num_tokens, KV_HEADS, HEAD_DIM]; the vectors themselves of latent records"),
        ("v", "like k; null for latent records"),
        ("state_ids", "[num_tokens]; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("table", "[ROPE_TABLE_ROWS, ROPE_DIMS / 2, 2]; null where ROPE_DIMS is 0"),
        ("slab", "[num_state_slots * slot_bytes]"),
        ("value_offset", "bytes from the slot's start to the ring's first values"),
        ("value_part_stride", "bytes from a record's values of K to those of V"),
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
    grid = (div_ceil(num_tokens * ring.format.num_parts, WARPS),)

    places = (ring.slot_bytes, ring.value_offset, ring.value_stride, ring.value_part_stride)
    store = piece_bytes(device_pointer(slab), *places)
    table = None if rope is None else device_rope_table(rope)
    params = PARAMS.pack(
        **kv_pointers(kv),
        state_ids=device_pointer(state_ids),
        positions=device_pointer(positions),
        table=device_pointer(table),
        slab=device_pointer(slab),
        num_tokens=num_tokens,
        slot_bytes=ring.slot_bytes,
        value_offset=ring.value_offset,
        value_stride=ring.value_stride,
        scale_offset=ring.scale_offset,
        scale_stride=ring.scale_stride,
        value_part_stride=ring.value_part_stride,
        scale_part_stride=ring.scale_part_stride,
        ring_len=ring.ring_len,
        sink_tokens=ring.sink_tokens,
        num_state_slots=num_slots,
        amax_floor=ring.format.amax_floor or 0.0,
    )

    kernel = get_kernel(RING_STORE, encode_macros(ring.format, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)
