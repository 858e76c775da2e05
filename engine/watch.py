"""NVTX ranges and sampled times around the operations of a step."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from ..rawkernels.memory import Memory
from .nvtx_ranges import Ranges

_OFF = nullcontext()
SAMPLED_STEPS = 8  # steps of each kind whose operations are timed
SAMPLE_EVERY = 16  # steps of a kind from one timed step to the next


@dataclass
class Watch:
    """What surrounds each operation: `with watch.op("ring_store", layer, tokens): ...`.

    Ranges where a profiler is attached; on a sampled step also a pair of events, read at the end of
    the run. Otherwise nothing, at the price of one call and two tests.
    """

    ranges: Ranges
    memory: Memory
    sampling: bool = False
    pairs: list = field(default_factory=list)  # (operation, event before, event after)

    def op(self, name: str, layer: int, size: int):
        if self.sampling:
            return self._timed(name, layer, size)
        if self.ranges.enabled:
            return self.ranges.span(name, layer, size)
        return _OFF

    @contextmanager
    def _timed(self, name: str, layer: int, size: int):
        before = self.memory.record()
        with self.ranges.span(name, layer, size):
            yield
        self.pairs.append((name, before, self.memory.record()))

    def sample_step(self, kind_step: int) -> None:
        """Decides whether the step to come, the `kind_step`-th of its kind, is timed. The first is
        not: it compiles."""
        turn, rest = divmod(kind_step - 1, SAMPLE_EVERY)
        self.sampling = kind_step >= 1 and rest == 0 and turn < SAMPLED_STEPS

    def times(self) -> dict[str, dict[str, float]]:
        """Of each operation: calls timed, median and longest microseconds. Call it once everything
        queued is done."""
        by_name: dict[str, list[float]] = {}
        for name, before, after in self.pairs:
            by_name.setdefault(name, []).append(self.memory.elapsed_us(before, after))
        return {
            name: {
                "calls_timed": len(times),
                "median_us": round(float(np.median(times)), 3),
                "max_us": round(float(np.max(times)), 3),
            }
            for name, times in sorted(by_name.items())
        }
