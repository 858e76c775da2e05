"""Arrays cross to CuPy without a look at what is slow to build: an array's interface."""

import numpy as np
import pytest

from ringslab.rawkernels.arrays import as_array, is_cuda
from ringslab.rawkernels.cuda.store_records import PARAMS
from ringslab.rawkernels.device.module import Kernel


def array_type(module, name="ndarray"):
    def interface(self):
        raise AssertionError("looked at")

    body = {"__module__": module, "__cuda_array_interface__": property(interface)}
    return type(name, (), body)


def test_the_interface_of_a_cupy_array_is_not_looked_at():
    """Of a type with CuPy's names only the flags are read."""
    array = array_type("cupy")()
    array.flags = np.zeros(1).flags
    assert is_cuda(array)
    assert as_array(array, "x") is array


@pytest.mark.parametrize(("module", "name"), [("cupyx", "ndarray"), ("cupy", "generic")])
def test_others_are_asked(module, name):
    """Another type of the same library is asked what it offers."""
    with pytest.raises(AssertionError, match="looked at"):
        is_cuda(array_type(module, name)())


def test_a_launch_passes_parameters_as_bytes():
    """The struct's bytes, in an array that NumPy need not describe field by field."""
    given = {name: 0x1234 + i for i, (name, _) in enumerate(PARAMS.fields)}
    params = PARAMS.pack(**given)
    calls = []
    kernel = Kernel("store_records", PARAMS.dtype, 64, lambda *arguments: calls.append(arguments))
    kernel.launch((3,), (128,), params)
    [(grid, block, (passed,), shared_bytes, stream)] = calls
    assert (grid, block, shared_bytes, stream) == ((3,), (128,), 64, None)
    assert passed.size == 1  # else CuPy refuses it
    assert passed.dtype.fields is None
    assert passed.__array_interface__["data"] == params.__array_interface__["data"]
    assert passed.tobytes() == params.tobytes()


@pytest.mark.gpu
def test_on_a_gpu():
    """What CuPy makes is what we take for its arrays."""
    import cupy

    kind = cupy.ndarray
    assert (kind.__module__, kind.__name__) == ("cupy", "ndarray")
    array = cupy.zeros((3, 4), np.float32)
    assert is_cuda(array)
    assert as_array(array[:, :2].copy(), "x").shape == (3, 2)
