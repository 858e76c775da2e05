"""Kernels ready to launch: built or taken from the cache, loaded on the current device, kept.

A launcher asks for its kernel with `get_kernel(SOURCE, macros)` and calls `launch`. Everything slow
happens at the first call for a (device, source, macros); after that both cost a few microseconds
and neither allocates nor synchronises, so a launch can be captured into a CUDA graph.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from ...layouts.errors import ArgumentError, BackendError
from .cubin_cache import CubinCache, cubin_key, default_cache
from .kernel_source import FORMAT_MACROS, KernelSource, MacroItems
from .nvrtc import Build, compile_cubin, compile_options, compiler_version
from .probe import current_device, device_arch
from .progress import tell_progress
from .streams import cupy_stream, refuse_in_capture

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65_535
DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory beyond this must be asked for


@dataclass(frozen=True, eq=False)
class Kernel:
    """An entry function loaded on one device. `dynamic_shared_bytes` is used by every launch."""

    name: str
    params_dtype: np.dtype
    dynamic_shared_bytes: int
    function: Any  # cupy.cuda.function.Function; holds its module

    @cached_property
    def _plain_dtype(self) -> np.dtype:
        """Parameters as one run of bytes: CuPy asks an array for its `__array_interface__`, where
        NumPy describes a struct field by field, which takes longer than the launch."""
        return np.dtype((np.void, self.params_dtype.itemsize))

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        params: np.ndarray,
        stream: Any = None,
    ) -> None:
        """Queue one launch with `params` (from ParamsStruct.pack) by value.

        A grid with a zero launches nothing. `stream` None is CuPy's current stream.
        """
        assert params.dtype == self.params_dtype, f"{self.name}: params of another kernel"
        if 0 in grid:
            return
        assert 0 < grid[0] <= MAX_GRID_X, f"{self.name}: grid={grid}"
        assert all(0 < extent <= MAX_GRID_YZ for extent in grid[1:]), f"{self.name}: grid={grid}"
        queue = stream if stream is None or hasattr(stream, "ptr") else cupy_stream(stream)
        plain = params.view(self._plain_dtype)
        self.function(grid, block, (plain,), self.dynamic_shared_bytes, queue)


def get_kernel(
    source: KernelSource, macros: MacroItems = (), dynamic_shared_bytes: int = 0
) -> Kernel:
    """The kernel of `source` built with `macros` for the current device.

    `macros` come from `macro_set(...)`; the constants of the record formats are added here.
    Raises KernelBuildError, and BackendError where no GPU, compiler or shared memory is there.
    """
    return _load(source, macros, dynamic_shared_bytes, current_device())


def build_kernel(
    source: KernelSource, macros: MacroItems, arch: str, cache: CubinCache | None = None
) -> Build:
    """The cubin of `source` for `arch`, from the cache or compiled now; needs no GPU."""
    all_macros = dict(FORMAT_MACROS + macros)
    text, headers, compiler = source.text(), source.headers(), compiler_version()

    def compile_now() -> Build:
        tell_progress(f"building {source.name} for {arch}")
        return compile_cubin(text, source.file_name, headers, all_macros, arch)

    key = cubin_key(text, headers, compile_options(all_macros, arch), compiler)
    return (cache or default_cache()).get_or_build(key, compile_now)


def device_pointer(array: Any) -> int:
    """Address of a CuPy array's first element, 0 for None or an empty array."""
    if array is None or array.size == 0:
        return 0
    return array.data.ptr


def check_current_device(operation: str, array: Any) -> None:
    """Raises ArgumentError unless the array lies on the current device, where launches go."""
    device = current_device()
    if array.device.id != device:
        raise ArgumentError(
            f"{operation}: the arrays are on device {array.device.id} but the current device is "
            f"{device}; call it inside `with cupy.cuda.Device({array.device.id}):`"
        )


def check_alignment(operation: str, name: str, array: Any, align_bytes: int) -> None:
    """Raises ArgumentError where an array does not start at a multiple of `align_bytes`."""
    address = device_pointer(array)
    if address % align_bytes != 0:
        raise ArgumentError(
            f"{operation}: {name} starts at address {address:#x}, {address % align_bytes} bytes "
            f"past a multiple of {align_bytes}; pass {name}.copy()"
        )


@cache
def _load(
    source: KernelSource, macros: MacroItems, dynamic_shared_bytes: int, device: int
) -> Kernel:
    refuse_in_capture(f"loading kernel {source.name}")
    from cupy.cuda import Device, driver, function

    arch = device_arch()
    if "sm_80" not in source.archs and arch not in source.archs:
        raise BackendError(
            f"{source.name} runs on {', '.join(source.archs)} only, and device {device} is {arch}"
        )
    module = function.Module()
    module.load(build_kernel(source, macros, arch).cubin)
    entry = module.get_function(source.name)
    if dynamic_shared_bytes > DEFAULT_SHARED_BYTES:
        most = Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
        if dynamic_shared_bytes > most:
            raise BackendError(
                f"{source.name} needs {dynamic_shared_bytes} bytes of shared memory a block but "
                f"device {device} has {most}"
            )
        driver.funcSetAttribute(
            entry.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_shared_bytes
        )
    return Kernel(source.name, source.params.dtype, dynamic_shared_bytes, entry)
