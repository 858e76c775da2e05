"""Flat byte arrays that hold equal units one after the other: a slab its state slots, a paged pool
its blocks."""

from typing import Any

from .errors import LayoutError


def count_units(name: str, array: Any, unit: str, unit_bytes: int) -> int:
    """Number of units in `array`, which messages call `name`; `unit` names the size of one. Raises
    LayoutError unless it is flat, contiguous uint8 of a whole number of units."""
    shape, dtype = getattr(array, "shape", None), str(getattr(array, "dtype", type(array)))
    if dtype != "uint8" or shape is None or len(shape) != 1 or array.strides != (1,):
        raise LayoutError(
            f"{name}: shape={shape} dtype={dtype} but must be a flat contiguous uint8 array"
        )
    if shape[0] % unit_bytes != 0:
        raise LayoutError(f"{name}: {shape[0]} bytes is no multiple of {unit}={unit_bytes}")
    return shape[0] // unit_bytes  # exact: checked above


def records_view(array: Any, unit_bytes: int, offset: int, rows: int, record_bytes: int) -> Any:
    """uint8 [num_units, rows, 1, record_bytes] view of the `rows` records that begin `offset` bytes
    into each unit, no copy. `array` is one that `count_units` takes."""
    units = array.shape[0] // unit_bytes  # exact: whole units
    records = array.reshape(units, unit_bytes)[:, offset : offset + rows * record_bytes]
    # Splitting the last axis of a strided view needs no copy: it is contiguous.
    return records.reshape(units, rows, 1, record_bytes)
