"""Arrays that come from outside: NumPy, CuPy, JAX, Numba, PyTorch and others, without copies.

bf16 travels as `ml_dtypes.bfloat16` or as its uint16 bits; backends work on the bits.
"""

from typing import Any

import ml_dtypes
import numpy as np

from ..layouts.errors import ArgumentError

BF16 = np.dtype(ml_dtypes.bfloat16)
UINT16 = np.dtype(np.uint16)
FP16 = np.dtype(np.float16)
_DLPACK_CPU = 1  # device types of the DLPack ABI: kDLCPU, kDLCUDA, kDLCUDAManaged
_DLPACK_CUDA = (2, 13)


def is_cuda(x: Any) -> bool:
    """True for an array in GPU memory (anything with `__cuda_array_interface__`)."""
    if type(x) is np.ndarray:
        return False
    return _is_cupy(x) or hasattr(x, "__cuda_array_interface__")


def _is_cupy(x: Any) -> bool:
    """Whether `x` is a CuPy array, by its type: whenever `__cuda_array_interface__` is looked at,
    CuPy builds a dict with the dtype's description and a stream's address, some microseconds, and
    an operation asks this of every array."""
    kind = type(x)
    return kind.__name__ == "ndarray" and kind.__module__ == "cupy"


def as_array(x: Any, name: str) -> Any:
    """`x` as a C-contiguous NumPy or CuPy array over the same memory.

    Takes NumPy and CuPy arrays, and objects with `__cuda_array_interface__`, `__dlpack__` or the
    NumPy protocol (`__array_interface__`, `__array__`). A list or tuple of integers becomes int32,
    which is what counts, positions and ids are.
    Raises ArgumentError for anything else, and for an array that is not C-contiguous, with the
    shape, the strides and the fix: kernels take a base pointer and would ignore the strides.
    """
    array = x if type(x) is np.ndarray or _is_cupy(x) else _foreign_array(x, name)
    if not array.flags.c_contiguous:
        module = "cupy" if is_cuda(array) else "numpy"
        raise ArgumentError(
            f"{name}: shape={tuple(array.shape)} strides={tuple(array.strides)} is not "
            f"C-contiguous; pass {module}.ascontiguousarray({name})"
        )
    return array


def as_kv(kv: Any) -> Any:
    """The new vectors of a call as arrays: one array (latent), or a pair (k, v).

    Raises ArgumentError as `as_array` does, and for a tuple or list that is no pair.
    """
    if not isinstance(kv, (tuple, list)):
        return as_array(kv, "kv")
    if len(kv) != 2:
        raise ArgumentError(f"kv has {len(kv)} members but must be one array or the pair (k, v)")
    return as_array(kv[0], "k"), as_array(kv[1], "v")


def kv_parts(kv: Any) -> tuple[Any, ...]:
    """The arrays of `kv`: itself alone, or K and V."""
    return kv if isinstance(kv, tuple) else (kv,)


def _foreign_array(x: Any, name: str) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"{name}: a masked array would lose its mask; pass filled() or data")
    if _offers(x, "__cuda_array_interface__"):
        import cupy  # only where an array is on a GPU already

        return x if isinstance(x, cupy.ndarray) else cupy.asarray(x)
    if isinstance(x, (list, tuple)):
        return _integers(x, name)
    if hasattr(x, "__dlpack_device__"):
        device_type = int(x.__dlpack_device__()[0])
        if device_type in _DLPACK_CUDA:
            import cupy

            return _by_protocol(cupy.from_dlpack, x, name)
        if device_type != _DLPACK_CPU:
            raise ArgumentError(
                f"{name}: DLPack device type {device_type} is neither the CPU nor a CUDA device"
            )
    if hasattr(x, "__array_interface__") or hasattr(x, "__array__"):
        return _by_protocol(np.asarray, x, name)
    if hasattr(x, "__dlpack__"):
        return _by_protocol(np.from_dlpack, x, name)
    raise ArgumentError(
        f"{name}: {type(x).__name__} is no array; pass a NumPy or CuPy array, or an object with "
        "__dlpack__, __cuda_array_interface__ or __array_interface__"
    )


def _offers(x: Any, protocol: str) -> bool:
    """Whether `x` has a protocol for its own dtype: some libraries define the attribute and raise
    when it is read for bf16, where DLPack still works."""
    try:
        return getattr(x, protocol, None) is not None
    except (TypeError, KeyError, RuntimeError):
        return False


def _integers(x: list | tuple, name: str) -> np.ndarray:
    try:
        wide = np.asarray(x) if len(x) else np.zeros(0, np.int64)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, objects that refuse
        raise ArgumentError(f"{name}: a list must hold int32 integers: {error}") from error
    limits = np.iinfo(np.int32)
    if wide.dtype.kind not in "iu" or (
        wide.size and (wide.min() < limits.min or wide.max() > limits.max)
    ):
        raise ArgumentError(f"{name}: a list must hold int32 integers, got {x!r:.80}")
    return wide.astype(np.int32)


def _by_protocol(convert: Any, x: Any, name: str) -> Any:
    try:
        return convert(x)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise ArgumentError(
            f"{name}: {type(x).__module__}.{type(x).__name__} cannot be viewed ({error}); "
            "bf16 can be passed as its uint16 bits"
        ) from error


def backend_of(**arrays: Any) -> str:
    """ "cpu" where the named arrays are NumPy arrays, "cuda" where they are CuPy arrays; None is
    skipped. Raises ArgumentError where they are mixed, or on different GPUs."""
    places = {
        name: f"cuda:{x.device.id}" if is_cuda(x) else "cpu"
        for name, x in arrays.items()
        if x is not None
    }
    if len(set(places.values())) > 1:
        where = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ArgumentError(f"arrays of one call must be in one place: {where}")
    return "cpu" if "cpu" in places.values() else "cuda"


def bf16_bits(x: Any, name: str) -> Any:
    """uint16 view of a bf16 array (or `x`, where it is uint16 already).

    Raises ArgumentError for another dtype.
    """
    if x.dtype == UINT16:
        return x
    if x.dtype == BF16:
        return x.view(np.uint16)
    raise ArgumentError(
        f"{name}.dtype={x.dtype} but must be bfloat16 (ml_dtypes) or its uint16 bits"
    )


def value_bits(x: Any, name: str) -> Any:
    """uint16 view of a bf16 or float16 array (or `x`, where it is uint16: the bits of bf16).

    Raises ArgumentError for another dtype.
    """
    return x.view(np.uint16) if x.dtype == FP16 else bf16_bits(x, name)


def empty_like_backend(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """A new array beside `like`: NumPy, or CuPy on the same GPU. Ask for bf16 with `BF16`; on the
    GPU it comes as uint16 bits. Contents are undefined."""
    if not is_cuda(like):
        return np.empty(shape, dtype)
    import cupy

    with cupy.cuda.Device(like.device.id):
        return cupy.empty(shape, np.uint16 if dtype == BF16 else dtype)
