"""The bytes of records, rings, state slots, blocks and plans as NumPy structured dtypes.

`ringslab header` writes these dtypes as C structs. On the host they are views without copies:
`slab.view(slot_dtype(layout))["layer0_swa"][state_id, ring_idx]["kv_values"]`.
"""

import dataclasses
import inspect
import re
from typing import Any

import numpy as np

from .errors import LayoutError
from .formats import RecordFormat
from .paged import PagedLayout
from .plans import DecodePlan, PrefillPlan
from .sizes import div_exact
from .slots import Ring, SlotLayout

# Elements of a record. FP8 and bf16 travel as their bits.
ELEMENT_DTYPES = {"e4m3": np.uint8, "e8m0": np.uint8, "bf16": np.uint16, "fp16": np.float16}

# Extents that Python reads off an array and C has to be told: name, array, axis.
PLAN_EXTENTS = {
    DecodePlan: (("num_tokens", "positions", 0), ("index_width", "index", 1)),
    PrefillPlan: (("num_tokens", "positions", 0), ("max_segments", "segments", 0)),
}
_ARRAY_DOC = re.compile(r"^(\w+) +(\[[^\]]*\]) *(.*(?:\n {12,}\S.*)*)$", re.MULTILINE)


def record_dtype(record_format: RecordFormat) -> np.dtype:
    """One whole record: its fields by id, at their offsets."""
    fields = record_format.fields
    return _struct(
        [(field.id, (ELEMENT_DTYPES[field.type], field.shape), field.offset) for field in fields],
        record_format.record_bytes,
    )


def ring_dtype(ring: Ring) -> np.dtype:
    """One ring without the padding at its end: `ring_len` records; `values` and `scales`, uint8
    [ring_len, ...] each, where the ring is planar; float32 [ring_len, 2, dim] for compression
    state."""
    fmt = ring.record_format
    if fmt is None:
        # Two rows of 4-byte numbers an entry.
        shape = (ring.ring_len, 2, div_exact(ring.record_bytes, 2 * 4))
        return np.dtype((np.float32, shape))
    if fmt.plane_order == "planar":
        values = ("values", np.uint8, (ring.ring_len, fmt.value_bytes))
        return np.dtype([values, ("scales", np.uint8, (ring.ring_len, fmt.scale_bytes))])
    return np.dtype((record_dtype(fmt), (ring.ring_len,)))


def slot_dtype(layout: SlotLayout) -> np.dtype:
    """One state slot: its rings by name. A slab is an array of num_state_slots of them."""
    parts = [(ring.name, ring_dtype(ring), ring.offset) for ring in layout.rings]
    return _struct(parts, layout.slot_bytes)


def block_dtype(layout: PagedLayout) -> np.dtype:
    """One block of the paged pool: `block_size` records of each global layer, as
    `layer<N>_global`."""
    return _struct(
        [
            (
                f"layer{part.layer}_global",
                np.dtype((record_dtype(part.record_format), (layout.block_size,))),
                part.offset,
            )
            for part in layout.layers
        ],
        layout.block_bytes,
    )


def plan_dtype(kind: type[DecodePlan] | type[PrefillPlan]) -> np.dtype:
    """A plan for C: its counts and extents as int32, then a pointer for each of its int32 arrays
    (uint64), aligned as C does."""
    counts = [name for name, is_array in _plan_fields(kind) if not is_array]
    counts += [name for name, _, _ in PLAN_EXTENTS[kind]]
    arrays = [name for name, is_array in _plan_fields(kind) if is_array]
    pairs = [(name, np.int32) for name in counts] + [(name, np.uint64) for name in arrays]
    return np.dtype(pairs, align=True)


def pack_plan(plan: DecodePlan | PrefillPlan) -> np.ndarray:
    """A plan as one element of `plan_dtype`, to be passed to C by value or by address. An array
    that is None becomes a null pointer.

    The pointers are the plan's own arrays, in host or GPU memory: keep the plan until the last use
    of the struct is done. Raises LayoutError for what is no plan, and for an array that is not
    int32 and C-contiguous.
    """
    kind = type(plan)
    if kind not in PLAN_EXTENTS:
        raise LayoutError(f"pack_plan: {kind.__name__} is no plan")
    packed = np.zeros(1, plan_dtype(kind))
    for name, is_array in _plan_fields(kind):
        value = getattr(plan, name)
        packed[name] = _pointer(name, value) if is_array else value
    for name, array, axis in PLAN_EXTENTS[kind]:
        packed[name] = getattr(plan, array).shape[axis]
    return packed


def plan_docs(kind: type[DecodePlan] | type[PrefillPlan]) -> dict[str, str]:
    """Shape and meaning of each array of a plan, from its docstring, in words of C."""
    return {
        name: " ".join(f"{shape} {text}".replace("None", "null").split())
        for name, shape, text in _ARRAY_DOC.findall(inspect.cleandoc(kind.__doc__))
    }


def _plan_fields(kind: type) -> list[tuple[str, bool]]:
    """Name of each field, and whether it is an array."""
    return [(field.name, field.type is not int) for field in dataclasses.fields(kind)]


def _pointer(name: str, array: Any) -> int:
    if array is None:
        return 0
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise LayoutError(
            f"pack_plan: {name}: dtype={array.dtype} strides={tuple(array.strides)} but must be "
            "int32 and C-contiguous"
        )
    on_gpu = type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__")
    interface = array.__cuda_array_interface__ if on_gpu else array.__array_interface__
    return int(interface["data"][0])


def _struct(parts: list[tuple[str, Any, int]], itemsize: int) -> np.dtype:
    return np.dtype(
        {
            "names": [name for name, _, _ in parts],
            "formats": [np.dtype(part) for _, part, _ in parts],
            "offsets": [offset for _, _, offset in parts],
            "itemsize": itemsize,
        }
    )
