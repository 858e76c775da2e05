"""A whole decode step: `python -m ringslab.tools.bench.decode_step [--json]`.

Measures, for the first `layers` layers of a configuration and `sequences` sequences of
tokens_per_step tokens: activations by the hash, `ring_store`, `window_decode` and `digest_outputs`
of every layer, after the plans. Once captured in a CUDA graph, as a run does it, and once queued
call by call. Bound by bytes at many sequences (the queries and outputs are written and read
several times here, where a model would use them), by the latency of each kernel at few.

host_us is what the host is busy for, with the device idle before: for the graph the upload of the
inputs, the launch and the copy of the digests; call by call also the plans, which are then built on
the host. device_us is between two events around the step. A share is of the sum of the operations'
own times, each between two events, less what two events with nothing between them measure.
gap_us is what of device_us is left beside that sum, for each kernel: an estimate, because an event
itself keeps a kernel from starting, so it may come out a little low.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from ...engine.activations import open_source
from ...engine.backends import BACKEND_CHOICES, choose_backend
from ...engine.batches import build_batch
from ...engine.decode_inputs import StepArrays
from ...engine.digests import open_digests
from ...engine.engine import Engine
from ...engine.output_files import check_output_path, write_whole
from ...engine.run_layers import DecodeGraphs, LayerRunner
from ...engine.samples import open_capture
from ...engine.step import attend_layer
from ...engine.timeline import step_times
from ...layouts.config import Config, load_config
from ...layouts.errors import ArgumentError
from ...schedules.batch import HostBatch
from .common import BenchError, Place, open_place
from .inputs import fill_ring, random_sequences

DEFAULT_CONFIG, SMOKE_CONFIG = "deepseek_v4_1_flash.yaml", "quickstart.yaml"
SEQUENCES, SMOKE_SEQUENCES = (1, 64, 256, 512), (1, 3)
REPEATS, SMOKE_REPEATS = 21, 3
EVENT_PAIRS = 64
ACTIVATION_LAUNCHES = 2  # of keys and of queries


def main(argv: list[str] | None = None) -> int:
    """Prints a table, or the report as JSON. Raises BenchError where the two ways differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config")
    parser.add_argument("--sequences", help="list such as 1,64,256,512")
    parser.add_argument("--layers", help="list; default: the model's layers, then all of them")
    parser.add_argument("--backend", choices=BACKEND_CHOICES, default="auto")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="small shapes")
    parser.add_argument("--repeats", type=int, help=f"rounds (default: {REPEATS})")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", metavar="FILE.json")
    args = parser.parse_args(argv)
    if args.out:
        check_output_path(args.out)
    sequences = _counts(args.sequences) or (SMOKE_SEQUENCES if args.smoke else SEQUENCES)
    cfg = load_config(
        args.config or (SMOKE_CONFIG if args.smoke else DEFAULT_CONFIG),
        overrides=tuple(
            f"engine.{key}={value}"
            for key, value in (
                ("num_state_slots", max(sequences) + 3),  # random_sequences leaves three unused
                ("max_decode_seqs", max(sequences)),
                ("token_budget", 64),
            )
        ),
    )
    layers = _counts(args.layers) or tuple(dict.fromkeys((cfg.num_layers, len(cfg.layers))))
    if max(layers) > len(cfg.layers):
        raise ArgumentError(f"--layers: {max(layers)} but {cfg.path} has {len(cfg.layers)}")
    backend = choose_backend(args.backend, args.device)
    repeats = args.repeats or (SMOKE_REPEATS if args.smoke else REPEATS)
    report = measure_steps(cfg, backend, args.device, sequences, layers, repeats)
    text = json.dumps(report, indent=2, allow_nan=False)
    if args.out:
        write_whole(args.out, text + "\n")
    print(text if args.json else "\n".join(table(report)))
    return 0


def measure_steps(
    cfg: Config,
    backend: str,
    device: int,
    sequences: tuple[int, ...],
    layers: tuple[int, ...],
    repeats: int,
) -> dict[str, Any]:
    """The report: one row for each number of sequences and of layers."""
    rng = np.random.default_rng(0)
    rows = []
    with open_place(backend, device) as place, Engine(cfg, backend, device=device) as engine:
        fill_rings(place, engine, rng)
        runner = open_runner(engine)
        empty_us = empty_event_us(place)
        for count in sequences:
            batch = random_batch(cfg, count, rng)
            rows += [measure_step(place, runner, batch, n, repeats, empty_us) for n in layers]
    return {
        "schema_version": 1,
        "model": cfg.name,
        "backend": backend,
        "decode_bytes": engine.sizes.decode_bytes,
        "empty_event_us": round(empty_us, 3),
        "rows": rows,
    }


