"""What every benchmark shares: where it runs, what a piece of work is, and how it is measured.

Floors: each byte read once and written once at the copy rate, or the floating-point operations at
the matrix rate, whichever takes longer. Both rates are measured in the same run.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from ...layouts.errors import RingslabError
from ...rawkernels.memory import Memory, load_memory
from ...rawkernels.operations import Operations, load_operations
from ...rawkernels.timing import Replay, Stopwatch, host_stopwatch

Shape = Mapping[str, Any]

ROTATE_BYTES = 160 * 10**6  # input sets are added until they are several times an L2
LEAST_SETS, MOST_SETS = 4, 32
MOST_BYTES = 8 * 10**9  # of all input sets together, but for a single larger one
CHECK_CHUNK = 1 << 28  # elements looked at in one go
POISON_BYTE = 0xFF
SUSTAIN_SECONDS = 2.0
ATTENTION_FLOPS = 4  # a visible score and head_dim element: 2 for q . k, 2 for the sum of values


class BenchError(RingslabError, RuntimeError):
    """A result was wrong or incomplete, so it has no time."""


@dataclass(frozen=True)
class Place:
    """One backend: its memory, its clock, its operations."""

    backend: str
    memory: Memory
    watch: Stopwatch
    ops: Operations


@dataclass(frozen=True)
class Work:
    """One operation at one shape, ready to run.

    calls    one a set of inputs, which share no large array
    outputs  the arrays that the first call fills completely; poisoned before it
    bytes    of one call: every input byte that it needs once, every output byte once
    flops    of one call; 0 where the arithmetic is not matrix products
    check    compares what the first call wrote with the reference on a sample; returns what it
             found, raises BenchError where it is wrong
    parts    what a peer needs to do the same work
    visited_flops  FLOPs of all pairs of the tiles that a tiled kernel visits; 0 where it has no
             meaning
    """

    calls: tuple[Callable[[], None], ...]
    outputs: tuple[Any, ...]
    bytes: int
    flops: int
    check: Callable[[], dict[str, Any]]
    poison_byte: int = POISON_BYTE
    parts: Mapping[str, Any] = field(default_factory=dict)
    visited_flops: int = 0


@dataclass(frozen=True)
class Ceilings:
    """Rates of this run: bytes read plus bytes written, and matrix products (None without a library
    for them). `sustained_*` after two seconds under load, where asked for."""

    copy_gbps: float
    matmul_tflops: float | None
    matmul_dtype: str
    copy_bytes: int
    matmul_size: int
    sustained_copy_gbps: float | None = None
    sustained_matmul_tflops: float | None = None


@contextmanager
def open_place(backend: str, device: int) -> Iterator[Place]:
    """The place of a backend; inside, its device and stream are the current ones."""
    ops = load_operations(backend)
    if backend != "cuda":
        yield Place(backend, load_memory(backend), host_stopwatch(), ops)
        return
    from ...rawkernels.device.timing import load_device_stopwatch, make_stream

    with load_memory("cuda", device).scope():
        stream = make_stream()
        memory = load_memory("cuda", device, stream)
        with memory.scope():
            yield Place(backend, memory, load_device_stopwatch(stream), ops)


def force_kernel(place: Place, ops: tuple[str, ...], variant: str) -> Place:
    """The place with one kernel variant in those operations, for all shapes. Raises BenchError for
    an operation that offers no choice (its launcher has no argument `variant`)."""
    forced = {}
    for op in ops:
        launch = getattr(place.ops, op, None)
        if launch is None or "variant" not in inspect.signature(launch).parameters:
            raise BenchError(f"{op} on {place.backend} has one kernel; leave --kernel out")
        forced[op] = partial(launch, variant=variant)
    return replace(place, ops=replace(place.ops, **forced))


def num_sets(set_bytes: int, most: int = MOST_SETS) -> int:
    """Input sets that are rotated: enough that no data is left in a cache when its turn comes."""
    wanted = max(-(-ROTATE_BYTES // max(set_bytes, 1)), LEAST_SETS)  # rounded up
    room = max(MOST_BYTES // max(set_bytes, 1), 1)  # rounded down
    return max(min(wanted, room, most, MOST_SETS), 1)


def measure(
    place: Place, work: Work, ceilings: Ceilings, *, repeats: int, sustained: bool
) -> dict[str, Any]:
    """Check one piece of work, then time it: the numbers of one row of the report.

    Raises BenchError where the result is wrong or an output element was not written.
    """
    poison(work)
    work.calls[0]()
    place.watch.sync()
    refuse_unwritten(work)
    found = work.check()
    checksum = sum_of_bits(work.outputs)
    replay = place.watch.capture(work.calls)
    times = times_of(place, replay, repeats)
    row = numbers(times, work, ceilings)
    row |= {
        "kernel": kernel_of(place, replay),
        "host_us": round(place.watch.host_us(work.calls[0]), 2),
        "bytes": work.bytes,
        "flops": work.flops,
        "input_sets": len(work.calls),
        "check": found,
        "checksum": checksum,
    }
    if sustained:
        per_call = [t / replay.num_calls for t in sustain(place, replay)]
        row["sustained_us"] = round(median(per_call), 3)
    return row


def times_of(place: Place, replay: Replay, repeats: int) -> list[float]:
    """Microseconds of a call, one a round; caches are flushed before each round."""
    return [t / replay.num_calls for t in place.watch.time_us(replay.run, repeats, True)]


def sustain(place: Place, replay: Replay) -> list[float]:
    return place.watch.sustain_us(replay.run, SUSTAIN_SECONDS, True)


def numbers(times: list[float], work: Work, ceilings: Ceilings) -> dict[str, Any]:
    """Median and spread, rates, and the floor that they are compared with."""
    middle = median(times)
    floor = floor_us(work, ceilings)
    tflops = work.flops / middle / 1e6
    visited = {"visited_tflops": round(work.visited_flops / middle / 1e6, 3)}
    return {
        "median_us": round(middle, 3),
        "min_us": round(min(times), 3),
        "p90_us": round(float(np.percentile(times, 90)), 3),
        "repeats": len(times),
        "floor_us": round(floor, 3),
        "times_floor": round(middle / floor, 3),
        "gbps": round(work.bytes / middle / 1e3, 1),
        "copy_fraction": round(work.bytes / middle / 1e3 / ceilings.copy_gbps, 4),
        "tflops": round(tflops, 3),
        "matmul_fraction": _share(tflops, ceilings.matmul_tflops) if work.flops else None,
        **(visited if work.visited_flops else {}),
    }


def floor_us(work: Work, ceilings: Ceilings) -> float:
    """Microseconds that the bytes take at the copy rate or the FLOPs at the matrix rate, whichever
    is longer."""
    by_bytes = work.bytes / ceilings.copy_gbps / 1e3
    by_flops = work.flops / ceilings.matmul_tflops / 1e6 if ceilings.matmul_tflops else 0.0
    return max(by_bytes, by_flops)


def _share(part: float, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole else None


def kernel_of(place: Place, replay: Replay) -> str | None:
    """Kernels that a round ran, as the driver names them; on the host the backend's name."""
    if place.backend != "cuda":
        return place.backend
    return None if replay.kernels is None else " + ".join(replay.kernels)


