"""`ringslab budget`: how many bytes a sequence's caches take against its context, for a
configuration or for a shape given by flags."""

import argparse
import json
from typing import Any

from ..engine.output_files import check_separate_files
from ..layouts.budget import (
    DEFAULT_BLOCK,
    CacheShape,
    KvBytes,
    cache_shape,
    make_cache_shape,
    shape_bytes,
    smallest_ratio,
)
from ..layouts.config import load_config
from ..layouts.errors import ArgumentError
from .command import add_overrides
from .drawing.budget import write_plot

DESCRIPTION = """Bytes of one sequence by the formula (all layers global, and as the model has its
windows), and what is really taken: rings with padding and decode-step tokens, pages in whole
blocks. Give a CONFIG, or --layers, --kv-heads, --head-dim, --window and --local or --ratio."""
EXAMPLE = """ringslab budget gemma3_27b.yaml --context 8192 131072
ringslab budget --layers 48 --kv-heads 8 --head-dim 128 --window 1024 --under 4"""
GIB = 2**30
CONTEXTS = (8_192, 32_768, 131_072)
SHAPE_FLAGS = ("layers", "kv_heads", "head_dim", "window")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="a YAML file, or a packaged one's name")
    add_overrides(parser, "engine.num_blocks=64")
    add = parser.add_argument
    add("--context", type=int, nargs="+", default=list(CONTEXTS), metavar="TOKENS")
    add("--name", help="name of a shape given by flags")
    add("--layers", type=int, metavar="N", help="number of layers")
    add("--kv-heads", type=int, metavar="N")
    add("--head-dim", type=int, metavar="N")
    add("--window", type=int, metavar="W", help="keys that a query of a local layer sees")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--local", type=int, metavar="N", help="number of local layers")
    split.add_argument(
        "--ratio",
        metavar="L:G",
        help="local layers for each run of global ones, as 5:1: of every L + G layers the last G "
        "are global",
    )
    add("--record", choices=("bf16", "fp16", "mxfp8"), default="bf16", help="record type")
    add("--tokens-per-step", type=int, default=1, metavar="N", help="drafts + 1 (default: 1)")
    add("--block-size", type=int, default=DEFAULT_BLOCK, metavar="TOKENS", help="of the paged pool")
    add(
        "--under",
        type=float,
        metavar="GIB",
        help="also say the smallest local:global ratio that keeps a sequence under so many GiB, at "
        "each context",
    )
    add("--json", action="store_true", help="print JSON for programs")
    add("--plot", metavar="FILE.svg", help="draw bytes against context")


def run(args: argparse.Namespace) -> int:
    """Prints the budget. Raises ConfigError for a wrong file, ArgumentError or LayoutError for
    flags that describe no model, OSError where the plot cannot be written."""
    check_separate_files("budget", {"CONFIG": args.config, "--plot": args.plot})
    shape, max_len = read_shape(args)
    rows = [shape_bytes(shape, context) for context in args.context]
    if args.under is not None and not 0 < args.under < float("inf"):
        raise ArgumentError(f"budget: --under={args.under} but must be above 0, and finite")
    ratios = [] if args.under is None else ratio_rows(shape, args)
    if args.plot:
        write_plot(shape, args.plot, max(args.context))
    if args.json:
        print(json.dumps(budget_dict(shape, rows, ratios, args.under), indent=2))
    else:
        print("\n".join(budget_lines(shape, rows, max_len)))
        for line in ratio_lines(ratios, args.under):
            print(line)
    return 0


def read_shape(args: argparse.Namespace) -> tuple[CacheShape, int | None]:
    """The caches that the arguments describe, and the longest sequence of a configuration."""
    given = [name for name in (*SHAPE_FLAGS, "local", "ratio") if getattr(args, name) is not None]
    if args.config is not None:
        # The ratio question alone may ask for another window than the model's.
        if wrong := [name for name in given if name != "window" or args.under is None]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise ArgumentError(f"budget: {flags} describe a shape; give CONFIG or flags, not both")
        cfg = load_config(args.config, tuple(args.overrides))
        return cache_shape(cfg), cfg.max_seq_len
    if missing := [name for name in SHAPE_FLAGS if getattr(args, name) is None]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ArgumentError(f"budget: give a CONFIG, or flags with {flags} as well")
    if args.local is None and args.ratio is None and args.under is None:
        raise ArgumentError("budget: give --local or --ratio: how many layers have the window")
    shape = make_cache_shape(
        args.name or f"{args.layers} layers",
        num_layers=args.layers,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        local_layers=local_layers(args),
        window=args.window,
        record_type=args.record,
        tokens_per_step=args.tokens_per_step,
        block_size=args.block_size,
    )
    return shape, None


