"""Launches that may begin before the kernel ahead of them on the stream has ended.

A kernel launched so must call `wait_for_previous_kernel` (hopper.cuh) before it touches what the
kernel ahead reads or writes; what it does before that overlaps the other's end. Only a kernel ahead
that calls `let_next_kernel_start` gives anything away: behind all others it is an ordinary launch.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np

from ...layouts.errors import BackendError
from .module import Kernel
from .streams import stream_pointer

_DRIVER = "libcuda.so.1"
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


assert ctypes.sizeof(_Attribute) == 72  # as the driver has them
assert ctypes.sizeof(_Config) == 56


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL(_DRIVER)
    driver.cuLaunchKernelEx.argtypes = [
        ctypes.POINTER(_Config),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    ]
    return driver


@cache
def _overlap() -> Any:
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0)
    attribute.value[0] = 1
    return ctypes.pointer(attribute)


def launch_dependent(
    kernel: Kernel, grid: int, block: int, params: np.ndarray, stream: Any = None
) -> None:
    """As `kernel.launch((grid,), (block,), params, stream)`, but allowed to begin early.

    Raises BackendError with the driver's number where the launch is refused.
    """
    assert params.dtype == kernel.params_dtype, f"{kernel.name}: params of another kernel"
    if grid == 0:
        return
    config = _Config(
        (grid, 1, 1),
        (block, 1, 1),
        kernel.dynamic_shared_bytes,
        stream_pointer(stream),
        _overlap(),
        1,
    )
    arguments = (ctypes.c_void_p * 1)(params.ctypes.data)
    status = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel.function.ptr, arguments, None)
    if status != 0:
        raise BackendError(f"{kernel.name}: the driver answers error {status} to cuLaunchKernelEx")
