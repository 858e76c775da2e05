"""A picture of a benchmark report: time against batch or length."""

from typing import Any

from ...layouts.errors import ArgumentError
from .figure import new_figure, save_figure

LENGTH_AXES = ("sequences", "tokens", "rows")  # the one with most values is drawn along x
COLUMNS = 2
PANEL_INCHES = (6.4, 4.2)


def save_plot(report: dict[str, Any], path: str) -> None:
    """One panel an operation, both axes logarithmic: medians with their spread, and their floors
    as dashed lines. Raises ArgumentError where no row has a time."""
    panels = panels_of(report["rows"])
    if not panels:
        raise ArgumentError("bench: --plot has nothing to draw: no row has a time")
    height = -(-len(panels) // COLUMNS)  # rounded up
    width = min(len(panels), COLUMNS)
    figure = new_figure(PANEL_INCHES[0] * width, PANEL_INCHES[1] * height)
    grid = figure.subplots(height, width, squeeze=False)
    for axes, (op, (axis, lines)) in zip(grid.flat, panels.items(), strict=False):
        for label, rows in lines.items():
            x = [row["shape"][axis] for row in rows]
            y = [row["median_us"] for row in rows]
            low = [max(row["median_us"] - row["min_us"], 0.0) for row in rows]
            high = [max(row["p90_us"] - row["median_us"], 0.0) for row in rows]
            bars = axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, label=label)
            color = bars.lines[0].get_color()
            axes.plot(x, [row["floor_us"] for row in rows], linestyle="--", color=color)
        axes.set(title=op, xlabel=axis, ylabel="us", xscale="log", yscale="log")
        ticks = sorted({row["shape"][axis] for rows in lines.values() for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        if any(lines):
            axes.legend(fontsize="small")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(f"{report['device']}: medians, min to p90; dashed: floor")
    save_figure(figure, path, dpi=150)


def panels_of(rows: list[dict[str, Any]]) -> dict[str, tuple[str, dict[str, list]]]:
    """For each operation its x axis and, by the other axes' values, its rows along it."""
    panels: dict[str, tuple[str, dict[str, list]]] = {}
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op and row["median_us"] is not None]
        if not mine:
            continue
        axis = max(
            (name for name in mine[0]["shape"] if name in LENGTH_AXES),
            key=lambda name: len({row["shape"][name] for row in mine}),
        )
        lines: dict[str, list] = {}
        for row in sorted(mine, key=lambda row: row["shape"][axis]):
            others = (f"{k} {v}" for k, v in row["shape"].items() if k != axis)
            lines.setdefault(", ".join(others), []).append(row)
        panels[op] = (axis, lines)
    return panels
