"""The NVIDIA driver and its GPUs, asked of the driver itself, so that CuPy is not needed.

`probe` says whether kernels can run; this says what is in the machine.
"""

import ctypes
from dataclasses import dataclass

from .probe import arch_of

_DRIVER = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute numbers of the driver API
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """`arch` is what its kernels are built for, such as "sm_90a"."""

    id: int
    name: str
    compute_capability: tuple[int, int]
    arch: str
    total_bytes: int


@dataclass(frozen=True)
class Inventory:
    """`driver_cuda` is the newest CUDA version the driver knows, such as "13.0", None without a
    driver. `problem` says why there is no driver or no GPU."""

    driver_cuda: str | None
    gpus: tuple[Gpu, ...]
    problem: str | None


class _DriverError(Exception):
    pass


def list_gpus() -> Inventory:
    """Load the driver and ask; never raises."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        return Inventory(None, (), f"there is no NVIDIA driver ({error})")
    version = ctypes.c_int()
    try:
        _call(driver, "cuDriverGetVersion", ctypes.byref(version))
        text = f"{version.value // 1000}.{version.value % 1000 // 10}"  # 13000 is 13.0
    except _DriverError as error:
        return Inventory(None, (), str(error))
    try:
        _call(driver, "cuInit", 0)
        count = ctypes.c_int()
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu(driver, id) for id in range(count.value))
    except _DriverError as error:
        return Inventory(text, (), str(error))
    return Inventory(text, gpus, None if gpus else "the driver shows no GPU")


def _gpu(driver: ctypes.CDLL, id: int) -> Gpu:
    device = ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(device), id)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    total = ctypes.c_size_t()
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    major, minor = numbers
    arch = arch_of(10 * major + minor)
    return Gpu(id, name.value.decode(errors="replace"), (major, minor), arch, total.value)


def _call(driver: ctypes.CDLL, function: str, *arguments) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        raise _DriverError(f"the NVIDIA driver answers error {status} to {function}")
