"""Which shapes a benchmark run measures, and the report that comes out."""

import itertools
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.errors import ArgumentError
from ..doctor_facts import package_version
from . import ceilings as rates
from .common import Ceilings, Place, force_kernel, measure, open_place
from .peers import has_peer, measure_peer

OPERATIONS = (
    "window_decode",
    "window_prefill",
    "ring_store",
    "encode_records",
    "store_records",
    "load_history",
    "ring_load",
    "paged_store",
    "paged_load",
    "paged_decode",
    "quantize_mxfp8",
    "dequantize_mxfp8",
    "apply_rope",
    "seeded_activations",
    "stack_activations",
    "digest_outputs",
    "plan_decode",
    "plan_prefill",
    "window_attention",
)
AXES = ("heads", "queries", "sequences", "tokens", "rows", "rule", "dtype", "layer", "window")
SCHEMA_VERSION = 1
REPEATS, SMOKE_REPEATS = 15, 3
MESSAGE_CHARS = 1000
PACKAGES = ("numpy", "numba", "cupy-cuda13x", "torch")
PROGRAM_SECONDS = 20  # that git or nvidia-smi may take
_SMI = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"


@dataclass(frozen=True)
class Wish:
    """What a user asked for. `axes` holds the values given for an axis, in place of its default."""

    ops: tuple[str, ...]
    axes: dict[str, tuple]
    smoke: bool
    peers: bool
    sustained: bool
    repeats: int
    seed: int
    kernel: str | None = None
    commit: str | None = None


def bench_of(op: str) -> ModuleType:
    """The file of an operation's benchmark, imported now. ArgumentError for another name."""
    if op not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise ArgumentError(f"bench: there is no operation {op!r}; there are: {known}")
    return import_module(f".{op}", __package__)


def shapes_of(op: str, wish: Wish) -> Iterator[dict[str, Any]]:
    """Every shape of an operation: the product of its axes' values."""
    bench = bench_of(op)
    defaults = {name: (value,) for name, value in bench.SMOKE.items()} if wish.smoke else bench.AXES
    values = [wish.axes.get(name, default) for name, default in defaults.items()]
    for chosen in itertools.product(*values):
        yield dict(zip(defaults, chosen, strict=True))


def check_axes(wish: Wish) -> None:
    """ArgumentError for an axis that none of the chosen operations has."""
    known = {name for op in wish.ops for name in bench_of(op).AXES}
    for name in wish.axes:
        if name not in known:
            axes, ops = ", ".join(sorted(known)), ", ".join(wish.ops)
            raise ArgumentError(f"bench: {ops} has no axis {name!r}; there are: {axes}")


def run_benches(
    backend: str,
    device: int,
    cfg: Config,
    wish: Wish,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The report: environment, rates, one row a shape. A row whose result was wrong or that could
    not run has `error` and no times. `save` is called after each row with the report so far, whose
    `complete` is false until the last one, so that a run that is cut short leaves what it has."""
    check_axes(wish)
    start = environment(backend, device)
    start["commit"] = start["commit"] or wish.commit
    rng = np.random.default_rng(wish.seed)
    with open_place(backend, device) as place:
        if wish.kernel:
            place = force_kernel(place, wish.ops, wish.kernel)
        tell("measuring copy and matrix rates")
        measured = rates.measure_ceilings(place, rng, smoke=wish.smoke, sustained=wish.sustained)
        report = {
            "schema_version": SCHEMA_VERSION,
            "complete": False,
            "device": start["device"],
            **rates.report_of(measured),
            "backend": backend,
            "config": cfg.name,
            "smoke": wish.smoke,
            "forced_kernel": wish.kernel,
            "seed": wish.seed,
            "environment": start,
            "rows": [],
        }
        for op in wish.ops:
            for shape in shapes_of(op, wish):
                report["rows"].append(_row(place, cfg, wish, measured, op, shape, tell))
                save(report)
    start["gpu_after"] = _gpu_state(device) if backend == "cuda" else None
    report["complete"] = True
    save(report)
    return report


def _row(
    place: Place,
    cfg: Config,
    wish: Wish,
    measured: Ceilings,
    op: str,
    shape: dict[str, Any],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    tell(f"{op} {text_of(shape)}")
    row: dict[str, Any] = {"op": op, "shape": shape, **dict.fromkeys(_TIMES)}
    # Each row has inputs of its own seed, so that it is the same whatever else is measured.
    rng = np.random.default_rng([wish.seed, OPERATIONS.index(op)])
    try:
        work = bench_of(op).prepare(place, cfg, shape, rng)
        options = {"repeats": wish.repeats, "sustained": wish.sustained}
        row |= measure(place, work, measured, **options)
    except Exception as error:  # one operation's fault must not lose the rows of the others
        row["error"] = _message(error)
        tell(f"{op} {text_of(shape)}: {row['error']}")
    else:
        if wish.peers and has_peer(op, shape):
            try:
                row |= measure_peer(op, place, work, shape, wish.repeats)
            except Exception as error:  # nor a peer's fault our own
                row["peer_error"] = _message(error)
                tell(f"{op} {text_of(shape)}: peer: {row['peer_error']}")
    work = None
    place.watch.release()
    return row


def _message(error: Exception) -> str:
    """The kind of an error and the first lines of what it says: compilers say pages."""
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]


_TIMES = ("median_us", "floor_us", "times_floor", "gbps", "tflops", "peer", "peer_us")


def text_of(shape: dict[str, Any]) -> str:
    """A shape in one line: `heads 64, queries 6, sequences 512`."""
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in shape.items()
    )


def environment(backend: str, device: int) -> dict[str, Any]:
    """Where and how this was run: device, versions, commit, date, command line."""
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["ringslab", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "device": _processor(),
        "gpu": None,
        "nvrtc": None,
    }
    if backend != "cuda":
        return record
    from ...rawkernels.device.inventory import list_gpus
    from ...rawkernels.device.nvrtc import compiler_version

    gpus = {gpu.id: gpu.name for gpu in list_gpus().gpus}
    record |= {
        "device": gpus.get(device, f"cuda:{device}"),
        "gpu": _gpu_state(device),
        "driver_cuda": list_gpus().driver_cuda,
        "nvrtc": compiler_version(),
    }
    return record


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    if head is None:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{head} with changes" if changed else head


def _gpu_state(device: int) -> dict[str, str] | None:
    """Driver, clocks and power as nvidia-smi says them; None without it."""
    command = ["nvidia-smi", f"--id={device}", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    line = _output(command)
    if line is None:
        return None
    return dict(zip(_SMI.split(","), (part.strip() for part in line.split(",")), strict=False))


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
