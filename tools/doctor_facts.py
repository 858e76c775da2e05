"""Looks at the machine for `ringslab doctor`."""

import platform
import shutil
import warnings
from dataclasses import asdict
from importlib import metadata
from typing import Any

from ..layouts.errors import BackendError
from ..rawkernels.device.cubin_cache import DIRECTORY_VARIABLE, cache_directory, open_cache
from ..rawkernels.device.inventory import list_gpus
from ..rawkernels.device.nvrtc import compiler_version
from ..rawkernels.device.probe import gpu_problem
from ..rawkernels.device.sass import find_disassembler
from .doctor_rules import Facts

PACKAGES = (
    "numpy",
    "numba",
    "pyyaml",
    "ml_dtypes",
    "rich",
    "lmdb",
    "redis",
    "matplotlib",
    "cupy-cuda13x",
    "numba-cuda",
    "cuda-bindings",
    "nvtx",
    "pytest",
    "transformers",
)
OTHER_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x")  # listed only where they are installed


def gather_facts() -> Facts:
    """Everything that `doctor_rules` asks for. Loads CuPy where it is installed (about a second)
    and makes the cubin cache's folder where it can."""
    inventory = list_gpus()
    nvrtc, nvrtc_problem = _nvrtc()
    packages = {name: package_version(name) for name in PACKAGES}
    packages |= {name: version for name in OTHER_CUPY if (version := package_version(name))}
    return Facts(
        python=f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        packages=packages,
        driver_cuda=inventory.driver_cuda,
        driver_problem=inventory.problem,
        gpus=tuple(asdict(gpu) for gpu in inventory.gpus),
        gpu_problem=gpu_problem() if inventory.gpus else None,
        nvrtc=nvrtc,
        nvrtc_problem=nvrtc_problem,
        cache=_cache(),
        programs={
            "g++": shutil.which("g++"),
            "nvdisasm": find_disassembler(),
            "redis-server": shutil.which("redis-server"),
        },
    )


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> tuple[str | None, str | None]:
    try:
        return compiler_version(), None
    except BackendError as error:
        return None, str(error)


def _cache() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = open_cache()
    files = [path for directory in cache.directories for path in directory.glob("*.cubin")]
    return {
        "path": str(cache.write_directory or cache_directory()),
        "variable": DIRECTORY_VARIABLE,
        "problem": "; ".join(str(warning.message) for warning in caught) or None,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }
