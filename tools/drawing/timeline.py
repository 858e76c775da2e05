"""A timeline as a picture, for `ringslab run --timeline` and `ringslab plot`. SVG is text, so
nothing is needed to draw it.
"""

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ...engine.output_files import write_whole
from .svg import document, text

WIDTH, LABEL, LANE, GAP = 1200, 190, 20, 4  # pixels
PLOT = WIDTH - LABEL - 20
STEP_HEAD, STEP_FOOT = 64, 34
TICKS = 6
ZOOM_LAYERS = 2  # layers of the lower panel
# One colour an operation; the same in every picture.
COLOURS = {
    "plan_decode": "#7f7f7f",
    "seeded_activations": "#9ecae1",
    "stacked_activations": "#9ecae1",
    "file_activations": "#9ecae1",
    "ring_store": "#fdae6b",
    "window_decode": "#d62728",
    "load_history": "#c7a0d8",
    "encode_records": "#fdae6b",
    "window_prefill": "#d62728",
    "store_records": "#e6c029",
    "paged_store": "#fdae6b",
    "paged_load": "#c7a0d8",
    "paged_decode": "#8c2d04",
    "window_attention": "#8c2d04",
    "digest_outputs": "#a1d99b",
}


def draw_timeline(timeline: dict[str, Any]) -> str:
    """SVG text: of each step the whole of it, a lane an operation with its share, and below it the
    first two layers alone."""
    parts: list[str] = []
    height = 34
    for step in timeline["steps"]:
        height += _panel(parts, step, height, zoom=False)
        height += _panel(parts, step, height, zoom=True)
    place = f"{timeline['backend']} ({timeline['device']})"
    title = f"{timeline['model']} on {place}: operations of one step, by events"
    return document(WIDTH, height, [text(10, 22, title, size=15), *parts])


def write_picture(timeline: dict[str, Any], path: str | Path) -> None:
    """Raises OSError where the file cannot be written."""
    write_whole(path, draw_timeline(timeline))


def _panel(parts: list[str], step: dict[str, Any], top: int, *, zoom: bool) -> int:
    """Adds a panel at `top`; returns its height."""
    ops = step["ops"]
    if zoom:
        ops = [op for op in ops if op["layer"] < ZOOM_LAYERS]
    begin = min((op["begin_us"] for op in ops), default=0.0) if zoom else 0.0
    end = max((op["end_us"] for op in ops), default=1.0) if zoom else step["step_us"]
    span = max(end - begin, 1e-3)
    parts.append(text(10, top + 24, _headline(step, zoom=zoom), size=13))
    lanes = {share["name"]: i for i, share in enumerate(step["shares"])}
    first_lane = top + STEP_HEAD - 24
    for share in step["shares"]:
        y = first_lane + lanes[share["name"]] * (LANE + GAP)
        label = share["name"] if zoom else f"{share['name']}  {100 * share['share']:.1f}%"
        parts.append(text(LABEL - 8, y + 14, label, anchor="end"))
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{PLOT}" height="{LANE}" fill="#f4f4f4"/>')
    for op in ops:
        x = LABEL + (op["begin_us"] - begin) / span * PLOT
        width = max((op["end_us"] - op["begin_us"]) / span * PLOT, 0.4)
        y = first_lane + lanes[op["name"]] * (LANE + GAP)
        tip = f"{op['name']}, layer {op['layer']}: {op['end_us'] - op['begin_us']:.1f} us"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE}" '
            f'fill="{COLOURS.get(op["name"], "#555555")}"><title>{escape(tip)}</title></rect>'
        )
    bottom = first_lane + len(lanes) * (LANE + GAP)
    for i in range(TICKS + 1):
        x = LABEL + i * PLOT / TICKS
        at = begin + i * span / TICKS
        parts.append(f'<path d="M{x:.1f} {bottom} v5" stroke="#333333"/>')
        anchor = "end" if i == TICKS else "middle"
        parts.append(text(x, bottom + 18, f"{at:,.0f} us", anchor=anchor))
    return STEP_HEAD - 24 + len(lanes) * (LANE + GAP) + STEP_FOOT


def _headline(step: dict[str, Any], *, zoom: bool) -> str:
    if zoom:
        return f"the same, layers 0 .. {ZOOM_LAYERS - 1}"
    kind = "decode step" if step["kind"] == "decode" else "prefill chunk"
    between = step["step_us"] - step["busy_us"]
    return (
        f"{kind}: {step['num_seqs']} sequences, {step['num_tokens']} tokens, "
        f"{step['step_us']:,.0f} us, {between:,.0f} of them between its {len(step['ops'])} calls"
    )
