"""Launcher of load_history.cu."""

from typing import Any

from ...layouts.plans import PrefillPlan
from ...layouts.sizes import div_ceil
from ...layouts.slots import SlotLayout
from ..device.kernel_source import KernelSource, ParamsStruct
from ..device.module import check_current_device, device_pointer, get_kernel
from ..record_checks import check_load_history
from .record_params import RING_DOCS, RING_FIELDS, ring_values
from .store_records import COPY_BUILDS, THREADS, ring_copy_macros

PARAMS = ParamsStruct(
    "LoadHistoryParams",
    (
        ("slab", "const uint8_t*"),
        ("segments", "const int32_t*"),
        ("num_segments", "const int32_t*"),
        ("out", "uint8_t*"),
        ("num_rows", "int64_t"),
        *RING_FIELDS,
        ("ring_len", "int32_t"),
        ("num_state_slots", "int32_t"),
        ("num_chunks", "int32_t"),
    ),
    docs=(
        ("slab", "[num_state_slots * slot_bytes]"),
        ("segments", "[capacity, 3]: source row or -1, destination row, rows"),
        ("num_segments", "[1]"),
        *RING_DOCS,
        ("out", "[>= num_rows, RECORD_UNITS * UNIT_BYTES]"),
        ("num_rows", "rows of the history section: num_seqs * window"),
        ("num_chunks", "thread blocks of one segment"),
    ),
)
LOAD = KernelSource("load_history", PARAMS, macro_sets=COPY_BUILDS)
KERNELS = (LOAD,)


def load_history(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    out: Any,
    *,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """slab flat uint8 -> out uint8 [>= num_seqs * window, record_bytes], records whole.

    Segments whose source row lies in no slot give zeros: a GPU cannot raise for a value.
    """
    ring, num_slots = check_load_history(slab, layout, layer, plan, out, kind)
    check_current_device("load_history", slab)

    macros = ring_copy_macros(ring, slab, out)
    num_chunks = div_ceil(max(plan.window, plan.sink_tokens), dict(macros)["LAUNCH_BLOCK_TOKENS"])
    grid = (plan.segments.shape[0] * num_chunks,)

    params = PARAMS.pack(
        slab=device_pointer(slab),
        segments=device_pointer(plan.segments),
        num_segments=device_pointer(plan.num_segments),
        out=device_pointer(out),
        num_rows=plan.history_rows,
        **ring_values(ring),
        ring_len=ring.ring_len,
        num_state_slots=num_slots,
        num_chunks=num_chunks,
    )

    get_kernel(LOAD, macros).launch(grid, (THREADS,), params, stream)
