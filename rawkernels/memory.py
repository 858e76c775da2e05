"""Where an engine's arrays live: one struct of functions for the host, one for a GPU.

The host's is here; `device/memory.py` has the GPU's, so that CuPy loads only where it is used.
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.errors import DeviceMemoryError
from ..layouts.slots import SLAB_ALIGN

BASE_ALIGN = SLAB_ALIGN  # bytes; CuPy's own allocations start at multiples of 512


@dataclass(frozen=True)
class Memory:
    """Allocation, copies and events of one backend.

    place                   "cpu" or "cuda:0"
    empty(shape, dtype)     C-contiguous, base aligned to 256 bytes, contents undefined;
                            DeviceMemoryError with both numbers where it does not fit
    pinned(shape, dtype)    a host array that `upload` reads at full speed
    upload(dst, src)        copies a host array into dst (same shape and dtype) in stream order; a
                            pinned source must stay as it is until an event recorded after it
    download(dst, src)      copies a device array to a host array (same shape and dtype, pinned on a
                            GPU) in stream order; dst is whole once an event recorded after it is
                            done
    zero(x)                 sets all bytes to 0, in stream order
    copy(dst, src)          the first dst.nbytes bytes of src, in stream order; both on the device
    take_rows(src, rows, dst)  dst[i] = src[rows[i]] along the first axis, in stream order
    to_host(x)              a NumPy copy; waits for what was queued before
    record(event=None) -> event  marks this point of the stream (on the host: the time), by an
                            event that was recorded before if one is given
    wait(event)             returns when everything before the event is done
    is_done(event)          whether it is, without waiting
    after(event)            what is queued from here on begins when the event is done; the host does
                            not wait
    elapsed_us(a, b)        microseconds between two events that are done
    free_bytes()            (free, total) bytes
    scope()                 a context in which the device and the stream are the current ones
    side_stream() -> scope  a stream of its own; `with scope():` makes it the current one. On the
                            host there is only one order of things
    capture(run) -> launch  what `run()` queues on the current stream, as one CUDA graph that
                            launch() replays on the stream current then; run() itself queues nothing
                            now, must allocate nothing, and must have run once before, so that its
                            kernels are there. On the host launch() is run()
    capturing()             whether the current stream is being captured
    hold() -> release       keeps back what is queued from here on until release() is called (or a
                            second has passed), so that times between events are the device's alone
    """

    place: str
    empty: Callable[[tuple[int, ...], Any], Any]
    pinned: Callable[[tuple[int, ...], Any], np.ndarray]
    upload: Callable[[Any, np.ndarray], None]
    download: Callable[[np.ndarray, Any], None]
    zero: Callable[[Any], None]
    copy: Callable[[Any, Any], None]
    take_rows: Callable[[Any, Any, Any], None]
    to_host: Callable[[Any], np.ndarray]
    record: Callable[..., Any]
    wait: Callable[[Any], None]
    is_done: Callable[[Any], bool]
    after: Callable[[Any], None]
    elapsed_us: Callable[[Any, Any], float]
    free_bytes: Callable[[], tuple[int, int]]
    scope: Callable[[], AbstractContextManager]
    side_stream: Callable[[], Callable[[], AbstractContextManager]]
    capture: Callable[[Callable[[], None]], Callable[[], None]]
    capturing: Callable[[], bool]
    hold: Callable[[], Callable[[], None]]


def load_memory(backend: str, device: int = 0, stream: Any = None) -> Memory:
    """The memory functions of a backend; `device` and `stream` matter to "cuda" only."""
    if backend == "cuda":
        from .device.memory import load_device_memory

        return load_device_memory(device, stream)
    return Memory(
        place="cpu",
        empty=_empty,
        pinned=_empty,
        upload=_copy,
        download=_copy,
        zero=_zero,
        copy=_copy_first,
        take_rows=_take_rows,
        to_host=np.array,
        record=lambda event=None: time.perf_counter(),
        wait=_no_wait,
        is_done=lambda event: True,
        after=_no_wait,
        elapsed_us=_elapsed_us,
        free_bytes=host_bytes,
        scope=nullcontext,
        side_stream=lambda: nullcontext,
        capture=lambda run: run,
        capturing=lambda: False,
        hold=lambda: _nothing,
    )


def refuse_too_large(what: str, asked_bytes: int, free_bytes: int, place: str) -> None:
    """Raises DeviceMemoryError where more is asked than is free."""
    if asked_bytes > free_bytes:
        raise DeviceMemoryError(
            f"{what}: needs {asked_bytes:,} bytes but {free_bytes:,} are free on {place}; "
            "lower num_state_slots, num_blocks (of the paged pool) or token_budget (without "
            "chunked_prefill also max_seq_len)"
        )


def host_bytes() -> tuple[int, int]:
    """(available, total) bytes of the host's memory, as Linux counts them; elsewhere the total
    stands for both, and the allocator has the last word."""
    sizes = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                sizes[name] = int(rest.split()[0]) * 1024  # the file counts in KiB
    except OSError:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    return sizes["MemAvailable"], sizes["MemTotal"]


def _empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    refuse_too_large(f"array {shape} of {dtype}", size, host_bytes()[0], "the host")
    try:
        raw = np.empty(size + BASE_ALIGN, np.uint8)
    except MemoryError as error:
        raise DeviceMemoryError(f"array {shape} of {dtype}: {error}") from error
    start = -raw.ctypes.data % BASE_ALIGN  # Python's remainder: 0 .. BASE_ALIGN - 1
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(dst: np.ndarray, src: np.ndarray) -> None:
    dst[...] = src


def _zero(x: np.ndarray) -> None:
    x.fill(0)


def _copy_first(dst: np.ndarray, src: np.ndarray) -> None:
    dst[...] = src.reshape(-1)[: dst.size].reshape(dst.shape)


def _take_rows(src: np.ndarray, rows: np.ndarray, dst: np.ndarray) -> None:
    np.take(src, rows, axis=0, out=dst, mode="clip")  # "raise" would copy through a buffer


def _nothing() -> None:
    """On the host nothing is queued."""


def _no_wait(event: float) -> None:
    """On the host everything is done when it returns."""


def _elapsed_us(start: float, end: float) -> float:
    return (end - start) * 1e6
