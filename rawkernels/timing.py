"""How long calls take: one struct of functions for the host, one for a GPU.

The host's is here; `device/timing.py` has the GPU's, so that CuPy loads only where it is used.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], None]


@dataclass(frozen=True)
class Replay:
    """`num_calls` calls that run one after the other, each time that `run` is called: a CUDA graph
    on a GPU. `kernels` names the kernels of one round, None where that cannot be told."""

    run: Call
    num_calls: int
    kernels: tuple[str, ...] | None


@dataclass(frozen=True)
class Stopwatch:
    """Timing of one backend. Everything runs in the current scope of its Memory.

    capture(calls)                   a Replay; each call runs once before, so that kernels are built
    time_us(run, repeats, flush)     microseconds of each of `repeats` rounds, after two more;
                                     `flush` writes 256 MB before each round, outside the time
    sustain_us(run, seconds, flush)  the same, round after round for some seconds, of the second
                                     half of that time
    host_us(call)                    host microseconds of one call that is queued, not waited for
    copy(dst, src)                   dst[...] = src, as fast as the machine's own copy is
    matmul(a, b, out)                out = a @ b for square matrices, by a library; None without one
    sync()                           wait for all that was queued
    release()                        give memory that is free back to the system
    stream                           address of the stream that all of it runs on, 0 on the host
    """

    capture: Callable[[Sequence[Call]], Replay]
    time_us: Callable[[Call, int, bool], list[float]]
    sustain_us: Callable[[Call, float, bool], list[float]]
    host_us: Callable[[Call], float]
    copy: Callable[[Any, Any], None]
    matmul: Callable[[Any, Any, Any], None] | None
    matmul_dtype: str
    sync: Call
    release: Call
    stream: int


def host_stopwatch() -> Stopwatch:
    """The host's stopwatch: calls are done when they return, caches are not flushed, and the matrix
    product is NumPy's of float32."""
    return Stopwatch(
        capture=_capture,
        time_us=lambda run, repeats, flush: _rounds(run, repeats)[2:],
        sustain_us=lambda run, seconds, flush: _sustain(run, seconds),
        host_us=lambda call: _rounds(call, 1)[-1],
        copy=np.copyto,
        matmul=lambda a, b, out: np.matmul(a, b, out=out),
        matmul_dtype="float32",
        sync=lambda: None,
        release=lambda: None,
        stream=0,
    )


def _capture(calls: Sequence[Call]) -> Replay:
    calls = tuple(calls)
    for call in calls:
        call()  # compiles

    def run() -> None:
        for call in calls:
            call()

    return Replay(run, len(calls), None)


def _rounds(run: Call, repeats: int) -> list[float]:
    """Two rounds to warm up, then `repeats`."""
    times = []
    for _ in range(2 + repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _sustain(run: Call, seconds: float) -> list[float]:
    times: list[float] = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + seconds:
        run()
        if now >= begin + seconds / 2:
            times.append((time.perf_counter() - now) * 1e6)
    return times or _rounds(run, 1)[2:]
