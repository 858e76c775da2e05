"""What every backend checks first: one function per operation.

Plain attribute access only, so that NumPy and CuPy arrays pass through the same code in a few
microseconds. Values (ids, rows) are checked on the host backends only, by the functions at the end:
on a GPU that would take a synchronisation, and kernels skip what is out of range instead.
"""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.formats import MX_BLOCK, RECORD_ALIGN, RecordFormat
from ..layouts.plans import DecodePlan, PrefillPlan
from ..layouts.rope import Rope
from ..layouts.sizes import div_ceil, is_count, is_flag, is_real, is_word
from ..layouts.slots import SlotLayout
from .arrays import BF16, FP16, UINT16, is_cuda
from .ring_access import RingAccess, ring_access

U8 = (np.dtype(np.uint8),)
I32 = (np.dtype(np.int32),)
U64 = (np.dtype(np.uint64),)
F32 = (np.dtype(np.float32),)
BF16_BITS = (BF16, UINT16)
BF16_OR_F32 = (BF16, UINT16, F32[0])
FP16_VALUES = (FP16,)
EXACT_OUT = np.dtype(np.float64)  # the reference, unrounded
FLOAT32_MAX = float(np.finfo(np.float32).max)  # scalars of kernels are float32

Axis = tuple[int | None, str]  # wanted extent (None: any) and what it comes from


def check_array(op: str, name: str, x: Any, dtypes: tuple, axes: tuple[Axis, ...]) -> None:
    """ArgumentError unless `x` is a C-contiguous array of one of the dtypes with these axes."""
    try:
        dtype, shape, flags = x.dtype, x.shape, x.flags
    except AttributeError:
        raise ArgumentError(
            f"{op}: {name} is {type(x).__name__}, not a NumPy or CuPy array"
        ) from None
    if dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentError(f"{op}: {name}.dtype={dtype} but must be {wanted}")
    if len(shape) != len(axes):
        raise ArgumentError(f"{op}: {name}.shape={tuple(shape)} but must have {len(axes)} axes")
    for i, (extent, source) in enumerate(axes):
        if extent is not None and shape[i] != extent:
            raise ArgumentError(f"{op}: {name}.shape[{i}]={shape[i]} but {source}={extent}")
    if not flags.c_contiguous:
        raise ArgumentError(
            f"{op}: {name} has shape={tuple(shape)} strides={tuple(x.strides)}, which is not "
            f"C-contiguous; pass a contiguous copy (ascontiguousarray)"
        )


def check_output(op: str, name: str, x: Any, dtypes: tuple, axes: tuple[Axis, ...]) -> None:
    """As `check_array`, and the array must be writeable."""
    check_array(op, name, x, dtypes, axes)
    if type(x) is np.ndarray and not x.flags.writeable:
        raise ArgumentError(f"{op}: {name} is read-only but is written to")


def check_place(op: str, **arrays: Any) -> None:
    """ArgumentError unless all arrays that are not None lie on the CPU, or on one GPU."""
    first_name, first = "", None
    for name, x in arrays.items():
        if x is None:
            continue
        place = x.device.id if is_cuda(x) else "cpu"
        if first is None:
            first_name, first = name, place
        elif place != first:
            raise ArgumentError(
                f"{op}: {name} is on device {place} but {first_name} is on device {first}"
            )


def check_scale_rule(op: str, scale_rounding: str, amax_floor: float) -> None:
    if not is_word(scale_rounding, ("ceil", "floor")):
        raise ArgumentError(f"{op}: scale_rounding={scale_rounding!r} but must be ceil or floor")
    if not is_real(amax_floor) or not 0.0 <= amax_floor <= FLOAT32_MAX:
        raise ArgumentError(
            f"{op}: amax_floor={amax_floor!r} but must be a number of at least 0, finite in float32"
        )


def check_flag(op: str, name: str, value: Any) -> None:
    if not is_flag(value):
        raise ArgumentError(f"{op}: {name}={value!r} but must be True or False")


def check_hash_layer(op: str, layer: Any) -> None:
    """A layer that a hash is keyed by, a word of 64 bits."""
    if not is_count(layer) or not 0 <= layer < 2**63:
        raise ArgumentError(f"{op}: layer={layer!r} but must be an integer, at least 0")


