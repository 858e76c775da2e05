"""Launcher of window_prefill_sm90.cu, for Hopper GPUs."""

from typing import Any

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.rope import Rope
from ...layouts.sizes import div_exact
from ..device.kernel_source import HOPPER_ARCHS, HOPPER_SHARED_BYTES, KernelSource, ParamsStruct
from ..device.module import device_pointer, get_kernel
from ..device.probe import multiprocessors
from ..device.tensor_map import bf16_tensor_map
from .attention_shapes import scale_log2
from .latent_sm90 import (
    HEAD_DIM,
    HEAD_TILE,
    MACROS,
    NUM_THREADS,
    OUT_BOX_ROWS,
    serves,
)
from .rope_tables import device_rope_table

PARAMS = ParamsStruct(
    "Params",
    (
        ("q_map", "TensorMap"),
        ("out_map", "TensorMap"),
        ("records", "const uint8_t*"),
        ("lse", "float*"),
        ("sink", "const float*"),
        ("rope_table", "const double2*"),
        ("positions", "const int32_t*"),
        ("pivots", "const int4*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("num_records", "int64_t"),
        ("scale_log2", "float"),
        ("window", "int32_t"),
        ("ring_len", "int32_t"),
        ("head_tiles", "int32_t"),
        ("num_tokens", "int32_t"),
        ("num_seqs", "int32_t"),
        ("rope_adjacent", "int32_t"),
    ),
    docs=(
        ("q_map", "bf16 [num_tokens * num_q_heads, 512], boxes of 64 rows"),
        ("out_map", "the same of the output, boxes of 16 rows"),
        ("records", "[num_records, 528]: history, then new tokens"),
        ("lse", "[num_tokens, num_q_heads]"),
        ("sink", "[num_q_heads], may be null"),
        ("rope_table", "[table rows, 32] (cos, sin); null without rotation"),
        ("positions", "[num_tokens]"),
        ("pivots", "[num_tokens]"),
        ("cu_seqlens_q", "[num_seqs + 1]"),
        ("scale_log2", "softmax_scale * log2(e)"),
        ("head_tiles", "num_q_heads / 64"),
        ("rope_adjacent", "1 for pairs (2i, 2i + 1), 0 for (i, i + 32)"),
    ),
)
WINDOW_PREFILL_SM90 = KernelSource("window_prefill_sm90", PARAMS, (MACROS,), HOPPER_ARCHS)
KERNELS = (WINDOW_PREFILL_SM90,)


def supports(
    record_format: RecordFormat,
    plan: PrefillPlan,
    num_q_heads: int,
    rope_out: Rope | None,
    softmax_scale: float,
) -> bool:
    """Whether the Hopper kernel serves a layer. It depends on nothing that changes from batch to
    batch, because the portable kernel's bits are others."""
    return plan.window <= plan.ring_len and serves(
        record_format, plan.ring_len, num_q_heads, rope_out, softmax_scale
    )


def launch(
    q: Any,
    records: Any,
    plan: PrefillPlan,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    stream: Any = None,
    num_blocks: int | None = None,
) -> None:
    """window_prefill on arguments that `check_window_prefill` and `supports` have passed; the
    arrays lie on the current device and start at multiples of 16.

    `num_blocks` overrides one thread block a multiprocessor, for tests.
    """
    num_tokens, num_q_heads = q.shape[:2]
    if num_tokens == 0:
        return
    rows = num_tokens * num_q_heads
    params = PARAMS.pack(
        q_map=bf16_tensor_map(device_pointer(q), rows, HEAD_DIM, HEAD_TILE),
        out_map=bf16_tensor_map(device_pointer(out), rows, HEAD_DIM, OUT_BOX_ROWS),
        records=device_pointer(records),
        lse=device_pointer(lse),
        sink=device_pointer(sink),
        rope_table=0 if rope_out is None else device_pointer(device_rope_table(rope_out)),
        positions=device_pointer(plan.positions),
        pivots=device_pointer(plan.pivots),
        cu_seqlens_q=device_pointer(plan.cu_seqlens_q),
        num_records=records.shape[0],
        scale_log2=scale_log2(softmax_scale),
        window=plan.window,
        ring_len=plan.ring_len,
        head_tiles=div_exact(num_q_heads, HEAD_TILE),
        num_tokens=num_tokens,
        num_seqs=plan.num_seqs,
        rope_adjacent=int(rope_out is not None and rope_out.pairing == "adjacent"),
    )

    kernel = get_kernel(WINDOW_PREFILL_SM90, MACROS, HOPPER_SHARED_BYTES)
    grid = min(num_tokens, num_blocks or multiprocessors())
    kernel.launch((grid,), (NUM_THREADS,), params, stream)
