"""NVRTC: CUDA C++ text to a cubin in memory. Works without a GPU and without a driver.

A kernel's own headers are handed over in memory and nothing else can be included, so a build
needs no CUDA headers on the machine and depends on nothing that its cache key does not hold.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...layouts.errors import BackendError, KernelBuildError
from .kernel_source import Macros

# -v makes ptxas print registers, shared memory and spills, which is our compile report; -lineinfo
# lets profilers show our source. Contraction stays on (the compiler's default): code whose bits
# matter uses __fmul_rn and its like.
BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "-lineinfo")
_NO_COMPILER = (
    "no CUDA compiler: {error}. Install NVRTC and its Python bindings, for example "
    "pip install 'cuda-bindings==13.*' 'cuda-toolkit[nvrtc]==13.0.*'"
)


@dataclass(frozen=True)
class KernelResources:
    """What ptxas says of one entry function. `shared_bytes` is static shared memory only."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int  # stores and loads together


@dataclass(frozen=True)
class Build:
    """A cubin and what the compiler said while making it."""

    cubin: bytes
    log: str


@cache
def compiler_version() -> str:
    """ "13.0" for example. Raises BackendError where NVRTC is missing."""
    nvrtc = _bindings()
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings load the library at the first call
        raise BackendError(_NO_COMPILER.format(error=error)) from error
    _check(nvrtc, result, "nvrtcVersion")
    return f"{major}.{minor}"


def compile_options(macros: Macros, arch: str) -> tuple[str, ...]:
    """The options of a build, macros sorted by name."""
    defines = tuple(f"-D{name}={value}" for name, value in sorted(macros.items()))
    return (f"--gpu-architecture={arch}", *BASE_OPTIONS, *defines)


def compile_cubin(
    source: str, name: str, headers: Mapping[str, str], macros: Macros, arch: str
) -> Build:
    """Compile CUDA C++ text for `arch` ("sm_80", "sm_90a").

    `headers` maps the names that the source includes to their text. Raises KernelBuildError with
    the options and the compiler's log, BackendError where there is no compiler.
    """
    compiler_version()  # a missing library is told once, and plainly
    nvrtc = _bindings()
    options = compile_options(macros, arch)
    result, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [header.encode() for header in headers],
    )
    _check(nvrtc, result, "nvrtcCreateProgram")
    try:
        raw = [option.encode() for option in options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(raw), raw)
        log = _program_log(nvrtc, program)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(
                f"{name} does not compile for {arch} (NVRTC {compiler_version()}, {result.name})\n"
                f"options: {' '.join(options)}\nlog:\n{log}"
            )
        result, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(nvrtc, result, "nvrtcGetCUBINSize")
        cubin = bytearray(size)
        (result,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        _check(nvrtc, result, "nvrtcGetCUBIN")
        return Build(bytes(cubin), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Resources of each entry function named in a ptxas log."""
    found: dict[str, dict[str, int]] = {}
    entry: dict[str, int] | None = None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            entry = found.setdefault(match[1], {})
        elif entry is None:
            continue
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            entry["stack_bytes"] = int(match[1])
            entry["spill_bytes"] = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            entry["registers"] = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            entry["shared_bytes"] = int(shared[1]) if shared else 0
            entry = None
    return {name: KernelResources(**values) for name, values in found.items()}


def _bindings():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendError(_NO_COMPILER.format(error=error)) from error
    return nvrtc


def _program_log(nvrtc, program) -> str:
    result, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(nvrtc, result, "nvrtcGetProgramLogSize")
    log = bytearray(size)
    (result,) = nvrtc.nvrtcGetProgramLog(program, log)
    _check(nvrtc, result, "nvrtcGetProgramLog")
    return log.rstrip(b"\0 \n").decode("utf-8", "replace")


def _check(nvrtc, result, call: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"{call}: {result.name}")