def check_seed(op: str, seed: Any) -> int:
    """A seed as a Python integer; kernels take it modulo 2^64."""
    if not is_count(seed):
        raise ArgumentError(f"{op}: seed={seed!r} but must be an integer")
    return int(seed)


def check_plan(op: str, plan: Any, wanted: type[DecodePlan] | type[PrefillPlan]) -> None:
    """ArgumentError unless `plan` is of the kind that the operation reads."""
    if not isinstance(plan, wanted):
        maker = "plan_decode" if wanted is DecodePlan else "plan_prefill"
        raise ArgumentError(f"{op}: plan is {type(plan).__name__}; pass what {maker} returns")


def check_quantize_mxfp8(
    x: Any, values: Any, scales: Any, scale_rounding: str, amax_floor: float
) -> None:
    op = "quantize_mxfp8"
    check_array(op, "x", x, BF16_OR_F32, ((None, ""), (None, "")))
    n, width = x.shape
    blocks = div_ceil(width, MX_BLOCK)
    rows = (n, "x.shape[0]")
    check_output(op, "values", values, U8, (rows, (width, "x.shape[1]")))
    check_output(op, "scales", scales, U8, (rows, (blocks, "div_ceil(x.shape[1], 32)")))
    check_scale_rule(op, scale_rounding, amax_floor)
    check_place(op, x=x, values=values, scales=scales)


def check_dequantize_mxfp8(values: Any, scales: Any, out: Any) -> None:
    op = "dequantize_mxfp8"
    check_array(op, "values", values, U8, ((None, ""), (None, "")))
    n, width = values.shape
    blocks = div_ceil(width, MX_BLOCK)
    rows = (n, "values.shape[0]")
    check_array(op, "scales", scales, U8, (rows, (blocks, "div_ceil(values.shape[1], 32)")))
    check_output(op, "out", out, BF16_OR_F32, (rows, (width, "values.shape[1]")))
    check_place(op, values=values, scales=scales, out=out)


def check_rope(op: str, rope: Any, width: int, name: str = "rope") -> None:
    if not isinstance(rope, Rope):
        raise ArgumentError(f"{op}: {name} is {type(rope).__name__}, not a Rope")
    if rope.dims > width:
        raise ArgumentError(f"{op}: {name}.dims={rope.dims} but the vectors have {width} dims")


def check_apply_rope(x: Any, positions: Any, out: Any, rope: Any) -> None:
    op = "apply_rope"
    check_array(op, "x", x, BF16_OR_F32, ((None, ""), (None, ""), (None, "")))
    check_array(op, "positions", positions, I32, ((x.shape[0], "x.shape[0]"),))
    axes = tuple((extent, f"x.shape[{i}]") for i, extent in enumerate(x.shape))
    check_output(op, "out", out, F32 if x.dtype == F32[0] else BF16_BITS, axes)
    check_rope(op, rope, x.shape[2])
    check_place(op, x=x, positions=positions, out=out)


def check_latent_format(op: str, fmt: Any) -> None:
    """ArgumentError unless `fmt` is a latent mxfp8 or bf16 record format."""
    if not isinstance(fmt, RecordFormat):
        raise ArgumentError(f"{op}: record_format is {type(fmt).__name__}, not a RecordFormat")
    if not fmt.latent or fmt.type not in ("mxfp8", "bf16"):
        kind = "latent" if fmt.latent else f"num_kv_heads={fmt.num_kv_heads}"
        raise ArgumentError(
            f"{op}: record format {fmt.id!r} ({fmt.type}, {kind}) is not supported; "
            "use a latent mxfp8 or bf16 format"
        )


def check_record_format(op: str, fmt: Any) -> None:
    """ArgumentError unless records of `fmt` can be made: latent mxfp8 or bf16, or K and V of any
    type."""
    if not isinstance(fmt, RecordFormat) or fmt.latent:
        check_latent_format(op, fmt)


def vector_dtypes(fmt: RecordFormat) -> tuple:
    """Dtypes of the vectors that records of `fmt` are made from and decoded to."""
    return FP16_VALUES if fmt.type == "fp16" else BF16_BITS


def check_slab(op: str, slab: Any, layout: Any, *, written: bool) -> int:
    """Number of state slots in a slab of this layout."""
    if not isinstance(layout, SlotLayout):
        raise ArgumentError(f"{op}: layout is {type(layout).__name__}, not a SlotLayout")
    return check_units(op, "slab", slab, "slot_bytes", layout.slot_bytes, written=written)


