"""A run's report as a picture: waiting and token times, slots over time, and what the prefix cache
gave."""

from typing import Any

import numpy as np

from .figure import new_figure, save_figure

TIMES = {
    "queue_s": "in the queue",
    "first_token_s": "to the first token",
    "per_token_s": "per output token",
}


def write_plots(report: dict[str, Any], path: str) -> None:
    """Draws a report (docs/running.md) into one file, four panels."""
    figure = new_figure(12, 8)
    panels = figure.subplots(2, 2)
    _draw_times(panels[0, 0], report)
    _draw_occupancy(panels[0, 1], report)
    _draw_hits(panels[1, 0], report)
    _draw_bytes(panels[1, 1], report)
    figure.suptitle(
        f"{report['model']} on {report['backend']}: {report['requests']} requests, "
        f"{report['throughput']['computed_tokens']:,} tokens computed in "
        f"{report['throughput']['seconds']:.1f} s"
    )
    save_figure(figure, path)


def _draw_times(axes: Any, report: dict[str, Any]) -> None:
    """The share of requests that took at most so long."""
    for name, label in TIMES.items():
        times = np.sort([r[name] for r in report["times"] if r[name] is not None])
        times = times[times > 0]  # the axis is logarithmic
        if times.size:
            axes.step(times, np.arange(1, times.size + 1) / times.size, where="post", label=label)
    axes.set_xscale("log")
    axes.set_xlabel(f"seconds since {report['latency']['since']}")
    axes.set_ylabel("share of requests")
    axes.set_title("Latency")
    if axes.lines:
        axes.legend()


def _draw_occupancy(axes: Any, report: dict[str, Any]) -> None:
    points = report["occupancy"]
    axes.step(points["time_s"], points["slots"], where="post", label="state slots in use")
    axes.step(points["time_s"], points["waiting"], where="post", label="requests waiting")
    axes.axhline(report["num_state_slots"], color="0.6", linestyle=":", label="state slots")
    axes.set_xlabel("seconds")
    axes.set_title("State slots over time")
    axes.legend()


def _draw_hits(axes: Any, report: dict[str, Any]) -> None:
    """Prompt tokens and those of them that came from the cache, request by request."""
    done = sorted(report["completed"], key=lambda r: r["id"])
    prompts = np.cumsum([r["prompt_tokens"] for r in done])
    cached = np.cumsum([r["cached_tokens"] for r in done])
    axes.plot(prompts, label="prompt tokens")
    axes.plot(cached, label="from the prefix cache")
    prefix = report["prefix"]
    if "best_blocks" in prefix:
        best = prefix["best_blocks"] * prefix["block_size"]
        axes.axhline(best, color="0.6", linestyle=":", label="best possible on this trace")
    axes.set_xlabel("requests, in the order of the trace")
    axes.set_ylabel("tokens, added up")
    axes.set_title("Prefix cache")
    axes.legend()


def _draw_bytes(axes: Any, report: dict[str, Any]) -> None:
    store = report["prefix"].get("store", {})
    kinds = report["prefix"].get("kinds", {})
    bars = {
        "to the store": store.get("bytes_in", 0),
        "from the store": store.get("bytes_out", 0),
        "kept at the end": sum(kind["bytes"] for kind in kinds.values()),
        "slab": report["slab_bytes"],
    }
    axes.barh(list(bars), [count / 1e6 for count in bars.values()])
    axes.invert_yaxis()
    axes.set_xlabel("MB")
    axes.set_title("Bytes")
