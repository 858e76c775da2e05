"""Launcher of paged_store.cu."""

from typing import Any

from ...layouts.paged import PagedLayout
from ...layouts.rope import Rope
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_current_device, device_pointer, get_kernel
from ..paged_checks import check_paged_store
from .encode_records import (
    GQA_BUILDS,
    THREADS,
    VECTOR_DOCS,
    check_kv_alignment,
    encode_grid,
    encode_macros,
    encode_values,
)
from .record_params import POOL_DOCS, POOL_FIELDS, pool_values
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
        *POOL_FIELDS,
        ("amax_floor", "float"),
    ),
    docs=(
        *VECTOR_DOCS,
        ("block_tables", "[num_seqs, max_blocks]"),
        ("seq_ids", "[num_tokens]; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("pool", "[num_blocks * block_bytes]"),
        *POOL_DOCS,
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
    grid = encode_grid(fmt, num_tokens)

    places = (access.block_bytes, access.offset, fmt.record_bytes, fmt.part_bytes)
    store = piece_bytes(device_pointer(pool), *places)
    params = PARAMS.pack(
        **encode_values(fmt, kv, positions, rope, num_tokens),
        block_tables=device_pointer(block_tables),
        seq_ids=device_pointer(seq_ids),
        pool=device_pointer(pool),
        **pool_values(access, block_tables, block_tables.shape[0]),
    )

    kernel = get_kernel(PAGED_STORE, encode_macros(fmt, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)