def check_units(op: str, name: str, flat: Any, unit: str, unit_bytes: int, *, written: bool) -> int:
    """Number of units in flat uint8 that kernels take for records: a slab's state slots, a pool's
    blocks. `unit` names the size of one."""
    check = check_output if written else check_array
    check(op, name, flat, U8, ((None, ""),))
    size = flat.shape[0]
    if size % unit_bytes != 0:
        raise ArgumentError(f"{op}: {name}.shape[0]={size} is no multiple of {unit}={unit_bytes}")
    if is_cuda(flat) and size and flat.data.ptr % RECORD_ALIGN != 0:
        raise ArgumentError(
            f"{op}: {name} starts at address {flat.data.ptr:#x}, which is no multiple of "
            f"{RECORD_ALIGN}; take memory as it is allocated, or from empty_slab"
        )
    return size // unit_bytes  # exact: checked above


def check_ring_len(op: str, plan: Any, layer: int, access: RingAccess) -> None:
    if plan.ring_len != access.ring_len:
        raise ArgumentError(
            f"{op}: plan.ring_len={plan.ring_len} but the ring of layer {layer} has "
            f"ring_len={access.ring_len}; build the plan for that ring"
        )
    if plan.sink_tokens != access.sink_tokens:
        raise ArgumentError(
            f"{op}: plan.sink_tokens={plan.sink_tokens} but the ring of layer {layer} has "
            f"sink_tokens={access.sink_tokens}; build the plan for that ring"
        )


def check_rows(op: str, name: str, x: Any, rows: int, source: str) -> None:
    if x.shape[0] < rows:
        raise ArgumentError(f"{op}: {name}.shape[0]={x.shape[0]} but {source}={rows}")


def _check_attention(
    op: str, q: Any, plan: Any, fmt: RecordFormat, out: Any, lse: Any, options: dict
) -> None:
    """q, out, lse, and the options softmax_scale, sink, softcap, rope_out."""
    tokens = plan.positions.shape[0]
    check_heads(op, q, fmt, (tokens, "the plan's tokens"), out, lse, options)
    if options.get("rope_out") is None:
        return
    if not fmt.latent:
        raise ArgumentError(
            f"{op}: rope_out is given but record format {fmt.id!r} holds V apart, which is not "
            "rotated; pass rope_out=None"
        )
    check_rope(op, options["rope_out"], fmt.head_dim, "rope_out")
    check_array(op, "plan.positions", plan.positions, I32, ((tokens, "q.shape[0]"),))


def check_heads(
    op: str, q: Any, fmt: RecordFormat, tokens: Axis, out: Any, lse: Any, options: dict
) -> None:
    """q, out and lse of an attention over records of `fmt`, and the options softmax_scale, sink and
    softcap (0.0 where it is left out)."""
    check_record_format(op, fmt)
    dtypes = vector_dtypes(fmt)
    check_array(op, "q", q, dtypes, (tokens, (None, ""), (fmt.head_dim, "the layout's head_dim")))
    rows, heads = (q.shape[0], "q.shape[0]"), (q.shape[1], "q.shape[1]")
    if q.shape[1] % fmt.num_kv_heads != 0:
        raise ArgumentError(
            f"{op}: q.shape[1]={q.shape[1]} query heads are no multiple of the format's "
            f"num_kv_heads={fmt.num_kv_heads}"
        )
    axes = (rows, heads, (q.shape[2], "q.shape[2]"))
    check_output(op, "out", out, (*dtypes, EXACT_OUT), axes)
    check_output(op, "lse", lse, F32, (rows, heads))
    check_score_numbers(op, options["softmax_scale"], options.get("softcap", 0.0))
    if options["sink"] is not None:
        check_array(op, "sink", options["sink"], F32, (heads,))


def check_score_numbers(op: str, softmax_scale: Any, softcap: Any) -> None:
    """ArgumentError unless kernels can take both as float32, and softcap is 0 or more."""
    if not is_real(softmax_scale) or not abs(softmax_scale) <= FLOAT32_MAX:
        raise ArgumentError(
            f"{op}: softmax_scale={softmax_scale!r} but must be a number, finite in float32"
        )
    if not is_real(softcap) or not 0.0 <= softcap <= FLOAT32_MAX:
        raise ArgumentError(
            f"{op}: softcap={softcap!r} but must be 0 (none) or a positive number, finite in "
            "float32"
        )


