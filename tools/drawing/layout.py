"""`ringslab layout --svg`: a state slot, its rings, its records and a block of the paged pool, to
scale, as one SVG."""

import math
from pathlib import Path

from ...engine.output_files import write_whole
from ...layouts.config_types import Config, LayerConfig
from ...layouts.formats import RecordFormat
from ...layouts.rings import ring_index
from ...layouts.slots import Ring
from .svg import INK, PALE, box, document, text

WIDTH, LEFT, BAR = 1000, 30, 34  # pixels
ACROSS = WIDTH - 2 * LEFT
PARTS = ("stored", "not stored", "compression state")
COLOURS = dict(zip(PARTS, ("#1f77b4", "#9ecae1", "#fdae6b"), strict=True))
VALUES, SCALES = "#1f77b4", "#d62728"
WINDOW, STEP, SPARE, PINNED = "#1f77b4", "#d62728", "#eeeeee", "#2ca02c"
RADIUS, THICK = 105, 34
MAX_CELLS = 300  # a longer ring is drawn in runs, not in single records
MAX_RINGS = 3  # kinds of rings in one row


def part_of(ring: Ring) -> str:
    """Which of the three PARTS of a slot a ring lies in."""
    if ring.kind == "compression":
        return "compression state"
    return "stored" if ring.stored else "not stored"


def write_layout(config: Config, path: str | Path) -> None:
    """Raises OSError where the file cannot be written."""
    write_whole(path, draw_layout(config))


def draw_layout(config: Config) -> str:
    """SVG text. Boxes say their name, offset and size where the pointer rests on them."""
    title = f"{config.name}, version {config.version}"
    parts = [text(LEFT, 28, title, size=17)]
    top = 40.0
    for draw in (_slot, _rings, _records, _block):
        top = draw(config, parts, top)
    return document(WIDTH, top + 12, parts)


def _slot(config: Config, parts: list[str], top: float) -> float:
    """The slot as a bar of its rings. Returns where the next panel may begin, as all of these."""
    layout = config.slot_layout
    head = f"one state slot: {layout.slot_bytes:,} bytes, {len(layout.rings)} rings"
    parts.append(text(LEFT, top + 24, head, size=14))
    y = top + 36
    for ring in layout.rings:
        x = LEFT + ring.offset / layout.slot_bytes * ACROSS
        tip = f"{ring.name}: offset {ring.offset:,}, {ring.bytes:,} bytes, {part_of(ring)}"
        width = ring.bytes / layout.slot_bytes * ACROSS
        parts.append(box(x, y, width, BAR, COLOURS[part_of(ring)], tip))
        if width > 60:
            colour = "white" if ring.stored else INK
            parts.append(text(x + width / 2, y + 22, ring.name, anchor="middle", colour=colour))
    _ends(parts, y + BAR, layout.slot_bytes)
    if layout.stored_bytes:
        x = LEFT + layout.stored_bytes / layout.slot_bytes * ACROSS
        parts.append(f'<path d="M{x:.1f} {y + BAR} v6" stroke="{INK}"/>')
        words = f"stored up to {layout.stored_bytes:,}"
        parts.append(text(x - 4, y + BAR + 16, words, anchor="end"))
    shown = [part for part in PARTS if any(part_of(ring) == part for ring in layout.rings)]
    return _legend(parts, y + BAR + 40, [(COLOURS[part], part) for part in shown])


def _rings(config: Config, parts: list[str], top: float) -> float:
    """Each kind of ring, with the keys that a step of tokens_per_step tokens sees in it."""
    kinds: dict[tuple, LayerConfig] = {}
    for layer in config.layers:
        if layer.ring_len is not None:
            kinds.setdefault((layer.window, layer.ring_len, layer.sink_tokens), layer)
    shown = list(kinds.values())[:MAX_RINGS]
    if not shown:
        return top
    more = "" if len(shown) == len(kinds) else f", {len(shown)} of {len(kinds)} kinds"
    parts.append(text(LEFT, top + 24, f"the ring of a sequence in a layer{more}", size=14))
    y = top + 46 + RADIUS
    for number, layer in enumerate(shown):
        _ring(config, layer, parts, LEFT + 160 + number * 320, y)
    entries = [(WINDOW, "keys of the step's first query"), (STEP, "the step's tokens")]
    entries += [(PINNED, "pinned")] if any(layer.sink_tokens for layer in shown) else []
    return _legend(parts, y + RADIUS + 44, [*entries, (SPARE, "not read by this step")])


def _ring(config: Config, layer: LayerConfig, parts: list[str], x: float, y: float) -> None:
    """One ring, index 0 at the top and clockwise, in a step that wraps."""
    ring_len, sinks, drafts = layer.ring_len, layer.sink_tokens, config.tokens_per_step - 1
    first = 2 * ring_len + layer.window // 3  # any position past the first turn; this one wraps
    colours = dict.fromkeys(range(ring_len), SPARE)
    colours |= dict.fromkeys(range(sinks), PINNED)
    for position in range(first - layer.window + 1, first + drafts + 1):
        index = int(ring_index(position, ring_len, sinks))
        colours[index] = STEP if position >= first else WINDOW
    runs: list[list[int]] = []  # first index, index behind the last
    for index in range(ring_len):
        same = runs and colours[runs[-1][0]] == colours[index]
        if same and ring_len > MAX_CELLS:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    for start, end in runs:
        parts.append(_arc(x, y, start / ring_len, end / ring_len, colours[start], start))
    group = sum(one.ring_len == ring_len for one in config.layers)
    lines = [f"ring_len {ring_len:,}", f"window {layer.window:,}", f"step of {drafts + 1}"]
    for number, line in enumerate([*lines, f"{group} layers"]):
        parts.append(text(x, y - 18 + 17 * number, line, anchor="middle"))
    at = int(ring_index(first, ring_len, sinks))
    words = f"position {first:,} at ring index {at:,}"
    parts.append(text(x, y + RADIUS + 18, words, anchor="middle"))


