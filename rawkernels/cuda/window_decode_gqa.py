"""Launcher of window_decode_gqa.cu: decode attention over rings of grouped-query records."""

from typing import Any

from ...layouts.formats import make_record_format
from ...layouts.plans import DecodePlan
from ..device.dependent_launch import launch_dependent
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct
from ..device.module import device_pointer, get_kernel
from ..device.probe import current_device, multiprocessors
from ..ring_access import RingAccess
from .attention_shapes import current_arch
from .gqa_params import ARRAY_FIELDS, NUMBER_FIELDS, SHARED_DOCS, shared_values
from .gqa_shapes import (
    Cut,
    block_threads,
    check_shape,
    choose_cut,
    gqa_macros,
    shared_bytes,
)

PARAMS = ParamsStruct(
    "WindowDecodeGqaParams",
    (
        ("q", "const uint16_t*"),
        ("slab", "const uint8_t*"),
        ("offset_len", "const int32_t*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("num_pinned", "const int32_t*"),
        *ARRAY_FIELDS,
        ("slot_bytes", "int64_t"),
        ("ring_offset", "int64_t"),
        ("num_rows", "int64_t"),
        ("one_token", "int32_t"),
        ("ring_len", "int32_t"),
        ("pinned", "int32_t"),
        *NUMBER_FIELDS,
    ),
    docs=(
        *SHARED_DOCS,
        ("slab", "[num_state_slots * slot_bytes]"),
        ("offset_len", "[num_tokens, 2]"),
        ("cu_seqlens_q", "[num_seqs + 1]"),
        ("num_pinned", "[num_tokens]; null where `pinned` is 0"),
        ("ring_offset", "of the ring's first record, from the slot's start"),
        ("num_rows", "num_state_slots * ring_len"),
        ("one_token", "1 where token i is sequence i's only one: cu_seqlens_q is not read"),
        ("pinned", "first rows of a ring that hold a sequence's first positions for good"),
        ("row_groups", "of 8 * ROW_TILES rows, for the longest sequence"),
        ("num_parts", "of ring_len keys"),
    ),
)


def compiled_shapes() -> tuple[MacroItems, ...]:
    """The builds that `ringslab compile` makes: the packaged models' layers and every branch."""

    def build(
        record_type: Any,
        dim: int,
        kv_heads: int,
        heads: int,
        ring_len: int,
        *,
        stages: int = 3,
        row_tiles: int = 1,
        bulk: bool = True,
        fetchers: int = 1,
        softcap: bool = False,
    ) -> MacroItems:
        fmt = make_record_format(record_type, dim, latent=False, num_kv_heads=kv_heads)
        cut = Cut(heads, row_tiles, stages, bulk, fetchers=fetchers)
        return gqa_macros(fmt, cut, ring_len, softcap)

    return (
        build("bf16", 64, 8, 4, 129, bulk=False),  # gpt_oss_120b
        build("mxfp8", 64, 8, 8, 129, fetchers=2),
        build("bf16", 64, 8, 4, 134, row_tiles=4, stages=6, bulk=False, fetchers=2),
        build("bf16", 128, 8, 4, 4097, bulk=False, fetchers=2),  # mistral_7b
        build("bf16", 128, 8, 4, 4097, bulk=False, stages=6, fetchers=4),
        build("mxfp8", 128, 8, 8, 4097, fetchers=4),
        build("mxfp8", 64, 8, 8, 4097, fetchers=4),
        build("bf16", 128, 16, 4, 4097, bulk=False, fetchers=2, softcap=True),  # gemma2_27b
        build("fp16", 96, 4, 4, 134),
        build("mxfp8", 96, 4, 2, 1024, bulk=False),  # runs at odd multiples of 4
        build("bf16", 256, 2, 2, 1024),
        build("mxfp8", 256, 1, 1, 134),
    )


WINDOW_DECODE_GQA = KernelSource("window_decode_gqa", PARAMS, compiled_shapes())
KERNELS = (WINDOW_DECODE_GQA,)


def launch(
    q: Any,
    slab: Any,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    access: RingAccess,
    num_state_slots: int,
    *,
    softmax_scale: float,
    sink: Any = None,
    softcap: float = 0.0,
    stream: Any = None,
    scratch: Any = None,
    cut: Cut | None = None,
    overlap: bool = True,
) -> None:
    """window_decode on checked arguments of a grouped-query format; the arrays lie on the current
    device and start at multiples of 16.

    `scratch`: see `split_workspace`. `cut` overrides `choose_cut`, for tests and benchmarks.
    `overlap`: the launch may begin while the kernel ahead of it ends (see dependent_launch.py); the
    plan must be older than that kernel.
    """
    fmt = access.format
    num_tokens, num_q_heads = q.shape[:2]
    group = check_shape("window_decode", fmt, num_q_heads)
    if num_tokens == 0:
        return
    hopper = current_arch(current_device()) == "sm_90a"
    if cut is None:
        sizes = (fmt, group, max(plan.max_seqlen_q, 1), plan.num_seqs, access.ring_len)
        cut = choose_cut(*sizes, multiprocessors(), hopper=hopper)
    macros = gqa_macros(fmt, cut, access.ring_len, softcap != 0.0)
    arrays = (q, slab, plan, out, lse, access, num_state_slots)
    grid, params = pack_params(*arrays, softmax_scale, sink, softcap, cut, stream, scratch)
    kernel = get_kernel(WINDOW_DECODE_GQA, macros, shared_bytes(fmt, cut))
    if overlap and hopper:
        launch_dependent(kernel, grid, block_threads(cut), params, stream)
    else:
        kernel.launch((grid,), (block_threads(cut),), params, stream)


def pack_params(
    q: Any,
    slab: Any,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    access: RingAccess,
    num_state_slots: int,
    softmax_scale: float,
    sink: Any,
    softcap: float,
    cut: Cut,
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
        num_runs=plan.num_seqs,
        run_tokens=max(plan.max_seqlen_q, 1),
        max_length=access.ring_len,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        stream=stream,
        scratch=scratch,
    )
    return units * cut.splits, PARAMS.pack(
        **shared,
        slab=device_pointer(slab),
        offset_len=device_pointer(plan.offset_len),
        cu_seqlens_q=device_pointer(plan.cu_seqlens_q),
        num_pinned=device_pointer(plan.num_pinned),
        slot_bytes=access.slot_bytes,
        ring_offset=access.value_offset,
        num_rows=num_state_slots * access.ring_len,
        one_token=int(plan.max_seqlen_q == 1 and plan.num_seqs == q.shape[0]),
        ring_len=access.ring_len,
        pinned=plan.sink_tokens,
    )
