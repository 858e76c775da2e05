"""Markdown tables of benchmark reports: `python -m ringslab.tools.bench.table FILE.json ...`.

Numbers in the documentation come from here, so that none is typed by hand.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .growth import exponents

HEADINGS = ("operation", "shape", "us", "min .. p90", "floor us", "x floor", "GB/s", "TFLOP/s")


def render(reports: Sequence[dict[str, Any]]) -> str:
    """Environment, rates and rows of reports, as Markdown."""
    return "\n\n".join(part for report in reports for part in _parts(report))


def _parts(report: dict[str, Any]) -> Iterable[str]:
    yield describe(report)
    yield rates_table(report)
    rows = report["rows"]
    with_peer = any(row.get("peer_us") for row in rows)
    with_kernel = any(row.get("kernel") not in (None, report["backend"]) for row in rows)
    with_steady = any("sustained_us" in row for row in rows)
    with_visited = any("visited_tflops" in row for row in rows)
    headings = [*HEADINGS]
    headings += ["TFLOP/s of tiles"] if with_visited else []
    headings += ["sustained us"] if with_steady else []
    headings += ["peer us", "peer / ours"] if with_peer else []
    headings += ["kernel"] if with_kernel else []
    timed = [row for row in rows if "error" not in row]
    lines = [[*_cells(row)] for row in timed]
    for line, row in zip(lines, timed, strict=True):
        line += [_number(row.get("visited_tflops"))] if with_visited else []
        line += [_number(row.get("sustained_us"))] if with_steady else []
        line += [_number(row.get("peer_us")), _ratio(row)] if with_peer else []
        line += [row.get("kernel") or ""] if with_kernel else []
    if lines:
        yield _table(headings, lines)
    if any("peers" in row for row in timed):
        yield peers_table(timed)
    grown = [
        f"- {op} ({_shape(others)}): time grows as tokens^{slope:.2f} over a factor of {ratio:.0f}"
        for op, others, ratio, slope in exponents(rows)
    ]
    if grown:
        yield "\n".join(grown)
    failed = [
        f"- {row['op']} ({_shape(row['shape'])}): {what}{row[key]}"
        for key, what in (("error", ""), ("peer_error", "peer: "))
        for row in rows
        if key in row
    ]
    if failed:
        yield "Failed:\n\n" + "\n".join(failed)


def describe(report: dict[str, Any]) -> str:
    """One line: device, driver, versions, commit, date, command."""
    where = report["environment"]
    gpu, versions = where.get("gpu") or {}, where["versions"]
    facts = [report["device"]]
    facts += [f"driver {gpu['driver_version']}"] if "driver_version" in gpu else []
    facts += [f"NVRTC {where['nvrtc']}"] if where.get("nvrtc") else []
    facts += [f"CuPy {versions['cupy-cuda13x']}"] if versions.get("cupy-cuda13x") else []
    facts += [f"SM clock {gpu['clocks.sm']} at the start"] if "clocks.sm" in gpu else []
    facts += [f"commit {where['commit']}"] if where.get("commit") else []
    return f"{', '.join(facts)}; {where['date']}; `{where['command']}`"


def rates_table(report: dict[str, Any]) -> str:
    """The ceilings of the run."""
    lines = [
        [
            f"copy of {report['copy_bytes']:,} B, read + written",
            _rate(report["copy_gbps"], "GB/s"),
            _rate(report["sustained_copy_gbps"], "GB/s"),
        ],
        [
            f"{report['matmul_dtype']} matrix product, {report['matmul_size']:,}^3",
            _rate(report["matmul_tflops"], "TFLOP/s"),
            _rate(report["sustained_matmul_tflops"], "TFLOP/s"),
        ],
    ]
    return _table(["ceiling", "burst", "sustained"], lines)


def peers_table(rows: Iterable[dict[str, Any]]) -> str:
    """Microseconds of ours beside each library that did the same work."""
    rows = [row for row in rows if "peers" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    lines = [
        [
            row["op"],
            _shape(row["shape"]),
            _number(row["median_us"]),
            *(_number(row["peers"].get(name)) for name in names),
        ]
        for row in rows
    ]
    return _table(["operation", "shape", "ours us", *(f"{name} us" for name in names)], lines)


def _rate(rate: float | None, unit: str) -> str:
    return "" if rate is None else f"{_number(rate)} {unit}"


def _cells(row: dict[str, Any]) -> Iterable[str]:
    yield row["op"]
    yield _shape(row["shape"])
    yield _number(row["median_us"])
    yield f"{_number(row['min_us'])} .. {_number(row['p90_us'])}"
    yield _number(row["floor_us"])
    yield f"{row['times_floor']:.2f}"
    yield _number(row["gbps"])
    yield _number(row["tflops"]) if row["flops"] else ""


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['peer_us'] / row['median_us']:.2f}" if row.get("peer_us") else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _shape(shape: dict[str, Any]) -> str:
    return ", ".join(
        f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}"
        for name, value in shape.items()
    )


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---" if i < 2 else "---:" for i in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *lines))


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("usage: python -m ringslab.tools.bench.table FILE.json ...", file=sys.stderr)
        return 2
    print(render([json.loads(Path(name).read_text()) for name in argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