def _arc(x: float, y: float, start: float, end: float, fill: str, index: int) -> str:
    """A piece of a ring between two shares of its turn."""
    end = min(end, start + 0.9999)  # a whole turn would begin where it ends, and vanish
    points = []
    for radius, share in (
        (RADIUS, start),
        (RADIUS, end),
        (RADIUS - THICK, end),
        (RADIUS - THICK, start),
    ):
        angle = 2 * math.pi * share
        points.append(f"{x + radius * math.sin(angle):.2f} {y - radius * math.cos(angle):.2f}")
    large = int(end - start > 0.5)
    inner = RADIUS - THICK
    return (
        f'<path d="M{points[0]} A{RADIUS} {RADIUS} 0 {large} 1 {points[1]} L{points[2]} '
        f'A{inner} {inner} 0 {large} 0 {points[3]} Z" fill="{fill}" stroke="white" '
        f'stroke-width="0.5"><title>from ring index {index}</title></path>'
    )


def _records(config: Config, parts: list[str], top: float) -> float:
    for record_format in config.record_formats:
        head = f"record {record_format.id}: {record_format.record_bytes:,} bytes, one token"
        parts.append(text(LEFT, top + 24, head, size=14))
        fields = [(f.id, f.type, f.offset, f.bytes) for f in record_format.fields]
        top = _fields(parts, top + 36, fields, record_format.record_bytes)
        if record_format.plane_order == "planar":
            top = _planes(config, record_format, parts, top)
    return top


def _planes(config: Config, record_format: RecordFormat, parts: list[str], top: float) -> float:
    lengths = {ring.ring_len for ring in config.slot_layout.rings if ring.record_format is not None}
    for ring_len in sorted(lengths):
        size = ring_len * record_format.record_bytes
        split = ring_len * record_format.value_bytes
        parts.append(text(LEFT, top + 20, f"planar ring of {ring_len}: {size:,} bytes", size=14))
        planes = [("values of all records", "e4m3", 0, split)]
        planes.append(("scales of all records", "e8m0", split, size - split))
        top = _fields(parts, top + 30, planes, size)
    return top


def _fields(
    parts: list[str], y: float, fields: list[tuple[str, str, int, int]], size: int
) -> float:
    """A bar of fields (id, type, offset, bytes) of `size` bytes."""
    foot = 8
    for name, kind, offset, length in fields:
        x, width = LEFT + offset / size * ACROSS, length / size * ACROSS
        tip = f"{name}: {kind}, offset {offset:,}, {length:,} bytes"
        parts.append(box(x, y, width, BAR, SCALES if kind == "e8m0" else VALUES, tip))
        words = f"{name} {kind}, {length:,} B at {offset:,}"
        if width > 8 * len(words):
            parts.append(text(x + width / 2, y + 22, words, anchor="middle", colour="white"))
        else:  # under the bar, ending where the field does
            parts.append(text(x + width, y + BAR + 16, words, anchor="end"))
            foot = 24
    return y + BAR + foot


def _block(config: Config, parts: list[str], top: float) -> float:
    paged = config.paged_layout
    if paged is None:
        return top
    head = (
        f"one block of the paged pool: {paged.block_bytes:,} bytes, {paged.block_size} tokens of "
        f"{len(paged.layers)} global layers"
    )
    parts.append(text(LEFT, top + 24, head, size=14))
    y = top + 36
    for part in paged.layers:
        size = paged.layer_bytes(part.layer)
        x = LEFT + part.offset / paged.block_bytes * ACROSS
        width = size / paged.block_bytes * ACROSS
        tip = f"layer{part.layer}_global: offset {part.offset:,}, {size:,} bytes"
        parts.append(box(x, y, width, BAR, COLOURS["stored"], tip))
        if width > 40:
            words = f"layer {part.layer}"
            parts.append(text(x + width / 2, y + 22, words, anchor="middle", colour="white"))
    _ends(parts, y + BAR, paged.block_bytes)
    return y + BAR + 24


def _ends(parts: list[str], y: float, size: int) -> None:
    """The scale under a bar: its first byte and its size."""
    parts.append(f'<path d="M{LEFT} {y} v6 M{LEFT + ACROSS} {y} v6" stroke="{INK}"/>')
    parts.append(text(LEFT, y + 16, "0"))
    parts.append(text(LEFT + ACROSS, y + 16, f"{size:,}", anchor="end"))


def _legend(parts: list[str], y: float, entries: list[tuple[str, str]]) -> float:
    x = float(LEFT)
    for colour, words in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 11:.0f}" width="12" height="12" fill="{colour}" '
            f'stroke="{PALE}"/>'
        )
        parts.append(text(x + 18, y, words))
        x += 36 + 7 * len(words)
    return y + 10
