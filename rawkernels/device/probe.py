"""What GPU is there, and why not. Nothing is asked of a driver before a function here is called."""

import os
from functools import cache

from ...layouts.errors import BackendError

FORKED = (
    "CUDA does not work in a process that was forked from one that had started it; start workers "
    "with the 'spawn' method"
)
LEAST_CAPABILITY = 80  # cp.async, bf16 mma.sync: what the portable kernels are written for


def gpu_problem() -> str | None:
    """Why CUDA kernels cannot run here, in a sentence, or None if they can.

    Asks for CuPy, a driver, a device and its compute capability (8.0 or later), in this order. The
    compiler is another matter: see `nvrtc.compiler_version`.
    """
    try:
        import cupy
    except (ImportError, OSError) as error:  # OSError: a cache folder that CuPy cannot make
        return f"CuPy cannot be imported ({error}); install the extra: pip install 'ringslab[cuda]'"
    if _forked():
        return FORKED
    runtime = cupy.cuda.runtime
    try:
        if runtime.getDeviceCount() == 0:
            return "the driver shows no CUDA device; see CUDA_VISIBLE_DEVICES"
        capability = int(cupy.cuda.Device().compute_capability)
    except runtime.CUDARuntimeError as error:
        return _runtime_problem(str(error))
    if capability < LEAST_CAPABILITY:
        return (
            f"the device has compute capability {_dotted(capability)}; "
            f"the kernels need {_dotted(LEAST_CAPABILITY)} or later"
        )
    return None


def require_gpu() -> None:
    """Raises BackendError that says why there is no usable GPU."""
    problem = gpu_problem()
    if problem is not None:
        raise BackendError(f"backend 'cuda' cannot run: {problem}")


def current_device() -> int:
    """Id of the current CUDA device of this thread. Raises BackendError where there is none, and in
    a process that was forked from one that used CUDA."""
    try:
        import cupy

        if not _forked():
            return cupy.cuda.runtime.getDevice()
    except (ImportError, OSError):
        pass
    except cupy.cuda.runtime.CUDARuntimeError:
        pass
    require_gpu()
    raise BackendError("backend 'cuda' cannot run: the driver refuses to name the current device")


def device_bytes(device: int) -> tuple[int, int]:
    """(free, total) bytes of a device; what CuPy's pool holds and nobody uses is free."""
    import cupy

    with cupy.cuda.Device(device):
        free, total = cupy.cuda.runtime.memGetInfo()
        return free + cupy.get_default_memory_pool().free_bytes(), total


def arch_of(capability: int) -> str:
    """Architecture to build for: "sm_90a" for 90 (Hopper's own instructions), else as it is."""
    return "sm_90a" if capability == 90 else f"sm_{capability}"


def device_arch() -> str:
    """Architecture of the current device, such as "sm_90a"; microseconds after the first call.
    Raises BackendError as `require_gpu`."""
    return _arch_of_device(current_device())


@cache
def _arch_of_device(device: int) -> str:
    require_gpu()
    import cupy

    return arch_of(int(cupy.cuda.Device(device).compute_capability))


def multiprocessors() -> int:
    """Streaming multiprocessors of the current device; microseconds after the first call. Raises
    BackendError as `current_device`."""
    return _multiprocessors(current_device())


@cache
def _multiprocessors(device: int) -> int:
    from cupy.cuda import Device

    return int(Device(device).attributes["MultiProcessorCount"])


@cache
def _cuda_process() -> int:
    """Id of the process that first asked for CUDA; a forked child inherits the answer."""
    return os.getpid()


def _forked() -> bool:
    return _cuda_process() != os.getpid()


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"  # 86 is written 8.6


def _runtime_problem(message: str) -> str:
    if "cudaErrorInitializationError" in message or "initialization error" in message:
        return (
            "CUDA does not start in this process; a process forked after CUDA was started cannot "
            f"use it, so start workers with the 'spawn' method ({message})"
        )
    if "InsufficientDriver" in message:
        return f"there is no NVIDIA driver, or it is too old for this CuPy ({message})"
    return message
