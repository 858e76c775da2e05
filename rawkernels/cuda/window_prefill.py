"""Launcher of window_prefill.cu."""

from typing import Any

import numpy as np

from ...layouts.formats import RECORD_ALIGN, RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ..checks import (
    check_latent_kernel,
    check_output,
    check_place,
    check_rows,
    check_window_prefill,
)
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from . import window_prefill_gqa, window_prefill_sm90
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
from .prefill_scratch import PrefillScratch, cut_scratch, scratch_bytes
from .rope_tables import device_rope_table
from .widths import piece_bytes

PARAMS = ParamsStruct(
    "WindowPrefillParams",
    (
        ("q", "const uint16_t*"),
        ("records", "const uint8_t*"),
        ("pivots", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("sink", "const float*"),
        ("rope_table", "const double2*"),
        ("out", "uint16_t*"),
        ("lse", "float*"),
        ("num_records", "int64_t"),
        ("num_q_heads", "int32_t"),
        ("head_tiles", "int32_t"),
        ("scale_log2", "float"),
    ),
    docs=(
        ("q", "bf16 [num_tokens, num_q_heads, HEAD_DIM]"),
        ("records", "[num_records, RECORD_BYTES]: history, then new tokens"),
        ("pivots", "[num_tokens, 4]"),
        ("positions", "[num_tokens]; read where ROPE_DIMS > 0"),
        ("sink", "[num_q_heads], may be null"),
        ("rope_table", "[table rows, ROPE_DIMS / 2] (cos, sin); null where ROPE_DIMS is 0"),
        ("out", "bf16 [num_tokens, num_q_heads, HEAD_DIM]"),
        ("lse", "[num_tokens, num_q_heads]"),
        ("head_tiles", "div_ceil(num_q_heads, HEAD_TILE)"),
        ("scale_log2", "softmax_scale * log2(e)"),
    ),
)
WINDOW_PREFILL = KernelSource("window_prefill", PARAMS, compiled_shapes(planar=False))
KERNELS = (WINDOW_PREFILL,)


def window_prefill(
    q: Any,
    records: Any,
    plan: PrefillPlan,
    record_format: RecordFormat,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    stream: Any = None,
    variant: Variant | None = None,
    scratch: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D] against a joint buffer -> out like q, lse float32 [T, H].

    `variant` forces one kernel where two serve the layer, see `choose_variant`. Records of K and V
    apart go through window_prefill_gqa.py, which decodes the keys into `scratch`: uint8
    [prefill_scratch.scratch_bytes] or longer, for launches of one stream; None takes it from
    CuPy's pool. Latent records need none.
    """
    op = "window_prefill"
    options = {"softmax_scale": softmax_scale, "sink": sink, "rope_out": rope_out}
    capped = {**options, "softcap": softcap}
    check_window_prefill(q, records, plan, record_format, out, lse, **capped)
    check_current_device(op, q)
    for name, array in (("q", q), ("out", out)):
        check_alignment(op, name, array, RECORD_ALIGN)
    check_alignment(op, "records", records, piece_bytes(record_format.record_bytes))
    if not record_format.latent:
        del capped["rope_out"]  # None: checked
        forced = {} if variant is None else {"variant": variant}
        arrays = (q, records, plan, record_format, out, lse)
        parts = None if scratch is None else parts_of_scratch(q, plan, record_format, scratch)
        window_prefill_gqa.launch(*arrays, **capped, **forced, stream=stream, scratch=parts)
        return
    check_latent_kernel(op, record_format, plan, softcap)
    check_head_dim(op, record_format)
    check_output_bits(op, out)

    tokens, num_q_heads = q.shape[:2]
    shape = (record_format, plan, num_q_heads, rope_out, softmax_scale)
    hopper = window_prefill_sm90.supports(*shape)
    if choose_variant(op, q.device.id, hopper, variant) == "sm_90a":
        window_prefill_sm90.launch(q, records, plan, out, lse, **options, stream=stream)
        return
    tile = head_tile(num_q_heads)
    tiles = div_ceil(num_q_heads, tile)

    macros = attention_macros(record_format, num_q_heads, rope_out)
    params = PARAMS.pack(
        q=device_pointer(q),
        records=device_pointer(records),
        pivots=device_pointer(plan.pivots),
        positions=device_pointer(plan.positions),
        sink=device_pointer(sink),
        rope_table=0 if rope_out is None else device_pointer(device_rope_table(rope_out)),
        out=device_pointer(out),
        lse=device_pointer(lse),
        num_records=records.shape[0],
        num_q_heads=num_q_heads,
        head_tiles=tiles,
        scale_log2=scale_log2(softmax_scale),
    )

    kernel = get_kernel(WINDOW_PREFILL, macros, shared_of(macros))
    kernel.launch((tokens * tiles,), (num_threads(tile),), params, stream)


def parts_of_scratch(q: Any, plan: PrefillPlan, fmt: RecordFormat, scratch: Any) -> PrefillScratch:
    """The caller's scratch, checked and cut."""
    op = "window_prefill"
    check_output(op, "scratch", scratch, (np.dtype(np.uint8),), ((None, ""),))
    size = scratch_bytes(plan.num_seqs, plan.most_keys, fmt)
    check_rows(op, "scratch", scratch, size, "scratch_bytes of the plan")
    check_place(op, q=q, scratch=scratch)
    check_alignment(op, "scratch", scratch, RECORD_ALIGN)
    return cut_scratch(scratch, plan, fmt)