def local_layers(args: argparse.Namespace) -> int:
    """Local layers of a shape by flags; all of them where only a ratio is asked for."""
    if args.ratio is None:
        return args.layers if args.local is None else args.local
    parts = args.ratio.split(":")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) == 0:
        raise ArgumentError(f"budget: --ratio={args.ratio!r} but must be L:G, as 5:1")
    local, wide = map(int, parts)
    runs, rest = divmod(args.layers, local + wide)
    return runs * local + min(rest, local)


def ratio_rows(shape: CacheShape, args: argparse.Namespace) -> list[dict[str, Any]]:
    limit = int(args.under * GIB)
    rows = []
    for context in args.context:
        ratio = smallest_ratio(shape, context, limit, args.window)
        rows.append(
            {
                "context": context,
                "local_layers": None if ratio is None else ratio.local_layers,
                "global_layers": None if ratio is None else ratio.global_layers,
                "hybrid_bytes": None if ratio is None else ratio.hybrid_bytes,
            }
        )
    return rows


def budget_dict(
    shape: CacheShape, rows: list[KvBytes], ratios: list[dict[str, Any]], under: float | None
) -> dict[str, Any]:
    """What `--json` prints."""
    found: dict[str, Any] = {
        "model": shape.name,
        "local_layers": shape.num_local,
        "global_layers": shape.num_global,
        "rows": [{**vars(row), "real_bytes": row.real_bytes, "saving": row.saving} for row in rows],
    }
    if under is not None:
        found |= {"under_gib": under, "smallest_ratios": ratios}
    return found


def budget_lines(shape: CacheShape, rows: list[KvBytes], max_len: int | None) -> list[str]:
    """Two tables: by the formula, and what is really taken."""
    split = f"{shape.num_local}/{shape.num_global}"
    lines = [
        f"{'model':32} {'L/G':>6} {'ctx':>7} {'all-global GiB':>15} {'hybrid GiB':>11} "
        f"{'saving':>7}"
    ]
    lines += [
        f"{shape.name:32} {split:>6} {row.context:>7} {row.all_global_bytes / GIB:15.2f} "
        f"{row.hybrid_bytes / GIB:11.2f} {row.saving:6.1f}x"
        for row in rows
    ]
    if max_len is not None and any(row.context > max_len for row in rows):
        lines.append(f"contexts above max_seq_len {max_len:,} are arithmetic only")
    lines += ["", f"what a sequence takes, in bytes (blocks of {shape.block_size} tokens):"]
    names = ("ctx", "MXFP8 formula", "slot", "step tokens", "padding", "blocks", "paged", "in all")
    widths = (7, 15, 13, 11, 9, 7, 15, 15)
    lines.append(" ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for row in rows:
        small = "-" if row.mxfp8_bytes is None else f"{row.mxfp8_bytes:,}"
        numbers = (row.slot_bytes, row.step_bytes, row.padding_bytes, row.num_blocks)
        cells = [f"{row.context}", small, *(f"{n:,}" for n in numbers)]
        cells += [f"{row.paged_bytes:,}", f"{row.real_bytes:,}"]
        lines.append(
            " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    last = rows[-1]
    if shape.state_bytes:
        lines.append(f"of the slot, compression state: {shape.state_bytes:,}")
    if shape.num_local:
        lines.append(
            f"were windows paged: up to {last.window_blocks} live blocks a layer, "
            f"{last.paged_local_bytes:,} bytes in place of the slot's rings"
        )
    return lines


def ratio_lines(ratios: list[dict[str, Any]], under: float | None) -> list[str]:
    lines = []
    for row in ratios:
        if row["local_layers"] is None:
            said = "no ratio: local layers alone take as much"
        else:
            said = (
                f"{row['local_layers']} local and {row['global_layers']} global layers, "
                f"{row['hybrid_bytes'] / GIB:.2f} GiB"
            )
        lines.append(f"under {under:g} GiB at {row['context']:,}: {said}")
    return lines
