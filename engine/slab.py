"""The slab: one flat uint8 array that holds the state slots of all sequences."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.sizes import is_count, is_word
from ..layouts.slots import SLAB_ALIGN, SlotLayout
from ..rawkernels.memory import Memory, load_memory, refuse_too_large
from .backends import check_device_number, require_cuda


def slab_bytes(layout: SlotLayout, num_state_slots: int) -> int:
    """Bytes of a slab: `num_state_slots * slot_bytes`.

    Raises ArgumentError unless layout is a SlotLayout and num_state_slots an integer of at least 1.
    """
    if not isinstance(layout, SlotLayout):
        kind = type(layout).__name__
        raise ArgumentError(f"layout is {kind}, not a SlotLayout; pass cfg.slot_layout")
    if not is_count(num_state_slots):
        raise ArgumentError(f"num_state_slots={num_state_slots!r} but must be an integer")
    if num_state_slots < 1:
        raise ArgumentError(f"num_state_slots={num_state_slots} but must be at least 1")
    return int(num_state_slots) * layout.slot_bytes


def empty_slab(
    layout: SlotLayout, num_state_slots: int, backend: str = "cpu", device: int = 0
) -> Any:
    """A flat uint8 slab of `slab_bytes(layout, num_state_slots)` bytes, its base aligned to 256.

    A NumPy array for "cpu" and "reference", a CuPy array on GPU `device` for "cuda". Contents are
    undefined: a plan never lets a sequence see a record that it did not write.
    Raises DeviceMemoryError naming the bytes needed and the bytes free, BackendError where there is
    no GPU, ArgumentError for another backend.
    """
    size = slab_bytes(layout, num_state_slots)
    check_device_number(device)
    if not is_word(backend, ("cpu", "cuda", "reference")):
        raise ArgumentError(f"backend={backend!r} but must be one of cpu, cuda, reference")
    if backend == "cuda":
        require_cuda(device)
    return take_slab(layout, size, load_memory(backend, device))


def take_slab(layout: SlotLayout, size: int, memory: Memory) -> Any:
    """A slab of `size` bytes from `memory`; raises DeviceMemoryError where it does not fit."""
    what = f"slab of {size // layout.slot_bytes} state slots of {layout.slot_bytes:,} bytes"
    refuse_too_large(what, size, memory.free_bytes()[0], memory.place)
    slab = memory.empty((size,), np.uint8)
    assert _address(slab) % SLAB_ALIGN == 0, "kernels move records in aligned pieces"
    return slab


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
