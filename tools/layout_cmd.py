"""`ringslab layout CONFIG`: every byte of a state slot (and of a block of the paged pool), as a
table, a picture or JSON."""

import argparse
import json
import shutil
from typing import Any

from ..engine.output_files import check_separate_files
from ..layouts.config import load_config
from ..layouts.config_types import Config, LayerConfig
from ..layouts.formats import RecordFormat
from ..layouts.slots import Ring
from .command import add_overrides
from .drawing.layout import PARTS, part_of, write_layout

DESCRIPTION = """Print every ring of a state slot with its offset and size, the layers of a block of
the paged pool, and the fields of each record."""
EXAMPLE = "ringslab layout deepseek_v4_1_flash.yaml --svg slot.svg"
MIN_COLUMNS = 100  # the table needs this much; a narrower terminal wraps its lines
PICTURE_CELLS = 86
PART_MARKS = "█▒░"
ASCII_PART_MARKS = "#=."  # for a terminal or pipe that is not UTF-8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or a packaged name such as quickstart.yaml")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    add_overrides(parser, "engine.num_state_slots=8")
    parser.add_argument(
        "--svg", metavar="FILE.svg", help="draw the slot, its rings and its records into a file"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the layout, and draws it where asked. Raises ConfigError for a file that is wrong,
    ArgumentError for a picture in its place, OSError where the picture cannot be written."""
    check_separate_files("layout", {"CONFIG": args.config, "--svg": args.svg})
    config = load_config(args.config, tuple(args.overrides))
    if args.svg is not None:
        write_layout(config, args.svg)
    if args.json:
        print(json.dumps(layout_dict(config), indent=2))
    else:
        print_layout(config)
    return 0


def layout_dict(config: Config) -> dict[str, Any]:
    """What `--json` prints; all sizes and offsets in bytes from the slot's start."""
    layout = config.slot_layout
    return {
        "name": config.name,
        "version": config.version,
        "slot_bytes": layout.slot_bytes,
        "stored_bytes": layout.stored_bytes,
        "align_bytes": layout.align_bytes,
        "num_state_slots": config.engine.num_state_slots,
        "slab_bytes": config.engine.num_state_slots * layout.slot_bytes,
        "record_formats": [record_dict(record_format) for record_format in config.record_formats],
        "rings": [ring_dict(ring, config.layers[ring.layer]) for ring in layout.rings],
        "paged": paged_dict(config),
    }


def paged_dict(config: Config) -> dict[str, Any] | None:
    """The paged pool; offsets in bytes from a block's start. None where no layer is global."""
    paged = config.paged_layout
    if paged is None:
        return None
    return {
        "block_size": paged.block_size,
        "block_bytes": paged.block_bytes,
        "num_blocks": config.engine.num_blocks,
        "pool_bytes": config.engine.num_blocks * paged.block_bytes,
        "layers": [
            {
                "layer": part.layer,
                "record_format": part.record_format.id,
                "record_bytes": part.record_bytes,
                "offset": part.offset,
                "bytes": paged.layer_bytes(part.layer),
            }
            for part in paged.layers
        ],
    }


def record_dict(record_format: RecordFormat) -> dict[str, Any]:
    return {
        "id": record_format.id,
        "type": record_format.type,
        "plane_order": record_format.plane_order,
        "scale_rounding": record_format.scale_rounding,
        "amax_floor": record_format.amax_floor,
        "record_bytes": record_format.record_bytes,
        "fields": [
            {
                "id": field.id,
                "type": field.type,
                "shape": list(field.shape),
                "offset": field.offset,
                "bytes": field.bytes,
                "doc": field.doc,
            }
            for field in record_format.fields
        ],
    }


def ring_dict(ring: Ring, layer: LayerConfig) -> dict[str, Any]:
    is_window = ring.record_format is not None
    planar = is_window and ring.record_format.plane_order == "planar"
    return {
        "name": ring.name,
        "layer": ring.layer,
        "kind": ring.kind,
        "role": layer.role,
        "window": layer.window if is_window else None,
        "sink_tokens": ring.sink_tokens,
        "ring_len": ring.ring_len,
        "record_format": ring.record_format.id if is_window else None,
        "record_bytes": ring.record_bytes,
        "offset": ring.offset,
        "bytes": ring.bytes,
        "padding": ring.bytes - ring.used_bytes,
        "scale_plane_offset": ring.ring_len * ring.record_format.value_bytes if planar else None,
        "stored": ring.stored,
    }


def print_layout(config: Config) -> None:
    """The table of rings, the picture of the slot, and the picture of each record."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    columns = max(shutil.get_terminal_size((MIN_COLUMNS, 24)).columns, MIN_COLUMNS)
    console = Console(width=columns, highlight=False)
    title = f"{config.name}, version {config.version}: the bytes of one state slot"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("ring", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for name in ("window", "ring_len", "record", "offset", "bytes", "padding"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stored")
    previous = None
    for ring in config.slot_layout.rings:
        if previous is not None and part_of(previous) != part_of(ring):
            table.add_section()
        row = ring_dict(ring, config.layers[ring.layer])
        window = "" if row["window"] is None else str(row["window"])
        numbers = [f"{row[k]:,}" for k in ("ring_len", "record_bytes", "offset", "bytes")]
        stored = "yes" if ring.stored else "no"
        table.add_row(ring.name, row["role"], window, *numbers, f"{row['padding']:,}", stored)
        previous = ring
    console.print(table)
    marks = PART_MARKS if "utf" in console.encoding.lower() else ASCII_PART_MARKS
    pool = [] if config.paged_layout is None else ["", *pool_picture(config)]
    for line in [*slot_picture(config, marks), *pool, "", *record_pictures(config)]:
        console.print(line, markup=False, soft_wrap=True)


def slot_picture(config: Config, marks: str) -> list[str]:
    """A bar of the slot's bytes, its parts with their sizes, and the totals; `marks` has one
    character for each of the PARTS."""
    layout = config.slot_layout
    sizes, counts = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for ring in layout.rings:
        sizes[part_of(ring)] += ring.bytes
        counts[part_of(ring)] += 1
    bar, end, drawn = "", 0, 0
    for name, mark in zip(PARTS, marks, strict=True):
        end += sizes[name]
        cells = round(PICTURE_CELLS * end / layout.slot_bytes) - drawn
        cells = max(cells, 1) if sizes[name] else 0  # a small part is still seen
        bar += mark * cells
        drawn += cells
    lines = [f"0 |{bar}| {layout.slot_bytes:,}"]
    start = 0
    for name, mark in zip(PARTS, marks, strict=True):
        end = start + sizes[name]
        what = f"{counts[name]} rings" if counts[name] != 1 else "1 ring"
        lines.append(f"  {mark} {name}: {what}, {sizes[name]:,} bytes, {start:,} .. {end:,}")
        start = end
    slots = config.engine.num_state_slots
    slab_bytes = slots * layout.slot_bytes
    return [
        *lines,
        f"stored_bytes {layout.stored_bytes:,}",
        f"slot_bytes {layout.slot_bytes:,} (align_bytes {layout.align_bytes})",
        f"slab: {slots:,} state slots x {layout.slot_bytes:,} = {slab_bytes:,} bytes",
    ]


def pool_picture(config: Config) -> list[str]:
    """The layers of a block of the paged pool with their offsets, a line each, and the totals."""
    paged, num_blocks = config.paged_layout, config.engine.num_blocks
    size, block_bytes = paged.block_size, paged.block_bytes
    lines = [
        f"  {part.offset:>12,} | layer{part.layer}_global: {size} records of {part.record_bytes:,}"
        for part in paged.layers
    ]
    return [
        f"one block of the paged pool: {size} tokens of {len(lines)} global layers",
        *lines,
        f"  {block_bytes:>12,} block_bytes (align_bytes {paged.align_bytes})",
        f"pool: {num_blocks:,} blocks x {block_bytes:,} = {num_blocks * block_bytes:,} bytes, "
        f"{num_blocks * size:,} tokens",
    ]


def record_pictures(config: Config) -> list[str]:
    """Each record format: its fields with offsets and, where planar, the planes of a ring."""
    lines = []
    for record_format in config.record_formats:
        rule = ""
        if record_format.scale_rounding is not None:
            rule = f", scale_rounding {record_format.scale_rounding}"
            rule += f", amax_floor {record_format.amax_floor:g}"
        lines.append(
            f"record {record_format.id}: {record_format.record_bytes} bytes, "
            f"{record_format.plane_order}{rule}"
        )
        cells = [
            f"{field.offset} | {field.id} {field.type} {list(field.shape)} "
            for field in record_format.fields
        ]
        lines.append(f"  {''.join(f'{cell}| ' for cell in cells)}{record_format.record_bytes}")
        if record_format.plane_order == "planar":
            for ring_len in sorted({layer.ring_len for layer in config.layers if layer.ring_len}):
                values = ring_len * record_format.value_bytes
                end = ring_len * record_format.record_bytes
                lines.append(
                    f"  ring of {ring_len}: 0 | {ring_len} x {record_format.value_bytes} values "
                    f"| {values:,} | {ring_len} x {record_format.scale_bytes} scales | {end:,}"
                )
    return lines
