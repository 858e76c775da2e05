"""What the driver is asked, with a driver made of Python functions, and on this machine."""

import ctypes
from types import SimpleNamespace

import pytest

from ringslab.rawkernels.device import inventory

ERROR_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def fake_driver(capabilities: list[tuple[int, int]], *, cuda=13000, fails=None):
    """A driver with a GPU of each compute capability; the function `fails` answers 100."""

    def filling(value):
        def function(pointer, *arguments):
            pointer._obj.value = value(*arguments)
            return 0

        return function

    def name(buffer, size, device):
        buffer.value = f"GPU of sm_{capabilities[device.value]}".encode()
        return 0

    functions = {
        "cuDriverGetVersion": filling(lambda: cuda),
        "cuInit": lambda flags: 0,
        "cuDeviceGetCount": filling(lambda: len(capabilities)),
        "cuDeviceGet": filling(lambda id: id),
        "cuDeviceGetName": name,
        "cuDeviceTotalMem_v2": filling(lambda device: 2**37),
        "cuDeviceGetAttribute": filling(
            lambda attribute, device: capabilities[device.value][attribute - 75]
        ),
    }
    if fails:
        functions[fails] = lambda *arguments: ERROR_NO_DEVICE
    return SimpleNamespace(**functions)


def list_with(monkeypatch, driver) -> inventory.Inventory:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return inventory.list_gpus()


def test_two_gpus(monkeypatch):
    """13000 is CUDA 13.0; capability 9.0 is built for as sm_90a, 8.6 as sm_86; 2^37 bytes need
    more than 32 bits and arrive whole."""
    found = list_with(monkeypatch, fake_driver([(9, 0), (8, 6)]))
    assert found.driver_cuda == "13.0"
    assert found.problem is None
    assert [(gpu.id, gpu.arch, gpu.total_bytes) for gpu in found.gpus] == [
        (0, "sm_90a", 2**37),
        (1, "sm_86", 2**37),
    ]


def test_no_gpu(monkeypatch):
    """A driver without a GPU names its version and the problem."""
    found = list_with(monkeypatch, fake_driver([], cuda=12090))
    assert found == inventory.Inventory("12.9", (), "the driver shows no GPU")


@pytest.mark.parametrize(
    ("function", "cuda"),
    [("cuDriverGetVersion", None), ("cuInit", "13.0"), ("cuDeviceGetName", "13.0")],
)
def test_a_failing_driver_is_told(monkeypatch, function, cuda):
    """An error of any call is no exception: its number and the call are the problem."""
    found = list_with(monkeypatch, fake_driver([(9, 0)], fails=function))
    assert found.driver_cuda == cuda
    assert found.gpus == ()
    assert found.problem == f"the NVIDIA driver answers error 100 to {function}"


def test_no_driver(monkeypatch):
    """No libcuda: no version, no GPU, and the loader's words."""

    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    found = inventory.list_gpus()
    assert found.driver_cuda is None
    assert "libcuda.so.1: cannot open" in found.problem


@pytest.mark.gpu
def test_this_machine():
    """The driver's list has what CuPy sees, with the same compute capability."""
    import cupy

    found = inventory.list_gpus()
    assert found.problem is None
    assert len(found.gpus) == cupy.cuda.runtime.getDeviceCount()
    for gpu in found.gpus:
        capability = "".join(map(str, gpu.compute_capability))
        assert capability == cupy.cuda.Device(gpu.id).compute_capability
