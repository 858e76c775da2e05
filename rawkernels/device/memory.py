"""A GPU's memory, copies and events through CuPy, as `rawkernels/memory.py` describes them."""

from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np

from ...layouts.errors import DeviceMemoryError
from ..memory import Memory, refuse_too_large
from .probe import gpu_problem
from .streams import cupy_stream


def device_problem(device: int) -> str | None:
    """Why GPU `device` cannot run our kernels, in a sentence, or None if it can."""
    problem = gpu_problem()
    if problem is not None:
        return problem
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if device >= count:
        return f"device={device} but there are {count}, counted from 0"
    with cupy.cuda.Device(device):
        return gpu_problem()


def load_device_memory(device: int, stream: Any) -> Memory:
    """The memory functions of GPU `device`. `stream` is a stream as `cupy_stream` takes it, or None
    for whichever is current at each call."""
    import cupy
    import cupyx

    stream = None if stream is None else cupy_stream(stream)
    place = f"cuda:{device}"

    def scope():
        if stream is None and cupy.cuda.runtime.getDevice() == device:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(cupy.cuda.Device(device))
        if stream is not None:
            stack.enter_context(stream)
        return stack

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
