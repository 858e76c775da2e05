"""A run: replay a trace through the engine, and report.

Requests are submitted in the order of the trace, as slots become free or at their arrival times
(run_requests.py). What the model "says" is a pure function of seed, request and position
(`tokens.py`), so no output is needed to go on: on a GPU the host stays ahead and never waits
for results.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..layouts.errors import RequestError
from ..rawkernels.device.progress import progress_to
from ..schedules.batch import Batch
from .activation_source import ActivationSource
from .activations import open_source
from .decode_inputs import can_be_fixed
from .digests import DigestLog, combine, open_digests
from .ngram import NgramDrafts
from .progress import QUIET, Progress
from .report import engine_bytes, report_head
from .run_files import RunFiles
from .run_layers import DecodeGraphs, LayerRunner
from .run_options import check_run_options
from .run_prefix import prefix_of_run, prefix_report, settle_prefix
from .run_requests import Arrivals, RunRequest, load_requests
from .run_stats import RunStats, open_stats
from .samples import Watched, choose_samples, open_capture
from .tokens import TokenRules, decide_step, request_key
from .verify import verify_capture
from .watch import is_sampled

NOT_VERIFIED = {"checked": 0, "worst_error": None, "bound": None, "passed": None}


@dataclass
class RunState:
    """What the loop works on."""

    engine: Any
    requests: list[RunRequest]
    row_of: dict[str, int]  # request id to its place in `requests` and in the arrays
    keys: np.ndarray  # uint64 [num_requests]
    rules: TokenRules
    source: ActivationSource
    digests: DigestLog
    layers: LayerRunner
    stats: RunStats
    counters_before: dict[str, int]  # the scheduler's, at the start
    kind_steps: dict[str, int]
    arrivals: Arrivals
    ngrams: NgramDrafts | None


def run_trace(
    engine: Any,
    trace: Any = None,
    *,
    verify: bool = False,
    report_path: str | Path | None = None,
    timeline_path: str | Path | None = None,
    graphs: bool | None = None,
    progress: Callable[[int], Progress] | None = None,
    on_step: Callable[[Any, Batch], None] | None = None,
    watched: Watched | None = None,
) -> dict:
    """Runs a trace to its end and returns the report (docs: `run` keys), written to `report_path`
    as well where one is given.

    trace     a path, a list of `Request` or `TraceEntry`, or None for the configured trace
    verify    check `cfg.run.verify_samples` outputs against the reference afterwards
    timeline_path  where the times of one prefill and one decode step's operations go (timeline.py)
    graphs    decode steps are captured and replayed; None: on a GPU, where the activation source
              and `check_finite` allow it
    progress  makes a `Progress` from the number of requests
    watched   takes the outputs of some tokens, in place of a verification
    on_step   called after each commit with the engine and the batch; may preempt and abort

    Ctrl-C ends the run after the step at hand: the report then has `interrupted` true and counts
    what was done, and requests that were cut short are aborted. A second Ctrl-C raises
    KeyboardInterrupt, or skips the verification. Whatever a run raises, its requests end with it.
    Before anything runs: ArgumentError for an option of another kind, ConfigError where there is
    nothing to verify, OSError where the report cannot be written, TraceError for a bad trace,
    RequestError for a request that `submit` would refuse, ActivationError where a recorded source
    lacks something.
    At the end: ReportError, which has the report, where a file cannot be written any more.
    """
    if not engine.done:
        raise RequestError("run: the engine still has requests of its caller; finish them first")
    check_run_options(engine.cfg, verify, report_path, timeline_path, graphs, progress, on_step)
    requests = load_requests(engine.cfg, trace)
    with engine.memory.scope(), prefix_of_run(engine):
        state = _open_run(engine, requests, verify, graphs, watched)
        shown = QUIET if progress is None else progress(len(requests))
        with _interrupts() as interrupted:
            try:
                engine.fixed_decodes = state.layers.graphs is not None
                with progress_to(shown.say):  # kernel builds say so
                    _loop(state, interrupted, shown, on_step)
                state.stats.settle()
                state.digests.flush()
                settle_prefix(engine)
                report = _report(state, interrupted())
            finally:
                engine.fixed_decodes = False
                engine.abort_all()  # after Ctrl-C or a fault; else all have ended
                shown.stop()
            files = RunFiles(report_path, timeline_path)
            files.write_report(report)
            files.write_timeline(engine)
            if watched is not None:
                watched.take(state.layers.capture)
            elif verify:
                report["verify"] = _verify(state, interrupted())
                files.write_report(report)
    files.settle(report)
    return report


def _open_run(
    engine: Any,
    requests: list[RunRequest],
    verify: bool,
    graphs: bool | None,
    watched: Watched | None,
) -> RunState:
    cfg, memory = engine.cfg, engine.memory
    ids = [request.id for request in requests]
    lengths = [request.computed_len for request in requests]
    source = open_source(cfg, engine.tools.ops, memory, engine.sizes.max_tokens)
    last_drafts = [cfg.tokens_per_step > 1 and request.max_new_tokens > 1 for request in requests]
    source.check_lengths(ids, [sum(pair) for pair in zip(lengths, last_drafts, strict=True)])
    prompt_lens = [request.prompt_len for request in requests]
    choose = partial(choose_samples, cfg) if watched is None else partial(watched.samples, cfg)
    looked_at = verify or watched is not None
    samples = choose(ids, prompt_lens, lengths) if looked_at else []
    engine.tools.watch.steps.clear()
    digests = open_digests(engine.run_buffers().digests, lengths, memory)
    if graphs is None:
        graphs = engine.backend == "cuda"
    graphs = graphs and source.on_device and not engine.check_finite and can_be_fixed(cfg)
    if source.kind == "file":  # its arrays lie elsewhere in every run
        engine.step_graphs.clear()
    return RunState(
        engine=engine,
        requests=requests,
        row_of={request_id: row for row, request_id in enumerate(ids)},
        keys=np.array([request_key(request_id) for request_id in ids], np.uint64),
        rules=TokenRules(
            cfg.run.seed,
            cfg.vocab_size,
            cfg.run.accept_rate,
            cfg.tokens_per_step,
            cfg.run.repeat_rate,
        ),
        source=source,
        digests=digests,
        layers=LayerRunner(
            engine,
            source,
            digests,
            open_capture(
                samples,
                cfg,
                memory,
                max(lengths, default=0) + cfg.tokens_per_step,
                with_inputs=watched is None,
            ),
            DecodeGraphs(engine.step_graphs) if graphs else None,
        ),
        stats=open_stats(
            len(requests),
            memory,
            on_gpu=engine.backend == "cuda",
            live=cfg.run.trace.time_scale is not None,
        ),
        counters_before=asdict(engine.scheduler.counters),
        kind_steps={"prefill": 0, "decode": 0},
        arrivals=Arrivals(requests, cfg.run.trace.time_scale, cfg.engine.max_prefill_seqs),
        ngrams=NgramDrafts(cfg.tokens_per_step - 1) if cfg.run.drafts == "ngram" else None,
    )


def _loop(
    state: RunState,
    interrupted: Callable[[], bool],
    progress: Progress,
    on_step: Callable[[Any, Batch], None] | None,
) -> None:
    engine, stats = state.engine, state.stats
    computed = 0
    stats.begin()
    state.arrivals.begin(stats.start_s)
    while not interrupted():
        state.arrivals.submit(engine)
        batch = engine.next_batch()
        if batch is None:
            assert engine.done, "the scheduler has work but gives no batch"
            if state.arrivals.wait():
                continue
            break
        requests = np.array([state.row_of[id] for id in batch.request_ids], np.int64)
        stats.begin_step(batch, requests, engine.scheduler)
        sample = is_sampled(state.kind_steps[batch.kind])
        state.kind_steps[batch.kind] += 1
        with engine.tools.watch.ranges.span(f"step {batch.kind}", size=batch.num_tokens):
            state.layers.run(batch, sample=sample)
            _commit(state, batch, requests)
        computed += batch.num_tokens
        progress.update(stats.num_finished, computed)
        if on_step is not None:
            on_step(engine, batch)


def _commit(state: RunState, batch: Batch, requests: np.ndarray) -> None:
    """Accepts drafts, commits, and keeps the accounts."""
    stats, keys = state.stats, state.keys[requests]
    starts = batch.seqlens_k - batch.seqlens_q
    is_decode = batch.kind == "decode"
    width = max(state.rules.tokens_per_step - 1, 1)
    columns = batch.cu_seqlens_q[:-1, None] + 1 + np.arange(width)
    drafts = batch.token_ids[np.minimum(columns, batch.num_tokens - 1)]
    first = starts if is_decode else batch.seqlens_k - 1
    step = decide_step(state.rules, keys, first, batch.num_drafts, drafts)
    speaks = batch.is_last_chunk
    state.digests.keep(batch, requests, step.accepted + 1 if is_decode else batch.seqlens_q)
    proposed = step.drafts
    if state.ngrams is not None:
        prompts = [state.requests[row].prompt for row in requests.tolist()]
        proposed = state.ngrams.after(requests, speaks, prompts, step, drafts)
    state.engine.commit(
        batch,
        step.accepted,
        np.where(speaks, step.next_tokens, -1).astype(np.int32),
        np.where(speaks[:, None], proposed, -1).astype(np.int32),
    )
    limits = np.array([state.requests[row].max_new_tokens for row in requests.tolist()])
    before = stats.generated[requests]
    after = np.minimum(before + np.where(speaks, step.accepted + 1, 0), limits)
    stats.generated[requests] = after
    stats.drafted += int(batch.num_drafts.sum())
    stats.accepted += int(step.accepted.sum())
    finished = requests[speaks & (after == limits)]
    stats.end_step(batch, requests[(before == 0) & (after > 0)], finished)
    if state.ngrams is not None:
        state.ngrams.forget(finished)


def _report(state: RunState, interrupted: bool) -> dict:
    engine, stats = state.engine, state.stats
    cfg, sizes = engine.cfg, engine.sizes
    done = [(state.requests[row], row) for row in stats.finished().tolist()]
    digests = {request.id: state.digests.of(row) for request, row in done}
    counters = asdict(engine.scheduler.counters)
    return {
        **report_head(cfg, engine.backend, cfg.slot_layout),
        "interrupted": interrupted,
        "requests": len(done),
        "trace_requests": len(state.requests),
        "prompt_tokens": sum(request.prompt_len for request, _ in done),
        "output_tokens": int(stats.generated[stats.finished()].sum()),
        "num_state_slots": sizes.num_state_slots,
        "slab_bytes": sizes.slab_bytes,
        "memory_bytes": sizes.total_bytes,
        "bytes_per_sequence": engine_bytes(engine, stats.longest),
        "throughput": stats.throughput(),
        "latency": stats.latency(state.arrivals),
        "occupancy": stats.occupancy.as_report(),
        "batches": stats.batches(),
        "scheduler": {key: n - state.counters_before[key] for key, n in counters.items()},
        "kernels": engine.tools.watch.times(),
        "decode_graphs": None if state.layers.graphs is None else state.layers.graphs.as_report(),
        "verify": dict(NOT_VERIFIED),
        "prefix": prefix_report(engine, [r.prompt_len for r in state.requests]),
        "digest": combine(digests),
        "completed": [
            {
                "id": request.id,
                "prompt_tokens": request.prompt_len,
                "output_tokens": int(stats.generated[row]),
                "cached_tokens": int(stats.cached[row]),
                "digest": digests[request.id],
            }
            for request, row in done
        ],
        "times": [{"id": r.id} | stats.times(row, state.arrivals) for r, row in done],
    }


def _verify(state: RunState, interrupted: bool) -> dict:
    """Checks the captured samples. A Ctrl-C during it (the second, where the run was interrupted)
    leaves the run unverified."""
    engine = state.engine

    def tokens_of(request_id: str, count: int) -> np.ndarray:
        request = state.requests[state.row_of[request_id]]
        prompt = np.asarray(request.prompt(), np.int32)
        new = np.arange(request.prompt_len, max(count, request.prompt_len))
        said = state.rules.next_tokens(state.keys[state.row_of[request_id]], new)
        return np.concatenate([prompt, said])[:count]

    sinks = [None if sink is None else engine.memory.to_host(sink) for sink in engine.tools.sinks]
    try:
        verdict = verify_capture(
            engine.cfg, state.layers.capture, engine.memory, state.source, tokens_of, sinks
        )
    except KeyboardInterrupt:
        return dict(NOT_VERIFIED)
    if interrupted and verdict.checked == 0:
        return dict(NOT_VERIFIED)
    return verdict.as_report()


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that no step is cut in half; the next one raises
    KeyboardInterrupt. Outside the main thread signals stay as they are."""
    seen = [False]
    if threading.current_thread() is not threading.main_thread():
        yield lambda: seen[0]
        return

    def note(signum: int, frame: Any) -> None:
        if seen[0]:
            raise KeyboardInterrupt
        seen[0] = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen[0]
    finally:
        signal.signal(signal.SIGINT, before)
