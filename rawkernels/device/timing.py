"""A GPU's stopwatch: CUDA graphs between events, as `rawkernels/timing.py` describes it."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..timing import Call, Replay, Stopwatch

# Written before a round, outside its time: several times the largest L2 (60 MB on an H200), so that
# inputs come from memory. It also takes longer than the host needs to queue what follows.
FLUSH_BYTES = 256 * 10**6
FLUSH_BYTE = 0xA5
HOST_CALLS = 20  # queued one after the other to time a launch; far fewer than a queue holds
SUSTAIN_CHUNK = 32  # rounds between two waits
# Of cudaDataType_t and cublasComputeType_t.
CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 14, 68, -1


def make_stream() -> Any:
    """A stream of its own: the default one cannot be captured."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def load_device_stopwatch(stream: Any) -> Stopwatch:
    """The stopwatch of the current device and of a CuPy stream, which the caller makes current."""
    import cupy

    flush_buffer = cupy.empty(FLUSH_BYTES, np.uint8)

    def round_events(run: Call, flush: bool) -> tuple[Any, Any]:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        if flush:
            flush_buffer.data.memset_async(FLUSH_BYTE, FLUSH_BYTES, stream)
        start.record(stream)
        run()
        end.record(stream)
        return start, end

    def elapsed_us(pair: tuple[Any, Any]) -> float:
        pair[1].synchronize()
        return cupy.cuda.get_elapsed_time(*pair) * 1e3  # from milliseconds

    def time_us(run: Call, repeats: int, flush: bool) -> list[float]:
        return [elapsed_us(round_events(run, flush)) for _ in range(2 + repeats)][2:]

    def sustain_us(run: Call, seconds: float, flush: bool) -> list[float]:
        times: list[float] = []
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + seconds:
            pairs = [round_events(run, flush) for _ in range(SUSTAIN_CHUNK)]
            chunk = [elapsed_us(pair) for pair in pairs]
            times += chunk if now >= begin + seconds / 2 else []
        return times or time_us(run, 1, flush)

    def host_us(call: Call) -> float:
        call()
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        each = (time.perf_counter() - start) / HOST_CALLS
        stream.synchronize()
        return each * 1e6

    return Stopwatch(
        capture=lambda calls: _capture(calls, stream),
        time_us=time_us,
        sustain_us=sustain_us,
        host_us=host_us,
        copy=lambda dst, src: dst.data.copy_from_device_async(src.data, src.nbytes, stream),
        matmul=_cublas_matmul(),
        matmul_dtype="bfloat16",
        sync=stream.synchronize,
        release=cupy.get_default_memory_pool().free_all_blocks,
        stream=int(stream.ptr),
    )


def _capture(calls: Sequence[Call], stream: Any) -> Replay:
    for call in calls:
        call()  # builds kernels and fills tables, which a capture may not
    stream.synchronize()
    stream.begin_capture()
    try:
        for call in calls:
            call()
    except BaseException:
        with suppress(RuntimeError):  # the capture is broken already; the first error is the news
            stream.end_capture()
        raise
    graph = stream.end_capture()
    return Replay(lambda: graph.launch(stream), len(calls), _kernel_names(graph))


def _kernel_names(graph: Any) -> tuple[str, ...] | None:
    """Names of the kernels in a CuPy graph, asked of the driver: what really ran. None where the
    driver's bindings are not there or do not know; a name is a convenience, and timing goes on."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        handle = driver.CUgraph(int(graph.graph))
        count = int(_ask(driver.cuGraphGetNodes, handle)[-1])
        nodes = _ask(driver.cuGraphGetNodes, handle, count)[0]
        is_kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        kernels = [node for node in nodes if _ask(driver.cuGraphNodeGetType, node)[0] == is_kernel]
        return tuple(dict.fromkeys(_kernel_name(driver, node) for node in kernels))
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _kernel_name(driver: Any, node: Any) -> str:
    """Name of a kernel node, whose function is of a module or of a library."""
    params = _ask(driver.cuGraphKernelNodeGetParams, node)[0]
    if int(params.func):
        return bytes(_ask(driver.cuFuncGetName, params.func)[0]).decode()
    return bytes(_ask(driver.cuKernelGetName, params.kern)[0]).decode()


def _ask(function: Any, *arguments: Any) -> list[Any]:
    """What a driver function returns behind its status. LookupError for another status than 0."""
    status, *values = function(*arguments)
    if int(status) != 0:
        raise LookupError(f"{function.__name__}: {status}")
    return values


def _cublas_matmul() -> Any:
    """out = a @ b of bf16 bits [n, n] by cuBLAS through CuPy, or None where it is not installed."""
    try:
        from cupy.cuda.device import get_cublas_handle
        from cupy_backends.cuda.libs import cublas

        handle = get_cublas_handle()
    except (ImportError, OSError, RuntimeError):
        return None
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def matmul(a: Any, b: Any, out: Any) -> None:
        n = a.shape[0]
        # cuBLAS counts columns first: b^T a^T = (a b)^T.
        left, right, result = ((x.data.ptr, CUDA_R_16BF, n) for x in (b, a, out))
        scalars = (one.ctypes.data, zero.ctypes.data)
        plain = cublas.CUBLAS_OP_N
        cublas.gemmEx(
            handle,
            plain,
            plain,
            n,
            n,
            n,
            scalars[0],
            *left,
            *right,
            scalars[1],
            *result,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT,
        )

    return matmul
