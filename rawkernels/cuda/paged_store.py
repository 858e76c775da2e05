"""Launcher of paged_store.cu."""

from typing import Any

from ...layouts.paged import PagedLayout
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_current_device, device_pointer, get_kernel
from ..paged_checks import check_paged_store
from .encode_records import (
    GQA_BUILDS,
    THREADS,
    WARPS,
    check_kv_alignment,
    encode_macros,
    kv_pointers,
)
from .rope_tables import device_rope_table
from .widths import piece_bytes

PARAMS = ParamsStruct(
    "PagedStoreParams",
    (
        ("k", "const uint16_t*"),
        ("v", "const uint16_t*"),
        ("block_tables", "const int32_t*"),
        ("seq_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("table", "const double*"),
        ("pool", "uint8_t*"),
        ("num_tokens", "int64_t"),
        ("block_bytes", "int64_t"),
        ("layer_offset", "int64_t"),
        ("record_bytes", "int64_t"),
        ("part_bytes", "int64_t"),
        ("value_bytes", "int64_t"),
        ("num_seqs", "int32_t"),
        ("max_blocks", "int32_t"),
        ("block_size", "int32_t"),
        ("num_blocks", "int32_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        ("k", "[num_tokens, KV_HEADS, HEAD_DIM]"),
        ("v", "like k"),
        ("block_tables", "[num_seqs, max_blocks]"),
        ("seq_ids", "[num_tokens]; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("table", "[ROPE_TABLE_ROWS, ROPE_DIMS / 2, 2]; null where ROPE_DIMS is 0"),
        ("pool", "[num_blocks * block_bytes]"),
        ("layer_offset", "bytes from a block's start to the layer's first record"),
        ("value_bytes", "of one part"),
    ),
)
PAGED_STORE = KernelSource("paged_store", PARAMS, macro_sets=GQA_BUILDS)
KERNELS = (PAGED_STORE,)


def paged_store(
    pool: Any,
    layout: PagedLayout,
    layer: int,
    kv: Any,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    *,
    rope: Rope | None = None,
    stream: Any = None,
) -> None:
    """kv (k, v) of bf16 or float16 [T, H, D] each into the pool, flat uint8.

    Tokens whose ids, positions or blocks are out of range are skipped: a GPU cannot raise for a
    value.
    """
    access = check_paged_store(pool, layout, layer, kv, block_tables, seq_ids, positions, rope)
    check_current_device("paged_store", pool)
    check_kv_alignment("paged_store", kv)

    fmt = access.format
    num_tokens = seq_ids.shape[0]
    grid = (div_ceil(num_tokens * fmt.num_parts, WARPS),)

    places = (access.block_bytes, access.offset, fmt.record_bytes, fmt.part_bytes)
    store = piece_bytes(device_pointer(pool), *places)
    table = None if rope is None else device_rope_table(rope)
    params = PARAMS.pack(
        **kv_pointers(kv),
        block_tables=device_pointer(block_tables),
        seq_ids=device_pointer(seq_ids),
        positions=device_pointer(positions),
        table=device_pointer(table),
        pool=device_pointer(pool),
        num_tokens=num_tokens,
        block_bytes=access.block_bytes,
        layer_offset=access.offset,
        record_bytes=fmt.record_bytes,
        part_bytes=fmt.part_bytes,
        value_bytes=fmt.part_value_bytes,
        num_seqs=block_tables.shape[0],
        max_blocks=block_tables.shape[1],
        block_size=access.block_size,
        num_blocks=access.num_blocks,
        amax_floor=fmt.amax_floor or 0.0,
    )

    kernel = get_kernel(PAGED_STORE, encode_macros(fmt, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)
