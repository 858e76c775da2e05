"""Fixtures of all tests: the backends, and the reason where a GPU test is skipped."""

import pytest
from helpers import gpu_problem
from hypothesis import settings

# Fixed seeds: a failure here is a failure everywhere. Deadlines would time Numba's compiler.
settings.register_profile("ringslab", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ringslab")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and gpu_problem():
        pytest.skip(gpu_problem())


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Name of the backend a test runs on; arrays go there by `helpers.to_backend`."""
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def fast_backend(request):
    """A backend that is compared with the reference."""
    return request.param
