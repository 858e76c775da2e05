"""Bytes of one sequence against its context, as a picture. SVG is text, so nothing is needed to
draw it."""

import math
from pathlib import Path

from ...engine.output_files import write_whole
from ...layouts.budget import CacheShape, KvBytes, shape_bytes
from .svg import document, text

WIDTH, HEIGHT = 860, 520  # pixels
LEFT, RIGHT, TOP, BOTTOM = 90, 190, 50, 60
FIRST_CONTEXT = 128
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def lines_of(rows: list[KvBytes]) -> list[tuple[str, str, list[int]]]:
    """Label, colour and bytes of each line that is drawn."""
    lines = [
        ("all layers global", "#7f7f7f", [row.all_global_bytes for row in rows]),
        ("hybrid, formula", "#1f77b4", [row.hybrid_bytes for row in rows]),
        ("slot and pages, real", "#d62728", [row.real_bytes for row in rows]),
    ]
    if all(row.mxfp8_bytes is not None for row in rows):
        lines.append(("hybrid, MXFP8", "#2ca02c", [row.mxfp8_bytes for row in rows]))
    return lines


def draw_budget(shape: CacheShape, longest: int) -> str:
    """SVG text: both axes logarithmic to base 2, contexts from 128 to `longest`."""
    contexts = [FIRST_CONTEXT]
    while contexts[-1] < longest:
        contexts.append(min(2 * contexts[-1], longest))
    rows = [shape_bytes(shape, context) for context in contexts]
    lines = lines_of(rows)
    lowest = math.floor(math.log2(min(min(line[2]) for line in lines)))
    highest = math.ceil(math.log2(max(max(line[2]) for line in lines)))
    across = math.log2(contexts[-1] / contexts[0]) or 1.0

    def x_of(context: int) -> float:
        return LEFT + math.log2(context / contexts[0]) / across * (WIDTH - LEFT - RIGHT)

    def y_of(size: int) -> float:
        share = (math.log2(size) - lowest) / max(highest - lowest, 1)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    title = f"{shape.name}: bytes of one sequence, {shape.num_local} local and {shape.num_global} "
    parts = [text(LEFT, 26, title + "global layers", size=15)]
    for power in range(lowest, highest + 1, 2):
        y = y_of(2**power)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, _size(power), anchor="end"))
    for context in contexts[:: 2 if len(contexts) > 8 else 1]:
        x = x_of(context)
        parts.append(f'<path d="M{x:.1f} {HEIGHT - BOTTOM} v5" stroke="#333333"/>')
        parts.append(text(x, HEIGHT - BOTTOM + 20, f"{context:,}", anchor="middle"))
    parts.append(text(LEFT, HEIGHT - 14, "context in tokens"))
    label_ys: list[float] = []
    for label, colour, sizes in sorted(lines, key=lambda line: -line[2][-1]):
        points = " ".join(
            f"{x_of(context):.1f},{y_of(size):.1f}"
            for context, size in zip(contexts, sizes, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        y = max([y_of(sizes[-1]) + 4, *(above + 15 for above in label_ys)])  # labels do not touch
        label_ys.append(y)
        parts.append(text(WIDTH - RIGHT + 8, y, label, colour=colour))
    return document(WIDTH, HEIGHT, parts)


def write_plot(shape: CacheShape, path: str | Path, longest: int) -> None:
    """Raises OSError where the file cannot be written."""
    write_whole(path, draw_budget(shape, longest))


def _size(power: int) -> str:
    unit = min(max(power, 0) // 10, len(UNITS) - 1)  # whole thousands of 2
    return f"{2 ** (power - 10 * unit)} {UNITS[unit]}"
