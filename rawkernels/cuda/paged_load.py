"""Launcher of paged_load.cu, and what it shares with the other kernels that decode records."""

from typing import Any

from ...layouts.formats import MX_BLOCK, RecordFormat, make_record_format
from ...layouts.paged import PagedLayout
from ...layouts.sizes import div_ceil
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from ..paged_checks import check_paged_load
from .record_params import POOL_DOCS, POOL_FIELDS, pool_values
from .widths import MAX_PIECE_BYTES, piece_bytes

THREADS = 128
TARGET_UNITS = 4 * THREADS  # units of a thread block: four loads in flight a thread
WORDS_PER_UNIT = 8  # 16-bit values of 16 bytes

PARAMS = ParamsStruct(
    "PagedLoadParams",
    (
        ("pool", "const uint8_t*"),
        ("block_tables", "const int32_t*"),
        ("cu_seqlens_k", "const int32_t*"),
        ("k", "uint16_t*"),
        ("v", "uint16_t*"),
        ("num_rows", "int64_t"),
        *POOL_FIELDS,
    ),
    docs=(
        ("pool", "[num_blocks * block_bytes]"),
        ("block_tables", "[>= num_seqs, max_blocks]"),
        ("cu_seqlens_k", "[num_seqs + 1]"),
        ("k", "[num_rows, KV_HEADS, HEAD_DIM]"),
        ("v", "like k"),
        *POOL_DOCS,
    ),
)


def unpack_macros(fmt: RecordFormat, load_bytes: int) -> MacroItems:
    """Macros of unpack_records.cuh: records of `fmt`, read in pieces of `load_bytes`."""
    part_dims = fmt.num_kv_heads * fmt.head_dim
    if fmt.type == "mxfp8":
        unit_dims = 2 * WORDS_PER_UNIT
    else:
        unit_dims = WORDS_PER_UNIT if part_dims % WORDS_PER_UNIT == 0 else 1
    row_units = 2 * part_dims // unit_dims  # exact: parts are whole units
    return macro_set(
        HEAD_DIM=fmt.head_dim,
        KV_HEADS=fmt.num_kv_heads,
        RECORD_MXFP8=int(fmt.type == "mxfp8"),
        LOAD_BYTES=load_bytes,
        LAUNCH_BLOCK_ROWS=max(TARGET_UNITS // row_units, 1),  # rounded down: whole rows
    )


def check_key_alignment(op: str, fmt: RecordFormat, k: Any, v: Any) -> None:
    """Rows of whole 16-byte units must start at one."""
    if fmt.num_kv_heads * fmt.head_dim % WORDS_PER_UNIT == 0:
        for name, array in (("k", k), ("v", v)):
            check_alignment(op, name, array, MAX_PIECE_BYTES)


def _build(load_bytes: int, record_type: str, head_dim: int, kv_heads: int) -> MacroItems:
    fmt = make_record_format(record_type, head_dim, latent=False, num_kv_heads=kv_heads)
    return unpack_macros(fmt, load_bytes)


UNPACK_BUILDS = (
    _build(16, "mxfp8", 128, 8),  # Mistral 7B
    _build(16, "mxfp8", 64, 8),  # gpt-oss
    _build(16, "bf16", 128, 16),  # Gemma
    _build(16, "fp16", 256, 4),
    _build(2, "mxfp8", 64, 1),
    _build(1, "mxfp8", MX_BLOCK, 1),
    _build(4, "bf16", 6, 3),  # one thread an element
)
PAGED_LOAD = KernelSource("paged_load", PARAMS, macro_sets=UNPACK_BUILDS)
KERNELS = (PAGED_LOAD,)


def paged_load(
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    stream: Any = None,
) -> None:
    """pool flat uint8 -> k, v bf16 or float16 [rows, H, D]: row cu_seqlens_k[i] + j is position j
    of sequence i; zeros where its block is not in the pool. Rows past the end are left."""
    access = check_paged_load(pool, layout, layer, block_tables, cu_seqlens_k, k, v)
    fmt = access.format
    check_current_device("paged_load", pool)
    check_key_alignment("paged_load", fmt, k, v)

    places = (access.block_bytes, access.offset, fmt.record_bytes, fmt.part_bytes)
    macros = unpack_macros(fmt, piece_bytes(device_pointer(pool), *places))
    grid = (div_ceil(k.shape[0], dict(macros)["LAUNCH_BLOCK_ROWS"]),)

    params = PARAMS.pack(
        pool=device_pointer(pool),
        block_tables=device_pointer(block_tables),
        cu_seqlens_k=device_pointer(cu_seqlens_k),
        k=device_pointer(k),
        v=device_pointer(v),
        num_rows=k.shape[0],
        **pool_values(access, block_tables, cu_seqlens_k.shape[0] - 1),
    )

    get_kernel(PAGED_LOAD, macros).launch(grid, (THREADS,), params, stream)