def measure_step(
    place: Place,
    runner: LayerRunner,
    batch: HostBatch,
    num_layers: int,
    repeats: int,
    empty_us: float,
) -> dict[str, Any]:
    """One row. Raises BenchError where a replayed step gives other digests than a called one."""
    engine = runner.engine
    inputs, memory = engine.decode_inputs(), place.memory
    step = inputs.upload(batch)
    runner.call_step(step, num_layers)  # builds kernels
    free = memory.free_bytes()[0]
    launch = memory.capture(lambda: runner.call_step(step, num_layers))
    graph_bytes = free - memory.free_bytes()[0]
    log = engine.run_buffers().digests[: batch.num_tokens]

    def replay() -> None:
        inputs.upload(batch)
        launch()
        memory.copy(log, step.digests)

    call = partial(call_by_call, runner, batch, num_layers)
    check_digests(place, log, replay, call)
    timed = timed_calls(place, runner, step, num_layers)
    device_us = place.watch.time_us(launch, repeats, True)
    called_us = place.watch.time_us(call, repeats, True)
    kernels = num_kernels(engine.cfg, num_layers, len(inputs.keys))
    busy = sum(op["end_us"] - op["begin_us"] - empty_us for op in timed["ops"])
    return {
        "layers": num_layers,
        "sequences": batch.num_seqs,
        "tokens": batch.num_tokens,
        "padded_tokens": step.size.num_tokens,
        "kernels": kernels,
        "host_us": round(median(host_times(place, replay, repeats)), 2),
        "device_us": round(median(device_us), 2),
        "device_min_us": round(min(device_us), 2),
        "called_host_us": round(median(host_times(place, call, repeats)), 2),
        "called_device_us": round(median(called_us), 2),
        "gap_us": round((median(device_us) - busy) / kernels, 3),
        "graph_bytes": graph_bytes,
        "shares": shares(timed["ops"], empty_us),
    }


def call_by_call(runner: LayerRunner, host: HostBatch, num_layers: int) -> None:
    """A step without a graph: plans on the host, one upload, every call queued by itself."""
    engine, size = runner.engine, host.num_tokens
    cfg, tools, buffers = engine.cfg, engine.tools, engine.run_buffers()
    batch = build_batch(cfg, host, tools.workspace.staging, engine.backend)
    q, kv, out = buffers.q[:size], buffers.kv[:size], buffers.out[:size]
    lse, log = tools.workspace.lse[:size], buffers.digests[:size]
    flat = out.reshape(size, cfg.num_q_heads * cfg.head_dim)
    engine.memory.zero(log)
    for layer in cfg.layers[:num_layers]:
        runner.source.fill(layer.id, batch, q, kv, out)
        attend_layer(tools, layer, batch, q, kv, out, lse)
        if layer.id < cfg.num_layers:
            tools.ops.digest_outputs(flat, layer.id, log)


def check_digests(
    place: Place, log: Any, replay: Callable[[], None], call: Callable[[], None]
) -> None:
    found = []
    for run in (call, replay, replay):
        place.memory.zero(log)
        run()
        found.append(place.memory.to_host(log))
    if not (found[0].any() and np.array_equal(found[0], found[1])):
        raise BenchError("decode_step: a replayed step gives other digests than a called one")
    if not np.array_equal(found[1], found[2]):
        raise BenchError("decode_step: two replays give different digests")


def timed_calls(
    place: Place, runner: LayerRunner, step: StepArrays, num_layers: int
) -> dict[str, Any]:
    """Every operation of a step between two events, queued whole before it begins."""
    watch = runner.engine.tools.watch
    watch.steps.clear()
    with watch.step("decode", step.size.num_seqs, step.size.num_tokens, sample=True):
        runner.call_step(step, num_layers)
    place.watch.sync()
    return step_times(watch.steps[-1], place.memory.elapsed_us)


