"""The requests of a run: a trace's, checked before anything runs, and when each is submitted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.errors import RequestError, TraceError
from ..schedules.batch import Request
from ..schedules.limits import check_request
from .run_options import trace_list
from .traces import TraceEntry, read_trace, synthetic_trace

NAP_S = 0.05  # the longest wait for an arrival between two looks at Ctrl-C


@dataclass(frozen=True)
class RunRequest:
    """A request of a run; `prompt()` makes its tokens, int32 [prompt_len]."""

    id: str
    prompt_len: int
    max_new_tokens: int
    arrival_s: float
    prompt: Callable[[], np.ndarray]
    hash_ids: tuple[int, ...] = ()  # keys of its blocks, where they are those of the prefix cache

    @property
    def computed_len(self) -> int:
        """Positions that every schedule computes. The last generated token is not among them: it is
        fed back only where it was a draft."""
        return self.prompt_len + max(self.max_new_tokens - 1, 0)


def load_requests(cfg: Config, trace: Any) -> list[RunRequest]:
    """The requests of a trace, checked against the limits of `cfg`.

    Raises TraceError for a bad trace and RequestError for a request that `submit` would refuse:
    longer than max_seq_len (with both numbers), an empty prompt, a token outside the vocabulary.
    """
    requests = [_run_request(cfg, item) for item in _trace_items(cfg, trace)]
    if len({request.id for request in requests}) != len(requests):
        raise RequestError("run: two requests of the trace have the same id")
    for request in requests:
        total = request.prompt_len + request.max_new_tokens
        if total > cfg.max_seq_len:
            raise RequestError(
                f"request {request.id!r}: prompt of {request.prompt_len} and max_new_tokens="
                f"{request.max_new_tokens} make {total} tokens but max_seq_len={cfg.max_seq_len}; "
                "cut prompts with run.trace.max_prompt_len, or raise max_seq_len"
            )
        if cfg.paged_layout and total > cfg.engine.num_blocks * cfg.paged_layout.block_size:
            raise RequestError(
                f"request {request.id!r}: {total} tokens are more than the paged pool of "
                f"{cfg.engine.num_blocks} blocks of {cfg.paged_layout.block_size} holds; raise "
                "engine.num_blocks"
            )
    return requests


def _trace_items(cfg: Config, trace: Any) -> list:
    limits = cfg.run.trace
    caps = {"num_requests": limits.num_requests, "max_prompt_len": limits.max_prompt_len}
    scaled = {**caps, "block_tokens": limits.hash_block_tokens}
    if isinstance(trace, (str, Path)):
        return read_trace(trace, **scaled)
    if trace is not None:
        return trace_list(trace)
    if limits.kind == "synthetic":
        return synthetic_trace(
            seed=cfg.run.seed,
            num_requests=limits.num_requests,
            prompt_len=limits.prompt_len,
            output_len=limits.output_len,
            max_prompt_len=limits.max_prompt_len,
        )
    if limits.path is None:
        raise TraceError(
            f"{cfg.path}: run.trace.kind is {limits.kind} but run.trace.path is null; give the "
            "file with --trace PATH"
        )
    return read_trace(limits.path, limits.kind, **scaled)


def _run_request(cfg: Config, item: Any) -> RunRequest:
    if isinstance(item, TraceEntry):
        seed, vocab = cfg.run.seed, cfg.vocab_size
        return RunRequest(
            item.id,
            item.prompt_len,
            item.max_new_tokens,
            item.arrival_s,
            lambda: item.prompt(seed=seed, vocab_size=vocab),
            item.hash_ids if _names_blocks(cfg, item.block_tokens) else (),
        )
    if not isinstance(item, Request):
        raise TraceError(f"run: {type(item).__name__} in the list; pass Request or TraceEntry")
    prompt = check_request(item, cfg.max_seq_len, cfg.vocab_size)
    return RunRequest(
        item.id,
        prompt.size,
        int(item.max_new_tokens),
        item.arrival_s,
        lambda: prompt,
        item.hash_ids,
    )


def _names_blocks(cfg: Config, block_tokens: int) -> bool:
    """Whether a trace's ids name the very blocks that the prefix cache has keys for."""
    return cfg.prefix is not None and cfg.prefix.block_size == block_tokens


@dataclass
class Arrivals:
    """Submits the requests of a run: where there is no time scale, in their order as slots become
    free; with one, each at its own time from the start of the run on.

    time_scale  seconds of the run for a second of the trace, or None
    most        requests that are kept waiting where there is no time scale: as many as one batch
                can admit, so that the schedule is as if all had been submitted and no prompt is
                made long before it is needed
    """

    requests: list[RunRequest]
    time_scale: float | None
    most: int
    submitted: int = 0
    start_s: float = 0.0

    def begin(self, now_s: float) -> None:
        self.start_s = now_s

    def arrived_s(self, row: int) -> float:
        """When a request arrives, on the clock of `time.perf_counter`; with a time scale only."""
        return self.start_s + self.requests[row].arrival_s * self.time_scale

    def submit(self, engine: Any) -> None:
        """Submits what is due."""
        while self.submitted < len(self.requests) and self._is_due(engine.scheduler):
            request = self.requests[self.submitted]
            engine.submit(
                Request(
                    request.id,
                    request.prompt(),
                    request.max_new_tokens,
                    request.arrival_s,
                    request.hash_ids,
                )
            )
            self.submitted += 1

    def wait(self) -> bool:
        """Waits a little for the next arrival; False where none is to come."""
        if self.submitted == len(self.requests):
            return False
        time.sleep(max(min(self.arrived_s(self.submitted) - time.perf_counter(), NAP_S), 0.0))
        return True

    def _is_due(self, scheduler: Any) -> bool:
        if self.time_scale is None:
            return scheduler.num_waiting < self.most
        return self.arrived_s(self.submitted) <= time.perf_counter()
