"""`ringslab bench`: time every operation beside the floor that bytes and FLOPs set."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.backends import BACKEND_CHOICES, choose_backend
from ..engine.output_files import check_output_path, check_separate_files, write_whole
from ..layouts.config import load_config
from ..layouts.errors import ArgumentError
from .bench.runs import AXES, OPERATIONS, REPEATS, SMOKE_REPEATS, Wish, run_benches
from .command import attempt, keep_report, raise_faults
from .drawing.bench import save_plot
from .drawing.figure import check_plot_path

DESCRIPTION = """Checks each operation against the reference, then times it: median and spread, GB/s
and TFLOP/s from counted bytes and FLOPs, and the floor from the copy and matrix rates measured in
the same run. Status 1 where a result is wrong."""
EXAMPLE = """ringslab bench --smoke --backend cpu
ringslab bench window_decode --sequences 64,128 --out decode.json"""
DEFAULT_CONFIG, SMOKE_CONFIG = "deepseek_v4_1_flash.yaml", "quickstart.yaml"
# Axes of words; the other axes are counts, and a window may be "none" as well.
WORD_AXES = {
    "rule": ("ceil", "floor"),
    "dtype": ("float32", "bf16"),
    "layer": ("mistral", "gpt_oss", "gemma2", "gemma3"),
}
_FAULTS = {"error", "peer_error"}
EXIT_FAILED = 1  # a result was wrong, or an operation could not run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ops", metavar="OP", nargs="*", help="an operation's name (default: all)")
    parser.add_argument("--config", metavar="YAML", help=f"sizes (default: {DEFAULT_CONFIG})")
    shape = parser.add_argument_group("shapes: lists such as 64,128, in place of the defaults")
    for axis in AXES:
        shape.add_argument(f"--{axis}", metavar="LIST", help=_AXIS_HELP[axis])
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--out", metavar="FILE.json", help="write the report to a file")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time against the last axis")
    parser.add_argument(
        "--smoke", action="store_true", help=f"one small shape each, sizes of {SMOKE_CONFIG}"
    )
    parser.add_argument(
        "--peers", action="store_true", help="time PyTorch by hand beside ours (needs torch)"
    )
    parser.add_argument(
        "--sustained", action="store_true", help="also time each shape under two seconds of load"
    )
    backends = [name for name in BACKEND_CHOICES if name != "reference"]
    parser.add_argument("--backend", choices=backends, default="auto", help="default: auto")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU")
    parser.add_argument(
        "--kernel", metavar="NAME", help="this variant of the kernel, as portable, for all shapes"
    )
    parser.add_argument("--commit", help="to record where there is no git, as in a copied tree")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"rounds (default: {REPEATS})")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")


_AXIS_HELP = {
    "heads": "query heads",
    "queries": "query tokens of a sequence",
    "sequences": "sequences of a batch",
    "tokens": "tokens of a batch",
    "rows": "rows of the codec",
    "rule": "scale rules: ceil, floor",
    "dtype": "results of dequantize_mxfp8: float32, bf16",
    "layer": "heads of window_attention: mistral, gpt_oss, gemma2, gemma3",
    "window": "keys that a query of window_attention sees; none: all before it",
}


def run(args: argparse.Namespace) -> int:
    """0 when every row has its times, 1 when one is wrong or could not run. Raises ReportError,
    after the table, where a file could not be written."""
    wish = _wish(args)
    cfg = load_config(args.config or (SMOKE_CONFIG if args.smoke else DEFAULT_CONFIG))
    if args.config and not args.smoke:
        wish = replace(wish, axes=_axes_of_config(cfg) | wish.axes)
    backend = choose_backend(args.backend, args.device)
    check_separate_files("bench", {"CONFIG": args.config, "--out": args.out, "--plot": args.plot})
    if args.plot:
        check_plot_path(args.plot)
        _check_output(args.plot)
    if args.peers:
        _require_peers(backend)
    faults: list[str] = []
    save = _saver(args.out, faults)
    report = run_benches(backend, args.device, cfg, wish, _tell, save)
    if faults:
        faults.append(keep_report(report, args.out, printed=args.json))
    if args.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        from .bench.table import render

        print(render([report]))
    if args.plot:
        attempt(faults, save_plot, report, args.plot)
    raise_faults(faults, report)
    return EXIT_FAILED if any(_FAULTS & row.keys() for row in report["rows"]) else 0


def _wish(args: argparse.Namespace) -> Wish:
    for op in args.ops:
        if op not in OPERATIONS:
            raise ArgumentError(
                f"bench: there is no operation {op!r}; there are: {', '.join(OPERATIONS)}"
            )
    repeats = args.repeats
    if repeats is None:
        repeats = SMOKE_REPEATS if args.smoke else REPEATS
    if repeats < 1:
        raise ArgumentError(f"bench: --repeats {repeats} but must be at least 1")
    return Wish(
        ops=tuple(args.ops) or OPERATIONS,
        axes={axis: _values(axis, getattr(args, axis)) for axis in AXES if getattr(args, axis)},
        smoke=args.smoke,
        peers=args.peers,
        sustained=args.sustained,
        repeats=repeats,
        seed=args.seed,
        kernel=args.kernel,
        commit=args.commit,
    )


def _values(axis: str, text: str) -> tuple:
    words = tuple(word.strip() for word in text.split(","))
    if axis in WORD_AXES:
        known = WORD_AXES[axis]
        wrong = [word for word in words if word not in known]
        if wrong:
            raise ArgumentError(f"bench: --{axis} {wrong[0]!r} but must be {' or '.join(known)}")
        return words
    if axis == "window" and "none" in words:
        others = ",".join(word for word in words if word != "none")
        return (*(_values(axis, others) if others else ()), "none")
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        raise ArgumentError(f"bench: --{axis} {text!r} but must be counts, as 64,128") from None
    if min(numbers) < 1:
        raise ArgumentError(f"bench: --{axis} {text!r} but each must be at least 1")
    return numbers


def _axes_of_config(cfg: Any) -> dict[str, tuple]:
    """Axes whose values a configuration states, in place of the defaults."""
    return {"heads": (cfg.num_q_heads,), "queries": (1, cfg.tokens_per_step)}


def _require_peers(backend: str) -> None:
    from .bench.peers import load_torch

    if backend != "cuda":
        raise ArgumentError(f"bench: --peers needs a GPU, but the backend is {backend}")
    if load_torch() is None:
        raise ArgumentError("bench: --peers needs PyTorch with CUDA; it is not installed here")


def _saver(out: str | None, faults: list[str]) -> Any:
    """Writes a report to the file `out`, whole or not at all; does nothing without one. Where that
    fails, the rows that are still to come are measured all the same: `faults` holds the last
    writing's fault."""
    if out is None:
        return lambda report: None
    _check_output(out)

    def save(report: dict[str, Any]) -> None:
        faults.clear()
        text = json.dumps(report, indent=1, allow_nan=False)
        attempt(faults, write_whole, out, text + "\n")

    return save


def _check_output(path: str) -> None:
    """Raises OSError where a file cannot be written; makes the folders that it is to lie in."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    check_output_path(path)


def _tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
