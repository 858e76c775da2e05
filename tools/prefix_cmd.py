"""`ringslab prefix CONFIG`: one trace without a prefix cache and under each of its contracts, side
by side: what was computed, what it cost, and how far the outputs differ. `--overhead`: what taking
snapshots costs a run that never uses one.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ..engine.backends import BACKEND_CHOICES
from ..engine.engine import Engine
from ..engine.output_files import check_output_path, check_separate_files
from ..engine.progress import open_progress
from ..engine.report import write_report
from ..engine.samples import Watched
from ..layouts.config import Config, load_config
from ..layouts.errors import ArgumentError, ConfigError
from .command import add_overrides, attempt, keep_report, raise_faults

DESCRIPTION = """Run one trace without a prefix cache and under each of its contracts: what was
computed, what it cost, and how far the outputs differ."""
EXAMPLE = "ringslab prefix quickstart.yaml --contracts none,full --set run.trace.num_requests=8"
WARM_REQUESTS = 8
CONTRACTS = ("none", "full", "exact", "bounded")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or a packaged one's name")
    parser.add_argument("--trace", metavar="PATH", help="a .jsonl or .csv file to replay")
    add_overrides(parser, "prefix.block_size=64")
    parser.add_argument(
        "--contracts", default=",".join(CONTRACTS), help="which, separated by commas; none is first"
    )
    parser.add_argument(
        "--watch", type=int, default=512, metavar="N", help="outputs that are compared"
    )
    parser.add_argument(
        "--overhead",
        type=int,
        metavar="N",
        help="instead run the trace N times without and with a cache that nothing hits, in turns",
    )
    parser.add_argument("--backend", choices=BACKEND_CHOICES, default="auto")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--report", metavar="PATH", help="write the JSON to a file as well")


def run(args: argparse.Namespace) -> int:
    """Prints a table. Raises ConfigError for a configuration that is wrong, ArgumentError for a
    contract that there is none of or that the model cannot have and for a count below what makes
    sense, KeyboardInterrupt where Ctrl-C ended a run: its numbers compare with nothing;
    ReportError, after the table, where the report could not be written."""
    contracts = [word.strip() for word in args.contracts.split(",")]
    if set(contracts) - set(CONTRACTS) or len(contracts) < 2:
        raise ArgumentError(
            f"--contracts {args.contracts} but must name two or more of {', '.join(CONTRACTS)}"
        )
    if args.watch < 0:
        raise ArgumentError(f"--watch {args.watch} but must be 0 or more")
    if args.overhead is not None and (args.overhead < 1 or contracts[-1] == "none"):
        raise ArgumentError(
            f"--overhead {args.overhead} --contracts {args.contracts} but must be 1 or more, and "
            "the last contract one that takes snapshots"
        )
    files = {"CONFIG": args.config, "--trace": args.trace, "--report": args.report}
    check_separate_files("prefix", files)
    if args.report:
        check_output_path(args.report)
    if args.overhead is not None:
        found = overhead(args, load_contracts(args, ["none", contracts[-1]]))
    else:
        found = side_by_side(args, load_contracts(args, contracts))
    faults: list[str] = []
    if args.report:
        attempt(faults, write_report, found, args.report)
    if faults:
        faults.append(keep_report(found, args.report, printed=args.json))
    print(json.dumps(found, indent=2) if args.json else "\n".join(table(found)))
    raise_faults(faults, found)
    return 0


def load_contracts(args: argparse.Namespace, contracts: list[str]) -> list[tuple[str, Config]]:
    """Each contract with the configuration under it. All are loaded before the first one runs:
    raises ConfigError where the file is wrong, ArgumentError where only some contracts suit the
    model, with those that do."""
    found: dict[str, Config] = {}
    refused: dict[str, ConfigError] = {}
    for contract in dict.fromkeys([*contracts, *CONTRACTS]):
        try:
            found[contract] = _load(args, contract)
        except ConfigError as error:
            refused[contract] = error
    wrong = [contract for contract in contracts if contract in refused]
    if not wrong:
        return [(contract, found[contract]) for contract in contracts]
    suitable = [contract for contract in CONTRACTS if contract in found]
    if len(suitable) < 2:  # the fault is not the contract's
        raise refused[wrong[0]]
    raise ArgumentError(
        f"prefix: {args.config} cannot run under {' or '.join(wrong)} ({refused[wrong[0]]}); "
        f"take --contracts {','.join(suitable)}"
    )


def _load(args: argparse.Namespace, contract: str, *more: str) -> Config:
    return load_config(args.config, (*args.overrides, f"prefix.contract={contract}", *more))


@contextlib.contextmanager
def open_engine(args: argparse.Namespace, cfg: Config) -> Iterator[Engine]:
    """An engine whose cache begins empty, whatever its store holds: one contract could hit what
    another one or an earlier comparison stored. What it stored is taken out again."""
    with Engine(cfg, args.backend, device=args.device) as engine:
        if engine.prefix is not None:
            engine.prefix.set_aside()
        yield engine
        if engine.prefix is not None:
            engine.prefix.clear()


def replay(engine: Engine, args: argparse.Namespace, watched: Watched | None = None) -> dict:
    """The report of one whole run."""
    report = engine.run(args.trace, watched=watched, progress=open_progress)
    if report["interrupted"]:
        raise KeyboardInterrupt
    return report


def side_by_side(args: argparse.Namespace, configs: list[tuple[str, Config]]) -> dict[str, Any]:
    """A row a contract; differences are to the first of them. The first requests run once before,
    so that no contract pays for building kernels."""
    rows, first = [], None
    contract, cfg = configs[0]
    few = min(WARM_REQUESTS, cfg.run.trace.num_requests or WARM_REQUESTS)
    _say(f"{few} requests to warm up")
    cfg = _load(args, contract, f"run.trace.num_requests={few}")
    with open_engine(args, cfg) as engine:
        replay(engine, args)
    for contract, cfg in configs:
        _say(f"contract {contract}")
        watched = Watched(args.watch)
        with open_engine(args, cfg) as engine:
            report = replay(engine, args, watched)
        first = watched.outputs if first is None else first
        rows.append(_row(contract, report) | {"difference": difference(cfg, first, watched)})
    return {
        "model": report["model"],
        "backend": report["backend"],
        "activations": report["activations"],
        "requests": report["requests"],
        "prompt_tokens": report["prompt_tokens"],
        "output_tokens": report["output_tokens"],
        "rows": rows,
    }


def difference(cfg: Any, first: dict, watched: Watched) -> dict[str, Any]:
    """How far watched outputs are from those of the first run, over the layers whose rings are
    stored and over those above; `largest_output` gives them a scale."""
    found: dict[str, Any] = {}
    for part, stored in (("stored_layers", True), ("rebuilt_layers", False)):
        pairs = [
            (
                rows.view(ml_dtypes.bfloat16).astype(np.float64),
                first[sample].view(ml_dtypes.bfloat16),
            )
            for sample, rows in watched.outputs.items()
            if sample in first and cfg.layers[sample.layer].stored == stored
        ]
        errors = [float(np.abs(one - other.astype(np.float64)).max()) for one, other in pairs]
        found[part] = {
            "outputs": len(errors),
            "differ": sum(error > 0 for error in errors),
            "largest": max(errors, default=0.0),
            "mean": float(np.mean(errors)) if errors else 0.0,
            "largest_output": max((float(np.abs(one).max()) for one, _ in pairs), default=0.0),
        }
    return found


def _row(contract: str, report: dict) -> dict[str, Any]:
    prefix, rate, latency = report["prefix"], report["throughput"], report["latency"]
    store = prefix.get("store", {})
    return {
        "contract": contract,
        "seconds": rate["seconds"],
        "computed_tokens": rate["computed_tokens"],
        "prefill_tokens": report["batches"]["prefill"]["tokens"],
        "first_token_s": latency["first_token_s"],
        "prompt_blocks": prefix["prompt_blocks"],
        "hit_blocks": prefix["hit_blocks"],
        "best_blocks": prefix.get("best_blocks"),
        "hit_tokens": prefix.get("hit_tokens", 0),
        "replayed_tokens": prefix.get("replayed_tokens", 0),
        "snapshots": prefix.get("snapshots", 0),
        "restores": prefix.get("restores", 0),
        "store_bytes_in": store.get("bytes_in", 0),
        "store_bytes_out": store.get("bytes_out", 0),
        "digest": report["digest"],
    }


def overhead(args: argparse.Namespace, configs: list[tuple[str, Config]]) -> dict[str, Any]:
    """Seconds of runs without a cache and with one that is emptied before each, in turns, after one
    of each that compiles; who goes first alternates, as a host that slows down would favour one.
    `ratio` is of the medians, `turn_ratios` of each turn; `hit_blocks` must be 0 for them to say
    anything, so the trace should share nothing."""
    (_, without), (contract, with_cache) = configs
    seconds: dict[str, list[float]] = {"none": [], contract: []}
    with open_engine(args, without) as plain, open_engine(args, with_cache) as cached:
        hits = snapshots = 0
        for turn in range(args.overhead + 1):
            pair = [("none", plain), (contract, cached)]
            for name, engine in reversed(pair) if turn % 2 else pair:
                _say(f"turn {turn} of {args.overhead}: contract {name}")
                if engine.prefix is not None:
                    engine.prefix.clear()
                    engine.prefix.flush()  # what is deleted now is no part of the run
                report = replay(engine, args)
                if turn > 0:
                    seconds[name].append(report["throughput"]["seconds"])
                if engine is cached:
                    hits += report["prefix"]["hit_blocks"]
                    snapshots = report["prefix"]["snapshots"]
        medians = {name: float(np.median(times)) for name, times in seconds.items()}
    return {
        "model": report["model"],
        "backend": report["backend"],
        "snapshot_blocks": cached.cfg.prefix.snapshot_blocks,
        "block_size": cached.cfg.prefix.block_size,
        "snapshots": snapshots,
        "hit_blocks": hits,
        "seconds": seconds,
        "medians": medians,
        "ratio": medians[contract] / medians["none"],
        "turn_ratios": [
            one / other for one, other in zip(seconds[contract], seconds["none"], strict=True)
        ],
    }


def table(found: dict[str, Any]) -> list[str]:
    """A report in lines."""
    if "ratio" in found:
        return [
            f"{found['model']} on {found['backend']}, a snapshot every {found['snapshot_blocks']} "
            f"blocks of {found['block_size']}: {found['snapshots']} snapshots, "
            f"{found['hit_blocks']} blocks hit",
            *(f"{name:>8} {median:9.3f} s" for name, median in found["medians"].items()),
            f"   ratio {found['ratio']:9.4f}, of single turns {min(found['turn_ratios']):.4f} .. "
            f"{max(found['turn_ratios']):.4f}",
        ]
    lines = [
        f"{found['model']} on {found['backend']}, {found['activations']}: {found['requests']} "
        f"requests, {found['prompt_tokens']:,} prompt and {found['output_tokens']:,} output tokens",
        f"{'contract':>8} {'seconds':>9} {'computed':>12} {'hit/best blocks':>17} "
        f"{'replayed':>10} {'store in':>15} {'store out':>15}  {'stored layers':>22} "
        f"{'rebuilt layers':>22}",
    ]
    for row in found["rows"]:
        of_best = f"{row['hit_blocks']:,}/{row['best_blocks'] or 0:,}"
        shares = [_share(part) for part in row["difference"].values()]
        lines.append(
            f"{row['contract']:>8} {row['seconds']:>9.2f} {row['computed_tokens']:>12,} "
            f"{of_best:>17} {row['replayed_tokens']:>10,} {row['store_bytes_in']:>15,} "
            f"{row['store_bytes_out']:>15,}  {shares[0]:>22} {shares[1]:>22}"
        )
    return [
        *lines,
        "differences: outputs that differ of those compared, and the largest difference",
    ]


def _share(part: dict[str, Any]) -> str:
    return f"{part['differ']}/{part['outputs']} {part['largest']:.2e}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
