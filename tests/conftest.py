"""Fixtures of all tests: the backends, how long the fuzz tests run, and the reason where a GPU test
is skipped."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line; read once, at its load

import numpy as np
import pytest
from helpers import gpu_problem
from hypothesis import HealthCheck, settings

# Fixed seeds: a failure here is a failure everywhere. Deadlines would time Numba's compiler.
settings.register_profile("ringslab", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ringslab")
# `--fuzz=full` draws new examples each time; a failure prints its own (docs/testing.md).
settings.register_profile(
    "full",
    max_examples=20_000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def pytest_addoption(parser):
    parser.addoption(
        "--fuzz",
        choices=("small", "full"),
        default="small",
        help="how long tests/test_fuzz_*.py run: seconds, or 20,000 examples and a million blocks",
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the vectorised fuzz tests")


def pytest_configure(config):
    if config.getoption("--fuzz") == "full":
        settings.load_profile("full")


@pytest.fixture
def fuzz_size(request):
    """fuzz_size(small, full): how much of something a fuzz test tries."""
    is_full = request.config.getoption("--fuzz") == "full"
    return lambda small, full: full if is_full else small


@pytest.fixture
def fuzz_rng(request):
    """Random numbers of a vectorised fuzz test, seeded by `--fuzz-seed` and the test's name."""
    seed = request.config.getoption("--fuzz-seed")
    return np.random.default_rng([seed, *request.node.name.encode()])


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


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory):
    """One redis-server for all tests of this process; skipped, with the reason, without one."""
    from store_cases import RedisServer, redis_problem

    if redis_problem():
        pytest.skip(redis_problem())
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis):
    """The shared redis-server, emptied."""
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis


@pytest.fixture(params=["memory", "lmdb", "redis"])
def store_url(request, tmp_path):
    """The address of an empty store of each kind."""
    if request.param == "redis":
        return request.getfixturevalue("redis_server").url
    if request.param == "memory":
        return "memory:"
    pytest.importorskip("lmdb")
    return f"lmdb:{tmp_path / 'store'}"
