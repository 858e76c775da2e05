"""`ringslab plot REPORT.json`: the picture of a report, whichever command wrote it."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.output_files import check_output_path, check_separate_files
from ..layouts.errors import ArgumentError
from .drawing.figure import SUFFIXES, check_plot_path

DESCRIPTION = """Draws what a command reported as JSON. Needs matplotlib (pip install
'ringslab[plot]'), but for timelines."""
EXAMPLE = """ringslab run quickstart.yaml --report run.json
ringslab plot run.json --out run.png"""


@dataclass(frozen=True)
class Kind:
    """One kind of report: the keys that tell it, what wrote it, and what draws it.

    Some other key of `keys` missing means a report of another version. A timeline is drawn as text,
    so it needs no matplotlib and is SVG only.
    """

    name: str
    keys: frozenset[str]
    command: str
    draw: Callable[[dict[str, Any], str], None]
    suffixes: tuple[str, ...] = SUFFIXES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "report",
        metavar="REPORT.json",
        help="from run --report, run --timeline, bench --out or prefix --report",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the picture: .svg (default: beside the report), .png or .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    """Draws the report and says where. Raises ArgumentError for a file that is no report of ours or
    another kind of picture, and where matplotlib is missing; OSError for files that cannot be read
    or written."""
    report = read_report(args.report)
    kind = kind_of(report, args.report)
    out = Path(args.out) if args.out else Path(args.report).with_suffix(".svg")
    if out.suffix.lower() not in kind.suffixes:
        raise ArgumentError(
            f"plot: --out {out} but the picture of a {kind.name} report must end in "
            f"{', '.join(kind.suffixes)}"
        )
    check_separate_files("plot", {"REPORT": args.report, "--out": out})
    check_output_path(out)
    if kind.suffixes == SUFFIXES:
        check_plot_path(str(out))
    kind.draw(report, str(out))
    if args.json:
        print(json.dumps({"report": args.report, "kind": kind.name, "picture": str(out)}))
    else:
        print(f"{kind.name}: {out}")
    return 0


def read_report(path: str) -> dict[str, Any]:
    """The JSON object in a file. ArgumentError where there is none, OSError where it cannot be
    read."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ArgumentError(f"plot: {path} is no JSON: {error}") from None
    if not isinstance(report, dict):
        raise ArgumentError(f"plot: {path} holds no JSON object, so it is no report")
    return report


def kind_of(report: dict[str, Any], path: str) -> Kind:
    """The kind whose keys a report has all. Raises ArgumentError where there is none."""
    for kind in _kinds():
        if kind.keys <= report.keys() and (kind.name != "prefix" or _has_contracts(report)):
            return kind
    known = "; ".join(f"{kind.name} ({kind.command})" for kind in _kinds())
    raise ArgumentError(f"plot: {path} is no report that can be drawn; there are: {known}")


def _has_contracts(report: dict[str, Any]) -> bool:
    rows = report["rows"]
    return bool(rows) and all("contract" in row and "difference" in row for row in rows)


def _kinds() -> tuple[Kind, ...]:
    from .drawing.bench import save_plot
    from .drawing.prefix import write_contracts
    from .drawing.run import write_plots
    from .drawing.timeline import write_picture

    return (
        Kind(
            "run",
            frozenset({"completed", "occupancy", "latency", "prefix", "throughput", "slab_bytes"}),
            "ringslab run --report",
            write_plots,
        ),
        Kind(
            "timeline",
            frozenset({"steps", "model", "device"}),
            "ringslab run --timeline",
            write_picture,
            (".svg",),
        ),
        Kind("bench", frozenset({"rows", "copy_gbps"}), "ringslab bench --out", save_plot),
        Kind(
            "prefix",
            frozenset({"rows", "requests", "model"}),
            "ringslab prefix --report",
            write_contracts,
        ),
    )
