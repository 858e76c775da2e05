"""`ringslab run CONFIG`: replay a request trace through prefill and decode steps."""

import argparse
import json
import sys
from pathlib import Path

from ..engine.backends import BACKEND_CHOICES, check_device_number, choose_backend
from ..engine.engine import Engine
from ..engine.output_files import check_output_path, check_separate_files
from ..engine.progress import open_progress
from ..engine.timeline import read_timeline
from ..engine.workspace import engine_sizes
from ..layouts.config import load_config
from ..layouts.errors import ReportError
from .command import add_overrides, attempt, keep_report, raise_faults
from .drawing.figure import check_plot_path
from .drawing.run import write_plots
from .drawing.timeline import write_picture
from .main import EXIT_INTERRUPTED

DESCRIPTION = "Replay a request trace. Ctrl-C ends it after the step at hand, with a report."
EXAMPLE = """ringslab run quickstart.yaml --verify
ringslab run quickstart.yaml --set run.trace.num_requests=50 --report run.json"""
EXIT_FAILED = 1  # the verification found an output outside its bound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a packaged one's name")
    parser.add_argument(
        "--trace", metavar="PATH", help="a .jsonl (Mooncake) or .csv (Azure) file to replay"
    )
    add_overrides(parser, "run.seed=3")
    parser.add_argument(
        "--verify", action="store_true", help="check sampled outputs against float64 afterwards"
    )
    parser.add_argument(
        "--backend", choices=BACKEND_CHOICES, default="auto", help="where to run (default: auto)"
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU")
    parser.add_argument("--report", metavar="PATH", help="write the JSON report to a file")
    parser.add_argument("--json", action="store_true", help="print the JSON report on stdout")
    parser.add_argument(
        "--timeline",
        metavar="FILE.json",
        help="write the times of one decode step's and one prefill chunk's operations, and a "
        "picture of them beside it (.svg)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw latencies, slots over time and the prefix cache (.png, .svg or .pdf; needs "
        "matplotlib)",
    )
    parser.add_argument(
        "--no-graphs",
        action="store_true",
        help="queue decode steps call by call instead of replaying captured ones",
    )
    parser.add_argument(
        "--check-finite",
        action="store_true",
        help="refuse NaN and infinite queries and keys (reads them back: slow)",
    )


def run(args: argparse.Namespace) -> int:
    """0 when the trace ran (and was verified, if asked), 1 when an output was outside its bound,
    130 after Ctrl-C. Raises ReportError, after the summary, where a file could not be written."""
    picture = None if args.timeline is None else picture_path(args.timeline)
    check_files(args, picture)
    cfg = load_config(args.config, overrides=tuple(args.overrides))
    backend = choose_backend(args.backend, check_device_number(args.device))
    sizes = engine_sizes(cfg, on_gpu=backend == "cuda")
    _say(f"{cfg.name}: takes {sizes.describe()}")
    with Engine(cfg, backend, device=args.device, check_finite=args.check_finite) as engine:
        hint = "; kernels compile at first use" if engine.backend == "cpu" else ""
        _say(f"backend {engine.backend} on {engine.memory.place}{hint}")
        report, faults, missing = _replay(engine, args)
    if args.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print("\n".join(summary(report)))
    if args.plot is not None:
        attempt(faults, write_plots, report, args.plot)
    if picture is not None and args.timeline not in missing:
        attempt(faults, _draw_timeline, args.timeline, picture)
    raise_faults(faults, report)
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if args.verify and report["verify"]["passed"] is not True else 0


def _replay(engine: Engine, args: argparse.Namespace) -> tuple[dict, list[str], tuple]:
    """The report of the run, what could not be written, and which files those are."""
    try:
        report = engine.run(
            args.trace,
            verify=args.verify,
            report_path=args.report,
            timeline_path=args.timeline,
            graphs=False if args.no_graphs else None,
            progress=open_progress,
        )
    except ReportError as error:
        faults = [str(error)]
        if args.report in error.paths:
            faults.append(keep_report(error.report, args.report, printed=args.json))
        return error.report, faults, error.paths
    return report, [], ()


def _draw_timeline(timeline: str, picture: Path) -> None:
    write_picture(read_timeline(timeline), picture)


def picture_path(timeline: str) -> Path:
    """Where the picture of a timeline goes: beside it."""
    return Path(timeline).with_suffix(".svg") if Path(timeline).name else Path(timeline)


def check_files(args: argparse.Namespace, picture: Path | None) -> None:
    """Raises ArgumentError where a file would be written over another, or over what the run reads,
    OSError where one cannot be written; before anything runs."""
    files = {
        "CONFIG": args.config,
        "--trace": args.trace,
        "--report": args.report,
        "--timeline": args.timeline,
        "the picture of --timeline": picture,
        "--plot": args.plot,
    }
    check_separate_files("run", files)
    if args.plot is not None:
        check_plot_path(args.plot)
    for path in (picture, args.plot):
        if path is not None:
            check_output_path(path)


def summary(report: dict) -> list[str]:
    """A report in a few lines; the last says what was verified."""
    rate, batches = report["throughput"], report["batches"]
    drafted, accepted = batches["drafted_tokens"], batches["accepted_drafts"]
    stopped = ", interrupted" if report["interrupted"] else ""
    return [
        f"{report['requests']} of {report['trace_requests']} requests{stopped}: "
        f"{report['prompt_tokens']:,} prompt and {report['output_tokens']:,} output tokens in "
        f"{rate['seconds']:.2f} s ({rate['computed_tokens_per_s']:,.0f} computed tokens/s)",
        f"batches: {batches['prefill']['steps']} prefill, {batches['decode']['steps']} decode; "
        f"drafts accepted: {accepted:,} of {drafted:,}",
        *_prefix_lines(report["prefix"]),
        f"bytes a sequence: {report['bytes_per_sequence']['measured']:,} measured, "
        f"{report['bytes_per_sequence']['formula']:,} by formula",
        f"digest {report['digest']}",
        _verdict_line(report["verify"]),
    ]


def _prefix_lines(prefix: dict) -> list[str]:
    """One line where there was a prefix cache."""
    if "contract" not in prefix:
        return []
    store = prefix["store"]
    return [
        f"prefix cache, {prefix['contract']}: {prefix['hit_blocks']:,} of "
        f"{prefix['prompt_blocks']:,} prompt blocks hit ({prefix['best_blocks']:,} at best), "
        f"{prefix['replayed_tokens']:,} tokens replayed; {store['bytes_in']:,} B to the store, "
        f"{store['bytes_out']:,} B from it"
    ]


def _verdict_line(verify: dict) -> str:
    if verify["passed"] is None:
        return "not verified"
    if verify["checked"] == 0:
        return "verify: FAILED, no sampled output was computed"
    worst, worst_lse = (
        "not finite where the reference is" if error is None else f"{error:.3e}"
        for error in (verify["worst_error"], verify["worst_lse_error"])
    )
    share = verify["worst_fraction"]
    percent = "" if share is None else f" ({100 * share:.0f}% of it)"
    word = "passed" if verify["passed"] else "FAILED"
    return (
        f"verify: {word}, {verify['checked']} outputs against float64 over their whole history; "
        f"worst error {worst}, bound {verify['bound']:.3e}{percent}; "
        f"log-sum-exp {worst_lse}, bound {verify['lse_bound']:.3e}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
