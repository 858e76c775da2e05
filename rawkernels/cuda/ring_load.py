"""Launcher of ring_load.cu, and of its variant that reads a joint buffer."""

from typing import Any

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.sizes import div_ceil
from ...layouts.slots import SlotLayout
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from ..record_checks import check_ring_load
from .paged_load import THREADS, UNPACK_BUILDS, check_key_alignment, unpack_macros
from .record_params import PARTED_RING_FIELDS, RING_DOCS, ring_values
from .widths import piece_bytes

ROW_TURNS = 4  # times the rows of a thread block of paged_load: each looks for its first row

PARAMS = ParamsStruct(
    "RingLoadParams",
    (
        ("slab", "const uint8_t*"),
        ("records", "const uint8_t*"),
        ("state_ids", "const int32_t*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("pivots", "const int32_t*"),
        ("pinned_pivots", "const int32_t*"),
        ("k", "uint16_t*"),
        ("v", "uint16_t*"),
        ("cu_seqlens_k", "int32_t*"),
        ("q_ends", "int32_t*"),
        ("num_rows", "int64_t"),
        ("num_tokens", "int64_t"),
        ("num_records", "int64_t"),
        ("first_new", "int64_t"),
        ("record_bytes", "int64_t"),
        ("part_bytes", "int64_t"),
        ("value_bytes", "int64_t"),
        *PARTED_RING_FIELDS,
        ("ring_len", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("window", "int32_t"),
        ("num_state_slots", "int32_t"),
        ("num_seqs", "int32_t"),
        ("num_chunks", "int32_t"),
    ),
    docs=(
        ("slab", "[num_state_slots * slot_bytes]; null where JOINT"),
        ("records", "[num_records, record_bytes]"),
        ("state_ids", "[num_seqs]"),
        ("cu_seqlens_q", "[num_seqs + 1]"),
        ("positions", "[num_tokens]"),
        ("pivots", "[num_tokens, 4]"),
        ("pinned_pivots", "[num_tokens, 4]; null without pinned positions"),
        ("k", "[num_rows, KV_HEADS, HEAD_DIM]"),
        ("v", "like k"),
        ("cu_seqlens_k", "[num_seqs + 1], JOINT: + 2"),
        ("q_ends", "[num_seqs + 2]; null unless JOINT"),
        ("first_new", "row of `records` with the first new record"),
        ("value_bytes", "of one part of a whole record"),
        *RING_DOCS,
        ("num_chunks", "thread blocks of one sequence"),
    ),
)


def load_macros(fmt: RecordFormat, load_bytes: int, *, joint: bool) -> MacroItems:
    """Macros of a build for records of `fmt`, read in pieces of `load_bytes`."""
    return with_joint(unpack_macros(fmt, load_bytes), joint)


def with_joint(macros: MacroItems, joint: bool) -> MacroItems:
    """Macros of unpack_records.cuh with more rows a thread block, and where the history lies."""
    rows = ROW_TURNS * int(dict(macros)["LAUNCH_BLOCK_ROWS"])
    return macro_set(**{**dict(macros), "LAUNCH_BLOCK_ROWS": rows, "JOINT": int(joint)})


RING_LOAD = KernelSource(
    "ring_load",
    PARAMS,
    tuple(with_joint(build, joint) for build in UNPACK_BUILDS for joint in (False, True)),
)
KERNELS = (RING_LOAD,)


def ring_load(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    records: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """slab flat uint8, records uint8 [>= T, record_bytes] -> cu_seqlens_k int32 [num_seqs + 1],
    k, v bf16 or float16 [rows, H, D]: for each sequence its pinned history, the history of its
    window, its new records. Histories of state ids that name no slot are zeros."""
    op = "ring_load"
    ring, num_slots = check_ring_load(slab, layout, layer, plan, records, cu_seqlens_k, k, v, kind)
    check_current_device(op, slab)
    fmt = ring.format
    check_key_alignment(op, fmt, k, v)
    if plan.num_seqs == 0:
        cu_seqlens_k.fill(0)
        return

    in_ring = (ring.slot_bytes, ring.value_offset, ring.value_stride, ring.value_part_stride)
    pointers = (device_pointer(slab), device_pointer(records))
    load_bytes = piece_bytes(*pointers, *in_ring, fmt.record_bytes, fmt.part_bytes)
    macros = load_macros(fmt, load_bytes, joint=False)
    grid, shared = shared_arguments(fmt, plan, records, cu_seqlens_k, k, v, macros)
    params = PARAMS.pack(
        **shared,
        slab=device_pointer(slab),
        q_ends=0,
        first_new=0,
        **ring_values(ring, PARTED_RING_FIELDS),
        ring_len=ring.ring_len,
        num_state_slots=num_slots,
    )

    get_kernel(RING_LOAD, macros).launch(grid, (THREADS,), params, stream)


def joint_load(
    records: Any,
    plan: PrefillPlan,
    fmt: RecordFormat,
    q_ends: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    stream: Any,
) -> None:
    """The same out of a joint buffer, uint8 [>= history_rows + T, record_bytes]. q_ends and
    cu_seqlens_k are int32 [num_seqs + 2]: a last sequence without keys takes the tokens that belong
    to none. num_seqs is at least 1; arrays are checked by the caller."""
    load_bytes = piece_bytes(device_pointer(records), fmt.record_bytes, fmt.part_bytes)
    macros = load_macros(fmt, load_bytes, joint=True)
    grid, shared = shared_arguments(fmt, plan, records, cu_seqlens_k, k, v, macros)
    no_ring = dict.fromkeys((name for name, _ in PARAMS.fields if name not in shared), 0)
    joint = {"q_ends": device_pointer(q_ends), "first_new": plan.history_rows}
    params = PARAMS.pack(**shared, **(no_ring | joint))

    get_kernel(RING_LOAD, macros).launch(grid, (THREADS,), params, stream)


def shared_arguments(
    fmt: RecordFormat,
    plan: PrefillPlan,
    records: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    macros: MacroItems,
) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the parameters that do not say where the history lies."""
    longest = plan.window - 1 + plan.sink_tokens + plan.max_seqlen_q
    num_chunks = div_ceil(longest, dict(macros)["LAUNCH_BLOCK_ROWS"])
    return (plan.num_seqs * max(num_chunks, 1),), {
        "records": device_pointer(records),
        "state_ids": device_pointer(plan.state_ids),
        "cu_seqlens_q": device_pointer(plan.cu_seqlens_q),
        "positions": device_pointer(plan.positions),
        "pivots": device_pointer(plan.pivots),
        "pinned_pivots": device_pointer(plan.pinned_pivots),
        "k": device_pointer(k),
        "v": device_pointer(v),
        "cu_seqlens_k": device_pointer(cu_seqlens_k),
        "num_rows": k.shape[0],
        "num_tokens": plan.num_tokens,
        "num_records": records.shape[0],
        "record_bytes": fmt.record_bytes,
        "part_bytes": fmt.part_bytes,
        "value_bytes": fmt.part_value_bytes,
        "window": plan.window,
        "sink_tokens": plan.sink_tokens,
        "num_seqs": plan.num_seqs,
        "num_chunks": max(num_chunks, 1),
    }