def poison(work: Work) -> None:
    """Fill the outputs of the first call with a byte that no right result has everywhere."""
    for output in work.outputs:
        output.reshape(-1).view(np.uint8).fill(work.poison_byte)


def refuse_unwritten(work: Work) -> None:
    """BenchError where an element still holds nothing but poison."""
    for i, output in enumerate(work.outputs):
        size = output.dtype.itemsize
        wanted = np.dtype(f"u{size}").type(int.from_bytes(bytes([work.poison_byte]) * size, "big"))
        bits = output.reshape(-1).view(np.dtype(f"u{size}"))
        left = sum(int((part == wanted).sum()) for part in chunks(bits))
        if left:
            raise BenchError(f"{left} of {output.size} elements of output {i} were not written")


def sum_of_bits(outputs: tuple[Any, ...]) -> str:
    """A checksum: the sum of the bits of all elements as integers, modulo 2^64, in hexadecimal.
    Equal outputs have equal sums on every backend."""
    total = 0
    for output in outputs:
        bits = output.reshape(-1).view(np.dtype(f"u{output.dtype.itemsize}"))
        total += sum(int(part.sum(dtype=np.uint64)) for part in chunks(bits))
    return f"{total % 2**64:016x}"


def chunks(flat: Any) -> Iterator[Any]:
    for start in range(0, flat.size, CHECK_CHUNK):
        yield flat[start : start + CHECK_CHUNK]
