"""What a run counts and times: batches, tokens, drafts, and the life of each request."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory
from ..schedules.batch import Batch
from .occupancy import Occupancy
from .report import percentiles

UNSET = -1.0  # a time that has not come yet


@dataclass
class KindStats:
    """Batches of one kind."""

    steps: int = 0
    tokens: int = 0
    sequences: int = 0
    largest_tokens: int = 0
    largest_sequences: int = 0
    step_s: list[float] = field(default_factory=list)

    def as_report(self) -> dict:
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "mean_tokens": self.tokens / self.steps if self.steps else None,
            "mean_sequences": self.sequences / self.steps if self.steps else None,
            "largest_tokens": self.largest_tokens,
            "largest_sequences": self.largest_sequences,
            "step_s": percentiles(self.step_s),
        }


@dataclass(frozen=True)
class StepEnd:
    """A step that was queued: what becomes true when its event is done."""

    event: Any
    kind: str
    first_tokens: np.ndarray  # requests whose first token it gives
    finished: np.ndarray  # requests that end with it


@dataclass
class RunStats:
    """Counts and times of a run; arrays have one element a request.

    On a GPU the host queues ahead of the device, so a step's end is known when its event is done,
    up to `lag` steps later.
    """

    memory: Memory
    lag: int
    admitted_s: np.ndarray
    first_token_s: np.ndarray
    finished_s: np.ndarray
    generated: np.ndarray
    cached: np.ndarray  # tokens of the prefix that each request had from the cache
    kinds: dict[str, KindStats]
    open_steps: deque = field(default_factory=deque)
    drafted: int = 0
    accepted: int = 0
    start_s: float = UNSET
    last_end_s: float = UNSET
    first_step_s: float = UNSET
    num_finished: int = 0
    occupancy: Occupancy = field(default_factory=Occupancy)
    longest: tuple[int, int] = (0, 0)  # tokens and blocks of the longest sequence so far

    def begin(self) -> None:
        self.start_s = self.last_end_s = time.perf_counter()

    def begin_step(self, batch: Batch, requests: np.ndarray, scheduler: Any) -> None:
        now = time.perf_counter()
        fresh = batch.is_first_chunk & (self.admitted_s[requests] == UNSET)
        self.admitted_s[requests[fresh]] = now
        self.cached[requests[fresh]] = batch.first_outputs[fresh]
        used = scheduler.limits.num_state_slots - scheduler.free_slots
        self.occupancy.note(now - self.start_s, used, scheduler.num_waiting)

    def end_step(self, batch: Batch, first_tokens: np.ndarray, finished: np.ndarray) -> None:
        """Notes a step that was queued, and times those that must be done by now."""
        kind = self.kinds[batch.kind]
        kind.steps += 1
        kind.tokens += batch.num_tokens
        kind.sequences += batch.num_seqs
        kind.largest_tokens = max(kind.largest_tokens, batch.num_tokens)
        kind.largest_sequences = max(kind.largest_sequences, batch.num_seqs)
        if batch.block_tables is not None:
            self._note_longest(batch)
        self.open_steps.append(StepEnd(self.memory.record(), batch.kind, first_tokens, finished))
        self.settle(self.lag)

    def _note_longest(self, batch: Batch) -> None:
        """Of the sequences whose known tokens end in the batch: the others hold blocks for more."""
        row = int(np.argmax(np.where(batch.is_last_chunk, batch.seqlens_k, -1)))
        tokens = int(batch.seqlens_k[row])
        if batch.is_last_chunk[row] and tokens > self.longest[0]:
            self.longest = (tokens, int(np.count_nonzero(batch.block_tables[row] >= 0)))

    def settle(self, lag: int = 0) -> None:
        """Waits until at most `lag` steps are open."""
        while len(self.open_steps) > lag:
            step = self.open_steps.popleft()
            self.memory.wait(step.event)
            now = time.perf_counter()
            self.kinds[step.kind].step_s.append(now - self.last_end_s)
            if self.first_step_s == UNSET:
                self.first_step_s = now - self.last_end_s
            self.last_end_s = now
            self.first_token_s[step.first_tokens] = now
            self.finished_s[step.finished] = now
            self.num_finished += len(step.finished)

    def finished(self) -> np.ndarray:
        """Requests that are done, in trace order."""
        return np.flatnonzero(self.finished_s != UNSET)

    def throughput(self) -> dict:
        seconds = self.last_end_s - self.start_s
        rate = 1.0 / seconds if seconds > 0 else 0.0
        computed = sum(kind.tokens for kind in self.kinds.values())
        output = int(self.generated.sum())
        return {
            "seconds": seconds,
            "first_step_s": None if self.first_step_s == UNSET else self.first_step_s,
            "computed_tokens": computed,
            "computed_tokens_per_s": computed * rate,
            "prefill_tokens_per_s": self.kinds["prefill"].tokens * rate,
            "output_tokens_per_s": output * rate,
            "requests_per_s": self.num_finished * rate,
        }

    def latency(self, arrivals: Any) -> dict:
        """Times of finished requests: to the first token, from token to token, to the end. Since
        their arrival where arrivals were waited for, with the time in the queue; else since their
        admission to a state slot."""
        done = self.finished()
        found = [self.times(row, arrivals) for row in done.tolist()]
        ends = [self.finished_s[row] - self._since(row, arrivals) for row in done.tolist()]
        return {
            "since": "admission" if arrivals.time_scale is None else "arrival",
            **{
                name: percentiles([times[name] for times in found if times[name] is not None])
                for name in ("queue_s", "first_token_s", "per_token_s")
            },
            "request_s": percentiles(ends),
        }

    def times(self, row: int, arrivals: Any) -> dict[str, float | None]:
        """Of one finished request, in seconds: in the queue, to its first token, and from token to
        token; None for what there was not."""
        since, first = self._since(row, arrivals), self.first_token_s[row]
        more = int(self.generated[row]) - 1
        waited = arrivals.time_scale is not None
        return {
            "queue_s": float(self.admitted_s[row] - since) if waited else None,
            "first_token_s": float(first - since) if first != UNSET else None,
            "per_token_s": float((self.finished_s[row] - first) / more) if more > 0 else None,
        }

    def _since(self, row: int, arrivals: Any) -> float:
        waited = arrivals.time_scale is not None
        return arrivals.arrived_s(row) if waited else float(self.admitted_s[row])

    def batches(self) -> dict:
        return {
            **{name: kind.as_report() for name, kind in self.kinds.items()},
            "drafted_tokens": self.drafted,
            "accepted_drafts": self.accepted,
        }


def open_stats(num_requests: int, memory: Memory, *, on_gpu: bool, live: bool) -> RunStats:
    """`live`: arrivals are waited for. The host then stays one step ahead, because a request that
    comes late is in no step that is queued; else two, so that the device never waits for the plans
    of a prefill while a short decode step runs."""
    ahead = 1 if live else 2
    return RunStats(
        memory=memory,
        lag=ahead if on_gpu else 0,
        admitted_s=np.full(num_requests, UNSET),
        first_token_s=np.full(num_requests, UNSET),
        finished_s=np.full(num_requests, UNSET),
        generated=np.zeros(num_requests, np.int64),
        cached=np.zeros(num_requests, np.int64),
        kinds={"prefill": KindStats(), "decode": KindStats()},
    )