def shares(ops: list[dict[str, Any]], empty_us: float) -> list[dict[str, Any]]:
    """Of each operation: calls, median microseconds, share of the sum over all."""
    times: dict[str, list[float]] = {}
    for op in ops:
        times.setdefault(op["name"], []).append(op["end_us"] - op["begin_us"] - empty_us)
    total = sum(map(sum, times.values()))
    return [
        {
            "name": name,
            "calls": len(each),
            "median_us": round(median(each), 3),
            "share": round(sum(each) / total, 4) if total > 0 else 0.0,
        }
        for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]


def host_times(place: Place, run: Callable[[], None], repeats: int) -> list[float]:
    """Host microseconds of `run`, each time with the device idle before it."""
    times = []
    for _ in range(2 + repeats):
        place.watch.sync()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    place.watch.sync()
    return times[2:]


def empty_event_us(place: Place) -> float:
    """What two events with nothing between them measure, once both are queued."""
    memory = place.memory
    release = memory.hold()
    events = [memory.record() for _ in range(EVENT_PAIRS + 1)]
    release()
    place.watch.sync()
    return median(memory.elapsed_us(a, b) for a, b in pairwise(events))


def num_kernels(cfg: Config, num_layers: int, num_plans: int) -> int:
    """Kernels of a step: plans; of each layer activations, ring_store, window_decode; and a digest
    where it is one of the model's own."""
    return num_plans + num_layers * (ACTIVATION_LAUNCHES + 2) + min(num_layers, cfg.num_layers)


def open_runner(engine: Engine) -> LayerRunner:
    memory = engine.memory
    source = open_source(engine.cfg, engine.tools.ops, memory, engine.sizes.max_tokens)
    digests = open_digests(engine.run_buffers().digests, [1], memory)
    capture = open_capture([], engine.cfg, memory)
    return LayerRunner(engine, source, digests, capture, DecodeGraphs())


def fill_rings(place: Place, engine: Engine, rng: np.random.Generator) -> None:
    """The same random records in the rings of all layers."""
    layout, slab, layers = engine.cfg.slot_layout, engine.slab, engine.cfg.layers
    done: dict[Any, int] = {}
    for layer in layers:
        shape = layer.ring_len, layer.record_format
        if shape not in done:
            fill_ring(place, slab, layout, layer, rng)
            done[shape] = layer.id
            continue
        pairs = zip(layout.planes(slab, layer.id), layout.planes(slab, done[shape]), strict=True)
        for target, source in pairs:
            target[...] = source


def random_batch(cfg: Config, num_seqs: int, rng: np.random.Generator) -> HostBatch:
    """A decode batch in which every sequence has all its drafts and a full window behind it."""
    chosen = random_sequences(num_seqs, cfg.tokens_per_step, rng)
    tokens = num_seqs * chosen.queries
    return HostBatch(
        step=0,
        kind="decode",
        request_ids=tuple(f"r{i}" for i in range(num_seqs)),
        slots=np.arange(num_seqs, dtype=np.int32),
        state_ids=chosen.state_ids,
        cu_seqlens_q=chosen.cu_seqlens_q,
        seqlens_k=(chosen.first + chosen.queries).astype(np.int32),
        is_last_chunk=np.ones(num_seqs, bool),
        token_ids=rng.integers(0, cfg.vocab_size, tokens).astype(np.int32),
        positions=chosen.positions,
        token_state_ids=chosen.token_state_ids,
        num_drafts=np.full(num_seqs, chosen.queries - 1, np.int32),
        start_positions=np.zeros(num_seqs, np.int32),
        swa_valid_start=np.zeros(num_seqs, np.int32),
        first_outputs=np.zeros(num_seqs, np.int32),
    )


def table(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['model']} on {report['backend']}: one decode step, microseconds",
        f"{'layers':>6} {'seqs':>5} {'tokens':>6} {'host':>8} {'device':>10} {'called host':>12} "
        f"{'called device':>14} {'gap':>6}  shares",
    ]
    for row in report["rows"]:
        parts = ", ".join(f"{one['name']} {100 * one['share']:.0f}%" for one in row["shares"])
        lines.append(
            f"{row['layers']:>6} {row['sequences']:>5} {row['tokens']:>6} {row['host_us']:>8.1f} "
            f"{row['device_us']:>10.1f} {row['called_host_us']:>12.1f} "
            f"{row['called_device_us']:>14.1f} {row['gap_us']:>6.2f}  {parts}"
        )
    return lines


def _counts(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ArgumentError(f"got {text!r} but must be a list of counts, such as 1,64,256")
    return counts


if __name__ == "__main__":
    sys.exit(main())
