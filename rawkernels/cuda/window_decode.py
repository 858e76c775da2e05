"""Launcher of window_decode.cu."""

from typing import Any

from ...layouts.errors import ArgumentError
from ...layouts.formats import RECORD_ALIGN
from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ...layouts.slots import RingKind, SlotLayout
from ..checks import check_latent_kernel, check_window_decode
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from ..ring_access import RingAccess
from . import window_decode_gqa, window_decode_sm90
from .attention_shapes import (
    Variant,
    attention_macros,
    check_head_dim,
    check_output_bits,
    choose_variant,
    compiled_shapes,
    head_tile,
    num_threads,
    scale_log2,
    shared_of,
)
from .gqa_shapes import check_output_type, check_shape
from .rope_tables import device_rope_table

PARAMS = ParamsStruct(
    "WindowDecodeParams",
    (
        ("q", "const uint16_t*"),
        ("slab", "const uint8_t*"),
        ("offset_len", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("sink", "const float*"),
        ("rope_table", "const double2*"),
        ("out", "uint16_t*"),
        ("lse", "float*"),
        ("slot_bytes", "int64_t"),
        ("value_offset", "int64_t"),
        ("scale_offset", "int64_t"),
        ("num_rows", "int64_t"),
        ("ring_len", "int32_t"),
        ("num_q_heads", "int32_t"),
        ("head_tiles", "int32_t"),
        ("scale_log2", "float"),
    ),
    docs=(
        ("q", "bf16 [num_tokens, num_q_heads, HEAD_DIM]"),
        ("slab", "[num_state_slots * slot_bytes]"),
        ("offset_len", "[num_tokens, 2]"),
        ("positions", "[num_tokens]; read where ROPE_DIMS > 0"),
        ("sink", "[num_q_heads], may be null"),
        ("rope_table", "[table rows, ROPE_DIMS / 2] (cos, sin); null where ROPE_DIMS is 0"),
        ("out", "bf16 [num_tokens, num_q_heads, HEAD_DIM]"),
        ("lse", "[num_tokens, num_q_heads]"),
        ("value_offset", "of the ring's first record, from the slot's start"),
        ("scale_offset", "of the ring's first scales, from the slot's start"),
        ("num_rows", "num_state_slots * ring_len"),
        ("head_tiles", "div_ceil(num_q_heads, HEAD_TILE)"),
        ("scale_log2", "softmax_scale * log2(e)"),
    ),
)
WINDOW_DECODE = KernelSource("window_decode", PARAMS, compiled_shapes(planar=True))
KERNELS = (WINDOW_DECODE,)


def window_decode(
    q: Any,
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    kind: RingKind = "swa",
    stream: Any = None,
    variant: Variant | None = None,
    scratch: Any = None,
) -> None:
    """q [T, H, D] against the rings of a layer -> out like q, lse float32 [T, H]; bf16, or float16
    for fp16 records.

    `variant` forces one kernel where two serve the layer, see `choose_variant`. `scratch`: for
    records of K and V apart, see `split_workspace`; latent ones need none.
    """
    op = "window_decode"
    options = {"softmax_scale": softmax_scale, "sink": sink, "rope_out": rope_out}
    capped = {**options, "softcap": softcap}
    access, num_slots = check_window_decode(q, slab, layout, layer, plan, out, lse, kind, **capped)
    if not access.format.latent:
        launch_gqa(q, slab, plan, out, lse, access, num_slots, capped, stream, variant, scratch)
        return
    check_latent_kernel(op, access.format, plan, softcap)
    check_head_dim(op, access.format)
    check_output_bits(op, out)
    check_current_device(op, q)
    for name, array in (("q", q), ("out", out), ("slab", slab)):
        check_alignment(op, name, array, RECORD_ALIGN)

    tokens, num_q_heads = q.shape[:2]
    hopper = window_decode_sm90.supports(access, num_q_heads, rope_out, softmax_scale)
    if choose_variant(op, q.device.id, hopper, variant) == "sm_90a":
        arrays = (q, slab, plan, out, lse, access, num_slots)
        window_decode_sm90.launch(*arrays, **options, stream=stream)
        return
    tile = head_tile(num_q_heads)
    tiles = div_ceil(num_q_heads, tile)

    planar = access.format.plane_order == "planar"
    macros = attention_macros(access.format, num_q_heads, rope_out, planar=planar)
    params = PARAMS.pack(
        q=device_pointer(q),
        slab=device_pointer(slab),
        offset_len=device_pointer(plan.offset_len),
        positions=device_pointer(plan.positions),
        sink=device_pointer(sink),
        rope_table=0 if rope_out is None else device_pointer(device_rope_table(rope_out)),
        out=device_pointer(out),
        lse=device_pointer(lse),
        slot_bytes=access.slot_bytes,
        value_offset=access.value_offset,
        scale_offset=access.scale_offset,
        num_rows=num_slots * access.ring_len,
        ring_len=access.ring_len,
        num_q_heads=num_q_heads,
        head_tiles=tiles,
        scale_log2=scale_log2(softmax_scale),
    )

    kernel = get_kernel(WINDOW_DECODE, macros, shared_of(macros))
    kernel.launch((tokens * tiles,), (num_threads(tile),), params, stream)


def launch_gqa(
    q: Any,
    slab: Any,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    access: RingAccess,
    num_slots: int,
    options: dict[str, Any],
    stream: Any,
    variant: Variant | None,
    scratch: Any,
) -> None:
    """The launch for records that hold K and V apart: one kernel serves them on every GPU."""
    op = "window_decode"
    check_shape(op, access.format, q.shape[1])
    if variant not in (None, "portable"):
        raise ArgumentError(
            f"{op}: variant={variant!r} but one kernel serves grouped-query records: 'portable'"
        )
    check_output_type(op, q, out)
    check_current_device(op, q)
    for name, array in (("q", q), ("out", out), ("slab", slab)):
        check_alignment(op, name, array, RECORD_ALIGN)
    given = {name: options[name] for name in ("softmax_scale", "sink", "softcap")}
    arrays = (q, slab, plan, out, lse, access, num_slots)
    window_decode_gqa.launch(*arrays, **given, stream=stream, scratch=scratch)
