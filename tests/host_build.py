"""Shared libraries of CUDA sources, built by g++ for tests on the CPU."""

import ctypes
import subprocess
from pathlib import Path

from ringslab.rawkernels.device.kernel_source import FORMAT_MACROS

# No contraction, as a product and a sum on the GPU are two roundings where it matters. Inline
# variables are a library's own: by default they are unique in a process, and builds for different
# numbers of threads would share the arrays of the first.
SHARED_FLAGS = ("-shared", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off")


def build_library(folder: Path, file: str, macros, *flags: str) -> ctypes.CDLL:
    """`file` in `folder`, built with the formats' constants, `macros` and `flags`, and loaded.
    AssertionError with what g++ said where it fails."""
    defines = [f"-D{name}={value}" for name, value in (*FORMAT_MACROS, *macros)]
    library = folder / f"{Path(file).stem}.so"
    command = ["g++", *SHARED_FLAGS, *flags, *defines, "-o", str(library), file]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[:4000]
    return ctypes.CDLL(str(library))
