"""NVTX ranges and sampled times around the operations of a step."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory
from .nvtx_ranges import Ranges

_OFF = nullcontext()
SAMPLED_STEPS = 8  # steps of each kind whose operations are timed
SAMPLE_EVERY = 16  # steps of a kind from one timed step to the next


@dataclass
class TimedStep:
    """A step whose operations were timed. ops: (name, layer, event before, event after), in the
    order in which they were queued."""

    kind: str
    num_seqs: int
    num_tokens: int
    begin: Any = None
    end: Any = None
    ops: list[tuple[str, int, Any, Any]] = field(default_factory=list)


@dataclass
class Watch:
    """What surrounds each operation: `with watch.op("ring_store", layer, tokens): ...`.

    Ranges where a profiler is attached; on a sampled step also a pair of events, read at the end of
    the run. Otherwise nothing, at the price of one call and two tests.
    """

    ranges: Ranges
    memory: Memory
    sampling: bool = False
    steps: list[TimedStep] = field(default_factory=list)

    def op(self, name: str, layer: int, size: int):
        if self.sampling:
            return self._timed(name, layer, size)
        if self.ranges.enabled:
            return self.ranges.span(name, layer, size)
        return _OFF

    @contextmanager
    def _timed(self, name: str, layer: int, size: int) -> Iterator[None]:
        before = self.memory.record()
        with self.ranges.span(name, layer, size):
            yield
        self.steps[-1].ops.append((name, layer, before, self.memory.record()))

    @contextmanager
    def step(self, kind: str, num_seqs: int, num_tokens: int, *, sample: bool) -> Iterator[None]:
        """Around the operations of a step; they are timed where `sample`. A GPU then begins when
        all of them are queued, so that no time between two events is the host's."""
        if not sample:
            yield
            return
        timed = TimedStep(kind, num_seqs, num_tokens)
        self.steps.append(timed)
        self.sampling = True
        release = self.memory.hold()
        try:
            with self.ranges.span(f"timed {kind}"):  # a name without numbers, for --nvtx-capture
                timed.begin = self.memory.record()
                yield
                timed.end = self.memory.record()
        finally:
            release()
            self.sampling = False

    def times(self) -> dict[str, dict[str, float]]:
        """Of each operation: calls timed, median and longest microseconds. Call it once everything
        queued is done."""
        by_name: dict[str, list[float]] = {}
        for step in self.steps:
            for name, _, before, after in step.ops:
                by_name.setdefault(name, []).append(self.memory.elapsed_us(before, after))
        return {
            name: {
                "calls_timed": len(times),
                "median_us": round(float(np.median(times)), 3),
                "max_us": round(float(np.max(times)), 3),
            }
            for name, times in sorted(by_name.items())
        }


def is_sampled(kind_step: int) -> bool:
    """Whether the `kind_step`-th step of its kind is timed. The first is not: it compiles."""
    turn, rest = divmod(kind_step - 1, SAMPLE_EVERY)
    return kind_step >= 1 and rest == 0 and turn < SAMPLED_STEPS
