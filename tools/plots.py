"""A run's report as a picture: waiting and token times, slots over time, and what the prefix cache
gave. Needs matplotlib (`pip install 'ringslab[plot]'`)."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.output_files import write_whole
from ..layouts.errors import ArgumentError

SUFFIXES = (".png", ".svg", ".pdf")
TIMES = {
    "queue_s": "in the queue",
    "first_token_s": "to the first token",
    "per_token_s": "per output token",
}


def check_plot_path(path: str) -> None:
    """Raises ArgumentError for another kind of file, or where matplotlib is missing."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"--plot {path} but must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"a picture needs matplotlib ({error}); pip install 'ringslab[plot]'"
        ) from None


def save_figure(figure: Any, path: str | Path, **options: Any) -> None:
    """Writes a figure of matplotlib, in the format of the path's suffix. Raises OSError where it
    cannot be written; the file that was there stays then."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix.lower()[1:], **options)
    write_whole(path, picture.getvalue())


def write_plots(report: dict[str, Any], path: str) -> None:
    """Draws a report (docs/running.md) into one file, four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
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


def write_contracts(report: dict[str, Any], path: str) -> None:
    """Draws the side-by-side report of `ringslab prefix` into one file, four panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    rows = report["rows"]
    names = [row["contract"] for row in rows]
    panels[0, 0].bar(names, [row["seconds"] for row in rows])
    panels[0, 0].set_title("Seconds")
    panels[0, 1].bar(names, [row["computed_tokens"] for row in rows], label="computed")
    panels[0, 1].bar(names, [row["replayed_tokens"] for row in rows], label="replayed")
    panels[0, 1].set_title("Tokens")
    panels[0, 1].legend()
    panels[1, 0].bar(names, [row["hit_blocks"] for row in rows], label="hit")
    best = max(row["best_blocks"] or 0 for row in rows)
    panels[1, 0].axhline(best, color="0.6", linestyle=":", label="best possible on this trace")
    # The run without a cache counts in blocks of the trace, the others in those of the cache.
    panels[1, 0].set_title(f"Prompt blocks, of {rows[-1]['prompt_blocks']:,}")
    panels[1, 0].legend(loc="lower left")
    for offset, part in ((-0.2, "stored_layers"), (0.2, "rebuilt_layers")):
        largest = [row["difference"][part]["largest"] for row in rows]
        at = np.arange(len(rows)) + offset
        panels[1, 1].bar(at, largest, width=0.4, label=part.replace("_", " "))
    panels[1, 1].set_xticks(range(len(rows)), names)
    panels[1, 1].set_title(f"Largest difference of an output to {names[0]}")
    panels[1, 1].legend()
    for axes in panels.flat:
        axes.set_ylim(bottom=0)
    panels[1, 0].set_ylim(top=max(1, 1.1 * best))  # the line of the best, not on the frame
    figure.suptitle(f"{report['model']} on {report['backend']}: {report['requests']:,} requests")
    save_figure(figure, path)
