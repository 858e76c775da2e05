"""A GPU's memory, copies and events through CuPy, as `rawkernels/memory.py` describes them."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import numpy as np

from ...layouts.errors import DeviceMemoryError
from ..memory import Memory, refuse_too_large
from .probe import device_bytes, gpu_problem
from .streams import cupy_stream, is_capturing
from .workspaces import lent_workspaces

HOLD_S = 1.0  # the longest that a held stream waits for its release


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
        return device_bytes(device)

    def empty(shape: tuple[int, ...], dtype: Any):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        refuse_too_large(f"array {shape} of {dtype}", size, free_bytes()[0], place)
        try:
            with cupy.cuda.Device(device):
                return cupy.empty(shape, dtype)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise DeviceMemoryError(f"array {shape} of {dtype} on {place}: {error}") from error

    upload, download, copy, record = _copies()

    def zero(x) -> None:
        x.data.memset_async(0, x.nbytes)

    return Memory(
        place=place,
        empty=empty,
        pinned=cupyx.empty_pinned,
        upload=upload,
        download=download,
        zero=zero,
        copy=copy,
        take_rows=lambda src, rows, dst: cupy.take(src, rows, axis=0, out=dst),
        to_host=cupy.asnumpy,
        record=record,
        wait=lambda event: event.synchronize(),
        is_done=lambda event: event.done,
        after=lambda event: cupy.cuda.get_current_stream().wait_event(event),
        elapsed_us=lambda start, end: cupy.cuda.get_elapsed_time(start, end) * 1e3,
        free_bytes=free_bytes,
        scope=scope,
        side_stream=lambda: _side_stream(device),
        capture=_capture,
        capturing=is_capturing,
        hold=_hold,
    )


def _side_stream(device: int) -> Callable[[], Any]:
    """`Memory.side_stream`: a stream that does not wait for the null stream."""
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
    return lambda: stream


def _copies() -> tuple[Callable[..., Any], ...]:
    """`Memory.upload`, `download`, `copy` and `record`. Copies are the runtime's own calls, which
    take half of the host time of CuPy's methods: decode steps pay for it."""
    from cupy.cuda import Event, get_current_stream, runtime

    def upload(dst, src: np.ndarray) -> None:
        assert dst.shape == src.shape
        assert dst.dtype == src.dtype
        stream = get_current_stream()
        if not (dst.flags.c_contiguous and src.flags.c_contiguous):
            dst.set(src, stream=stream)
        elif src.size:
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(dst.data.ptr, src.ctypes.data, src.nbytes, kind, stream.ptr)

    def download(dst: np.ndarray, src) -> None:
        assert dst.nbytes == src.nbytes
        assert dst.flags.c_contiguous
        assert src.flags.c_contiguous
        kind, stream = runtime.memcpyDeviceToHost, get_current_stream().ptr
        runtime.memcpyAsync(dst.ctypes.data, src.data.ptr, dst.nbytes, kind, stream)

    def copy(dst, src) -> None:
        kind, stream = runtime.memcpyDeviceToDevice, get_current_stream().ptr
        runtime.memcpyAsync(dst.data.ptr, src.data.ptr, dst.nbytes, kind, stream)

    def record(event=None):
        event = Event() if event is None else event
        event.record()
        return event

    return upload, download, copy, record


def _capture(run: Callable[[], None]) -> Callable[[], None]:
    """`Memory.capture`. The graph is captured on a stream of its own, because the current one may
    be the null stream, which cannot be captured. It works with the current stream's workspaces, so
    that any number of graphs has one: launched on another stream, it takes its turn."""
    import cupy

    owner = cupy.cuda.get_current_stream()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, lent_workspaces(owner) as lent:
        stream.begin_capture()
        try:
            run()
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # the first error is the one to see
                stream.end_capture()
            raise
        graph = stream.end_capture()
    graph.upload(owner)

    def launch() -> None:
        current = cupy.cuda.get_current_stream()
        if not lent or current.ptr == owner.ptr:
            graph.launch()
            return
        current.wait_event(owner.record())
        graph.launch()
        owner.wait_event(current.record())

    return launch


def _hold() -> Callable[[], None]:
    import cupy

    gate = threading.Event()
    cupy.cuda.get_current_stream().launch_host_func(lambda held: held.wait(HOLD_S), gate)
    return gate.set
