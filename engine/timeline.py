"""The timeline of one prefill chunk and one decode step: JSON of every operation's begin and end.

Times are those of events on the engine's stream (on the host, of the clock). A GPU's step is queued
whole before it begins, so no gap is the host's; an event between two operations costs the device
about a microsecond, which a captured step does not pay.
"""

import json
from pathlib import Path
from typing import Any

from .report import write_report
from .watch import TimedStep

SCHEMA_VERSION = 1


def write_timeline(engine: Any, path: str | Path) -> dict[str, Any]:
    """Writes and returns the timeline of a run: of each kind the timed step of the most tokens.

    Keys: schema_version, model, backend, device, steps; of a step: kind, num_seqs, num_tokens,
    step_us, busy_us (the sum over its operations), ops and shares; of an operation: name, layer,
    begin_us, end_us, counted from the step's beginning; of a share: name, calls, total_us, share of
    busy_us. Raises OSError where the file cannot be written.
    """
    watch = engine.tools.watch
    steps = []
    for kind in ("prefill", "decode"):
        of_kind = [step for step in watch.steps if step.kind == kind and step.end is not None]
        if of_kind:
            largest = max(of_kind, key=lambda step: step.num_tokens)
            steps.append(step_times(largest, watch.memory.elapsed_us))
    timeline = {
        "schema_version": SCHEMA_VERSION,
        "model": engine.cfg.name,
        "backend": engine.backend,
        "device": engine.memory.place,
        "steps": steps,
    }
    write_report(timeline, path)
    return timeline


def step_times(step: TimedStep, elapsed_us: Any) -> dict[str, Any]:
    """One step of a timeline; its events are done."""
    ops = [
        {
            "name": name,
            "layer": layer,
            "begin_us": round(elapsed_us(step.begin, before), 3),
            "end_us": round(elapsed_us(step.begin, after), 3),
        }
        for name, layer, before, after in step.ops
    ]
    totals: dict[str, list[float]] = {}
    for op in ops:
        totals.setdefault(op["name"], []).append(op["end_us"] - op["begin_us"])
    busy = sum(map(sum, totals.values()))
    shares = [
        {
            "name": name,
            "calls": len(times),
            "total_us": round(sum(times), 3),
            "share": round(sum(times) / busy, 4) if busy > 0 else 0.0,
        }
        for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "kind": step.kind,
        "num_seqs": step.num_seqs,
        "num_tokens": step.num_tokens,
        "step_us": round(elapsed_us(step.begin, step.end), 3),
        "busy_us": round(busy, 3),
        "shares": shares,
        "ops": ops,
    }


def read_timeline(path: str | Path) -> dict[str, Any]:
    """A timeline that `write_timeline` wrote. Raises OSError, ValueError for other JSON."""
    timeline = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(timeline, dict) or timeline.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path}: is no timeline of schema_version {SCHEMA_VERSION}")
    return timeline
