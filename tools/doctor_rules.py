"""What `ringslab doctor` concludes from what it found. Pure: facts in, findings out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

# pip takes the extras of what is installed, from a wheel or a checkout (`pip install -e .`) alike.
INSTALL_CUDA = "pip install 'ringslab[cuda]'"
INSTALL_DEV = "pip install 'ringslab[dev]'"
MIN_COMPUTE_CAPABILITY = (8, 0)  # mma.sync with bf16 operands
# numba-cuda 0.30.4 uses numpy.row_stack, which numpy 2.5 took away.
NUMPY_WITHOUT_ROW_STACK = (2, 5)


@dataclass(frozen=True)
class Facts:
    """What is on this machine. Versions are strings; None means absent.

    packages: distribution name -> version. `*_problem` says why something cannot be used.
    gpus: `id, name, compute_capability, arch, total_bytes` each. programs: name -> path.
    cache: `path, variable, problem, files, bytes` of the cubin cache.
    """

    python: str
    packages: dict[str, str | None]
    driver_cuda: str | None
    driver_problem: str | None
    gpus: tuple[dict[str, Any], ...]
    gpu_problem: str | None
    nvrtc: str | None
    nvrtc_problem: str | None
    cache: dict[str, Any]
    programs: dict[str, str | None]


@dataclass(frozen=True)
class Finding:
    """`error`: two installed things contradict each other. `warning`: something works less well
    than it could. `note`: something optional is not there. `mend` is a command, or a sentence."""

    level: Literal["error", "warning", "note"]
    what: str
    mend: str


def version_of(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: "2.5.2rc1" is (2, 5, 2); None is ()."""
    match = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def why_no_cuda(facts: Facts) -> str | None:
    """The first reason why the backend `cuda` cannot run here, or None where it can."""
    return facts.driver_problem or facts.gpu_problem or facts.nvrtc_problem


def cupy_names(facts: Facts) -> list[str]:
    return [name for name in facts.packages if name.startswith("cupy") and facts.packages[name]]


def find(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [*_contradictions(facts), *_missing(facts)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _contradictions(facts: Facts) -> Iterator[Finding]:
    numpy, numba_cuda = facts.packages.get("numpy"), facts.packages.get("numba-cuda")
    if numba_cuda and version_of(numpy) >= NUMPY_WITHOUT_ROW_STACK:
        yield Finding(
            "warning",
            f"numba-cuda {numba_cuda} fails to compile on numpy {numpy} (numpy.row_stack is gone); "
            "ringslab puts the name back for its own kernels, others fail",
            "pip install 'numpy<2.5'",
        )
    if version_of(facts.nvrtc)[:2] > version_of(facts.driver_cuda)[:2] > ():
        yield Finding(
            "error",
            f"NVRTC {facts.nvrtc} is newer than the driver, which knows CUDA {facts.driver_cuda}; "
            "the driver may refuse what it compiles",
            f"pip install 'cuda-toolkit[nvrtc,nvvm]=={facts.driver_cuda}.*'",
        )
    if len(names := cupy_names(facts)) > 1:
        yield Finding(
            "error",
            f"{' and '.join(names)} are installed together and overwrite each other's files",
            f"pip uninstall {' '.join(names)} && {INSTALL_CUDA}",
        )
    bindings = facts.packages.get("cuda-bindings")
    if bindings and facts.nvrtc and version_of(bindings)[0] != version_of(facts.nvrtc)[0]:
        yield Finding(
            "error",
            f"cuda-bindings {bindings} and NVRTC {facts.nvrtc} are of different major versions",
            f"pip install 'cuda-bindings=={version_of(facts.nvrtc)[0]}.*'",
        )
    for gpu in facts.gpus:
        if gpu["compute_capability"] < MIN_COMPUTE_CAPABILITY:
            yield Finding(
                "warning",
                f"GPU {gpu['id']} ({gpu['name']}, {gpu['arch']}) is older than sm_80",
                "the CUDA backend needs sm_80 or later; use --backend cpu",
            )


def _missing(facts: Facts) -> Iterator[Finding]:
    for name in ("numpy", "numba", "pyyaml", "ml_dtypes", "rich"):
        if not facts.packages.get(name):
            yield Finding("error", f"{name} is not installed", f"pip install {name}")
    lmdb = facts.packages.get("lmdb")
    if not lmdb or version_of(lmdb)[0] < 3:
        found = f"lmdb {lmdb} is too old" if lmdb else "lmdb is not installed"
        yield Finding("warning", f"{found}; no store on disk opens", "pip install 'lmdb>=3'")
    if facts.gpus and not cupy_names(facts):
        yield Finding("warning", "there is a GPU, but CuPy is not installed", INSTALL_CUDA)
    if facts.nvrtc is None:
        level = "warning" if facts.gpus else "note"
        mend = INSTALL_CUDA if facts.gpus else INSTALL_DEV
        yield Finding(level, "no NVRTC, so no CUDA kernel can be compiled", mend)
    if facts.cache["problem"]:
        mend = f"set {facts.cache['variable']} to a folder that only you can write"
        yield Finding("warning", facts.cache["problem"], mend)
    if facts.gpus and not facts.packages.get("nvtx"):
        yield Finding("note", "no nvtx; ranges fall back to CuPy's binding", "pip install nvtx")
    if not facts.programs.get("nvdisasm"):
        yield Finding(
            "note",
            "no nvdisasm, so `ringslab compile` counts no opcodes",
            "pip install nvidia-cuda-nvdisasm",
        )
    yield from _optional(facts)


def _optional(facts: Facts) -> Iterator[Finding]:
    """Notes of what some commands and tests need. Those of tests only where pytest is there."""
    if not facts.packages.get("redis"):
        yield Finding("note", "no redis, so no store at redis:// opens", "pip install 'redis>=5'")
    if not facts.packages.get("matplotlib"):
        yield Finding(
            "note",
            "no matplotlib, so `ringslab plot`, `run --plot` and `bench --plot` draw nothing",
            "pip install 'matplotlib>=3.9'",
        )
    if not facts.programs.get("g++"):
        yield Finding(
            "note",
            "no g++, so the tests that run the CUDA codec on the host are skipped",
            "install g++ (Debian: apt-get install g++)",
        )
    if not facts.packages.get("pytest"):
        return
    if not facts.packages.get("transformers"):
        yield Finding(
            "note",
            "no transformers, so the tests that compare with its masks and caches are skipped",
            "pip install transformers torch",
        )
    if not facts.programs.get("redis-server"):
        yield Finding(
            "note",
            "no redis-server, so the tests that start one are skipped",
            "install Redis (Debian: apt-get install redis-server)",
        )
