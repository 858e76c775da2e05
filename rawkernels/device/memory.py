"""A GPU's memory, copies and events through CuPy, as `rawkernels/memory.py` describes them."""

from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...layouts.errors import DeviceMemoryError
from ..memory import Memory, refuse_too_large


def load_device_memory(device: int, stream: Any) -> Memory:
    """The memory functions of GPU `device`. `stream` is a CuPy stream, or None for whichever is
    current at each call."""
    import cupy
    import cupyx

    place = f"cuda:{device}"

    @contextmanager
    def scope():
        with ExitStack() as stack:
            stack.enter_context(cupy.cuda.Device(device))
            if stream is not None:
                stack.enter_context(stream)
            yield

    def free_bytes() -> tuple[int, int]:
        with cupy.cuda.Device(device):
            free, total = cupy.cuda.runtime.memGetInfo()
            # What CuPy's pool holds and nobody uses can be had as well.
            return free + cupy.get_default_memory_pool().free_bytes(), total

    def empty(shape: tuple[int, ...], dtype: Any):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        refuse_too_large(f"array {shape} of {dtype}", size, free_bytes()[0], place)
        try:
            with cupy.cuda.Device(device):
                return cupy.empty(shape, dtype)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceMemoryError(f"array {shape} of {dtype} on {place}: {error}") from error

    def upload(dst, src: np.ndarray) -> None:
        if src.size:
            dst.set(src, stream=cupy.cuda.get_current_stream())

    def record():
        event = cupy.cuda.Event()
        event.record()
        return event

    return Memory(
        place=place,
        empty=empty,
        pinned=cupyx.empty_pinned,
        upload=upload,
        to_host=cupy.asnumpy,
        record=record,
        wait=lambda event: event.synchronize(),
        elapsed_us=lambda start, end: cupy.cuda.get_elapsed_time(start, end) * 1e3,
        free_bytes=free_bytes,
        scope=scope,
    )
