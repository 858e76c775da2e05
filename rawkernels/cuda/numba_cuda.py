"""Numba CUDA with CuPy arrays and streams, or with NumPy arrays in Numba's simulator.

Cost: a launch from Python takes about 90 us with three CuPy arrays (13 us without arguments; each
array is wrapped anew), against 4 to 7 us for a raw kernel. So Numba kernels are for metadata, once
a step, or captured in a CUDA graph, which replays them in 2 us.
"""

import warnings
from typing import Any

import numpy as np

from ..device.streams import cupy_stream, stream_pointer


def ready_numba() -> None:
    """To be called before the first compile. numba-cuda 0.30.4 touches numpy.row_stack, which
    numpy 2.5 removed; this can go when it no longer does."""
    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


def configured(kernel: Any, grid: int, threads: int, stream: Any) -> Any:
    """`kernel[grid, threads, stream]` without the warning that a small grid leaves a GPU idle:
    plans are small."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Grid size.*")
        return kernel[grid, threads, stream]


def device_view(array: Any) -> Any:
    """What a Numba kernel takes for an array. In the simulator a NumPy array is passed as it is.

    Numba by itself would wait for the stream that a CuPy array names in its
    `__cuda_array_interface__`: a host synchronisation, and an error inside a capture. Here the
    kernel runs on the caller's stream instead, like all others.
    """
    if isinstance(array, np.ndarray):
        return array
    from numba import cuda

    return cuda.as_cuda_array(array, sync=False)


def numba_stream(stream: Any, like: Any) -> Any:
    """Numba's handle of a stream as `cupy_stream` takes it (simulator: Numba's own)."""
    if isinstance(like, np.ndarray):
        return 0
    from numba import cuda

    return cuda.external_stream(stream_pointer(stream))


def read_back(op: str, array: Any, missing: str, stream: Any) -> np.ndarray:
    """Host copy of a small device array, for a caller who left out what only its values tell.

    Waits for the stream. Raises PlanError in a graph capture, where waiting is impossible.
    """
    import cupy

    from ...layouts.errors import PlanError

    stream = cupy_stream(stream)
    if stream.is_capturing():
        raise PlanError(
            f"{op}: give {missing} inside a graph capture; it cannot be read back there"
        )
    return cupy.asnumpy(array, stream=stream)