def check_latent_kernel(op: str, fmt: RecordFormat, plan: Any, softcap: float) -> None:
    """ArgumentError for what the CUDA kernels of latent records do not do."""
    check_latent_format(op, fmt)
    if softcap or plan.sink_tokens:
        raise ArgumentError(
            f"{op}: softcap={softcap} sink_tokens={plan.sink_tokens} but the CUDA kernels of "
            "latent records take 0 for both; use the cpu or reference backend"
        )


def check_window_prefill(
    q: Any, records: Any, plan: Any, fmt: Any, out: Any, lse: Any, **options: Any
) -> None:
    """`options`: softmax_scale, sink, rope_out, softcap."""
    op = "window_prefill"
    _check_attention(op, q, plan, fmt, out, lse, options)
    record_bytes = (fmt.record_bytes, "the format's record_bytes")
    check_array(op, "records", records, U8, ((None, ""), record_bytes))
    rows = plan.history_rows + plan.positions.shape[0]
    check_rows(op, "records", records, rows, "num_seqs * window + tokens")
    axes = ((q.shape[0], "q.shape[0]"), (4, "columns"))
    check_array(op, "plan.pivots", plan.pivots, I32, axes)
    if plan.sink_tokens:
        check_array(op, "plan.pinned_pivots", plan.pinned_pivots, I32, axes)
    check_place(
        op,
        q=q,
        records=records,
        pivots=plan.pivots,
        pinned_pivots=plan.pinned_pivots,
        positions=plan.positions,
        out=out,
        lse=lse,
        sink=options["sink"],
    )


def check_window_decode(
    q: Any,
    slab: Any,
    layout: Any,
    layer: int,
    plan: Any,
    out: Any,
    lse: Any,
    kind: str,
    **options: Any,
) -> tuple[RingAccess, int]:
    """The ring's addresses and the number of state slots. `options`: softmax_scale, sink,
    rope_out, softcap."""
    op = "window_decode"
    num_slots = check_slab(op, slab, layout, written=False)
    access = ring_access(op, layout, layer, kind)
    check_ring_len(op, plan, layer, access)
    _check_attention(op, q, plan, access.format, out, lse, options)
    axes = ((q.shape[0], "q.shape[0]"), (2, "columns"))
    check_array(op, "plan.offset_len", plan.offset_len, I32, axes)
    if plan.sink_tokens:
        check_array(op, "plan.num_pinned", plan.num_pinned, I32, axes[:1])
    check_place(
        op,
        q=q,
        slab=slab,
        offset_len=plan.offset_len,
        num_pinned=plan.num_pinned,
        positions=plan.positions,
        out=out,
        lse=lse,
        sink=options["sink"],
    )
    return access, num_slots


def _check_tokens(op: str, token_ids: Any, positions: Any, tokens: int) -> None:
    rows = ((tokens, "tokens"),)
    check_array(op, "token_ids", token_ids, I32, rows)
    check_array(op, "positions", positions, I32, rows)


def check_seeded_activations(token_ids: Any, positions: Any, out: Any) -> None:
    op = "seeded_activations"
    check_output(op, "out", out, BF16_BITS, ((None, ""), (None, "")))
    _check_tokens(op, token_ids, positions, out.shape[0])
    check_place(op, token_ids=token_ids, positions=positions, out=out)


def check_stack_activations(previous: Any, token_ids: Any, positions: Any, q: Any, kv: Any) -> None:
    op = "stack_activations"
    check_array(op, "previous", previous, BF16_BITS, ((None, ""), (None, ""), (None, "")))
    axes = tuple((extent, f"previous.shape[{i}]") for i, extent in enumerate(previous.shape))
    check_output(op, "q", q, BF16_BITS, axes)
    check_output(op, "kv", kv, BF16_BITS, (axes[0], axes[2]))
    _check_tokens(op, token_ids, positions, previous.shape[0])
    check_place(op, previous=previous, token_ids=token_ids, positions=positions, q=q, kv=kv)


def check_digest_outputs(out: Any, digests: Any) -> None:
    op = "digest_outputs"
    check_array(op, "out", out, BF16_BITS, ((None, ""), (None, "")))
    check_output(op, "digests", digests, U64, ((out.shape[0], "out.shape[0]"),))
    check_place(op, out=out, digests=digests)
