"""Launcher of paged_decode.cu: decode attention over the paged pool of global layers."""

from typing import Any

from ...layouts.formats import RECORD_ALIGN, make_record_format
from ...layouts.paged import PagedLayout
from ...layouts.sizes import div_ceil
from ..device.dependent_launch import launch_dependent
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from ..device.probe import current_device, multiprocessors
from ..paged_checks import PagedAccess, check_paged_decode
from .attention_shapes import current_arch
from .gqa_params import ARRAY_FIELDS, NUMBER_FIELDS, SHARED_DOCS, shared_values
from .gqa_shapes import (
    Cut,
    block_threads,
    check_output_type,
    check_shape,
    choose_cut,
    gqa_macros,
    shared_bytes,
)

MAX_RUN = 32  # MAX_RUN of paged_decode.cu

PARAMS = ParamsStruct(
    "PagedDecodeParams",
    (
        ("q", "const uint16_t*"),
        ("pool", "const uint8_t*"),
        ("block_tables", "const int32_t*"),
        ("seq_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        *ARRAY_FIELDS,
        ("block_bytes", "int64_t"),
        ("layer_offset", "int64_t"),
        ("num_tokens", "int32_t"),
        ("num_tables", "int32_t"),
        ("max_blocks", "int32_t"),
        ("max_length", "int32_t"),
        ("block_size", "int32_t"),
        ("num_pool_blocks", "int32_t"),
        ("run", "int32_t"),
        *NUMBER_FIELDS,
    ),
    docs=(
        *SHARED_DOCS,
        ("pool", "[num_pool_blocks * block_bytes]"),
        ("block_tables", "[num_tables, max_blocks]"),
        ("seq_ids", "[num_tokens], rows of block_tables; -1 is padding"),
        ("positions", "[num_tokens]"),
        ("layer_offset", "of the layer's first record, from a block's start"),
        ("max_length", "max_blocks * block_size"),
        ("block_size", "tokens of a block of the pool"),
        ("run", "tokens of a sequence that a thread block takes at most"),
        ("row_groups", "of 8 * ROW_TILES rows, for `run` tokens"),
        ("num_parts", "of max_length keys"),
    ),
)


def compiled_shapes() -> tuple[MacroItems, ...]:
    """The builds that `ringslab compile` makes: global layers of the packaged models, and every
    branch that window_decode_gqa's do not have."""

    def build(record_type: Any, dim: int, kv_heads: int, cut: Cut, softcap: bool) -> MacroItems:
        fmt = make_record_format(record_type, dim, latent=False, num_kv_heads=kv_heads)
        return gqa_macros(fmt, cut, 131_072, softcap)

    return (
        build("bf16", 64, 8, Cut(4, 1, 3, True), False),  # gpt_oss_120b
        build("bf16", 128, 16, Cut(4, 1, 3, True), True),  # gemma2_27b
        build("bf16", 128, 16, Cut(4, 1, 3, True), False),  # gemma3_27b
        build("mxfp8", 128, 8, Cut(8, 1, 3, True), False),
        build("fp16", 96, 2, Cut(1, 1, 3, False), False),
        build("mxfp8", 96, 2, Cut(1, 1, 3, False), False),
    )


PAGED_DECODE = KernelSource("paged_decode", PARAMS, compiled_shapes())
KERNELS = (PAGED_DECODE,)


def paged_decode(
    q: Any,
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: Any = None,
    stream: Any = None,
    scratch: Any = None,
    cut: Cut | None = None,
    run: int | None = None,
    overlap: bool = True,
) -> None:
    """q bf16 or float16 [T, H, D] against all keys of their sequences -> out like q, lse float32
    [T, H]. Values of ids, positions and tables are not checked: what is out of range sees nothing,
    a block outside the pool counts as keys and values of 0.

    `scratch`: see `split_workspace`. `cut` and `run` (tokens of a sequence that share a thread
    block) override what is chosen, for tests and benchmarks. `overlap`: see
    `window_decode_gqa.launch`.
    """
    op = "paged_decode"
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "sink": sink}
    access = check_paged_decode(
        q, pool, layout, layer, block_tables, seq_ids, positions, out, lse, **options
    )
    fmt, group = access.format, check_shape(op, access.format, q.shape[1])
    check_output_type(op, q, out)
    check_current_device(op, q)
    for name, array in (("q", q), ("out", out), ("pool", pool)):
        check_alignment(op, name, array, RECORD_ALIGN)
    num_tokens, max_length = q.shape[0], block_tables.shape[1] * access.block_size
    if num_tokens == 0:
        return

    hopper = current_arch(current_device()) == "sm_90a"
    if run is None:  # several tokens a sequence where there are more tokens than tables
        run = min(div_ceil(num_tokens, max(block_tables.shape[0], 1)), MAX_RUN)
    if cut is None:
        units = div_ceil(num_tokens, run)
        cut = choose_cut(fmt, group, run, units, max_length, multiprocessors(), hopper=hopper)
    arrays = (q, pool, block_tables, seq_ids, positions, out, lse)
    blocks, params = pack_params(
        *arrays, access, softmax_scale, softcap, sink, cut, run, max_length, stream, scratch
    )

    macros = gqa_macros(fmt, cut, max_length, softcap != 0.0)
    kernel = get_kernel(PAGED_DECODE, macros, shared_bytes(fmt, cut))
    if overlap and hopper:
        launch_dependent(kernel, blocks, block_threads(cut), params, stream)
    else:
        kernel.launch((blocks,), (block_threads(cut),), params, stream)


def pack_params(
    q: Any,
    pool: Any,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    out: Any,
    lse: Any,
    access: PagedAccess,
    softmax_scale: float,
    softcap: float,
    sink: Any,
    cut: Cut,
    run: int,
    max_length: int,
    stream: Any,
    scratch: Any,
) -> tuple[int, Any]:
    """Thread blocks and the kernel's parameters."""
    units, shared = shared_values(
        access.format,
        cut,
        q,
        out,
        lse,
        num_runs=q.shape[0],
        run_tokens=run,
        max_length=max_length,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        stream=stream,
        scratch=scratch,
    )
    return units * cut.splits, PARAMS.pack(
        **shared,
        pool=device_pointer(pool),
        block_tables=device_pointer(block_tables),
        seq_ids=device_pointer(seq_ids),
        positions=device_pointer(positions),
        block_bytes=access.block_bytes,
        layer_offset=access.offset,
        num_tokens=q.shape[0],
        num_tables=block_tables.shape[0],
        max_blocks=block_tables.shape[1],
        max_length=max_length,
        block_size=access.block_size,
        num_pool_blocks=access.num_blocks,
        run=run,
    )
