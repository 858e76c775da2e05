"""What counts as an array: protocols without copies, and clear refusals."""

import ml_dtypes
import numpy as np
import pytest
from helpers import to_backend, to_host

from ringslab.layouts.errors import ArgumentError
from ringslab.rawkernels.arrays import (
    BF16,
    as_array,
    backend_of,
    bf16_bits,
    empty_like_backend,
    is_cuda,
)
from ringslab.rawkernels.operations import BACKENDS, OPERATION_NAMES, load_operations


class Wrapper:
    """An object that is an array by some protocols only."""

    def __init__(self, array, *names):
        for name in names:
            setattr(self, name, getattr(array, name))


class DlpackOnly:
    def __init__(self, array, device=None):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


class CudaInterface:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_numpy_array_is_itself():
    x = np.arange(6)
    assert as_array(x, "x") is x


def test_host_protocols_share_memory():
    """DLPack and the array interface give a view: a write through one is seen in the other."""
    x = np.arange(6, dtype=np.float32)
    for foreign in (DlpackOnly(x), Wrapper(x, "__array_interface__"), memoryview_of(x)):
        view = as_array(foreign, "x")
        x[2] = 77
        assert view[2] == 77
        x[2] = 2


def memoryview_of(x):
    """An object with `__array__`, as PyTorch's CPU tensors have."""

    class HasArray:
        def __array__(self, dtype=None, copy=None):
            return x

    return HasArray()


def test_lists_are_int32():
    assert as_array([1, 2], "ids").dtype == np.int32
    assert as_array([], "ids").shape == (0,)
    for wrong in ([1.5], [2**31], ["a"]):
        with pytest.raises(ArgumentError, match="ids"):
            as_array(wrong, "ids")


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(8)[::2],
        lambda: np.arange(12).reshape(3, 4)[:, :2],
        lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
        lambda: np.broadcast_to(np.arange(4), (3, 4)),
    ],
    ids=["step", "columns", "fortran", "broadcast"],
)
def test_o05_views_are_refused(make):
    """A kernel would read the base pointer and ignore the strides: shape, strides and fix."""
    with pytest.raises(ArgumentError, match=r"strides=.*numpy\.ascontiguousarray\(x\)"):
        as_array(make(), "x")


def test_not_an_array():
    with pytest.raises(ArgumentError, match="x: str is no array"):
        as_array("abc", "x")
    with pytest.raises(ArgumentError, match="device type 4"):
        as_array(DlpackOnly(np.arange(3), device=(4, 0)), "x")


def test_foreign_bf16_that_numpy_cannot_view():
    """PyTorch refuses `__array__` of bf16: the message says how to pass it."""

    class Refuses:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("unsupported ScalarType BFloat16")

    with pytest.raises(ArgumentError, match="uint16 bits"):
        as_array(Refuses(), "x")


def test_bf16_bits():
    x = np.ones(3, ml_dtypes.bfloat16)
    assert bf16_bits(x, "x").base is x
    assert bf16_bits(x, "x").tolist() == [0x3F80] * 3
    with pytest.raises(ArgumentError, match=r"x\.dtype=float16"):
        bf16_bits(np.zeros(3, np.float16), "x")


def test_load_operations():
    """Every backend offers the same names; an unknown one is refused."""
    for backend in BACKENDS[1:]:
        operations = load_operations(backend)
        assert all(callable(getattr(operations, name)) for name in OPERATION_NAMES)
    with pytest.raises(ArgumentError, match="gpu"):
        load_operations("gpu")


def test_where_arrays_live(fast_backend):
    x = to_backend(np.zeros((2, 3), np.uint16), fast_backend)
    assert backend_of(x=x, y=None) == fast_backend
    assert is_cuda(x) == (fast_backend == "cuda")
    new = empty_like_backend((4,), BF16, x)
    assert new.shape == (4,)
    assert new.dtype == (BF16 if fast_backend == "cpu" else np.uint16)


@pytest.mark.gpu
def test_gpu_protocols_share_memory():
    """CUDA array interface and DLPack give CuPy views of the same memory."""
    import cupy

    x = cupy.arange(6, dtype=cupy.float32)
    assert as_array(x, "x") is x
    for foreign in (CudaInterface(x), DlpackOnly(x)):
        view = as_array(foreign, "x")
        x[2] = 77
        assert to_host(view)[2] == 77
        x[2] = 2
    with pytest.raises(ArgumentError, match=r"cupy\.ascontiguousarray"):
        as_array(cupy.arange(8)[::2], "x")
    with pytest.raises(ArgumentError, match="x on cuda:0, y on cpu"):
        backend_of(x=x, y=np.zeros(3))
