"""`ringslab compile`: build every CUDA kernel and show what came out. Needs no GPU."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from ..layouts.errors import KernelBuildError
from ..rawkernels.cuda.registry import find_kernels
from ..rawkernels.device.kernel_source import PORTABLE_ARCHS, KernelSource, MacroItems
from ..rawkernels.device.module import build_kernel
from ..rawkernels.device.nvrtc import compiler_version, parse_resources
from ..rawkernels.device.progress import progress_to
from ..rawkernels.device.sass import count_opcodes, find_disassembler

# Counted in the table: tensor cores of sm_80 and of sm_90a, and local memory, which is spills.
TABLE_OPCODES = ("HMMA", "HGMMA", "LDL", "STL")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "compile",
        help="compile every CUDA kernel and report its registers and spills",
        description="Builds every kernel in its default shapes for each architecture, on a machine "
        "with or without a GPU, and fills the cubin cache. Status 1 where a kernel does not build.",
    )
    parser.add_argument(
        "--arch",
        action="append",
        choices=PORTABLE_ARCHS,
        help="build for this architecture only; may be given again (default: all)",
    )
    parser.add_argument("--kernel", help="build only kernels whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")
    parser.add_argument("--no-sass", action="store_true", help="do not disassemble")


def run(args: argparse.Namespace) -> int:
    archs = args.arch or list(PORTABLE_ARCHS)
    wanted = args.kernel or ""
    found, orphans = find_kernels()
    kernels = [kernel for kernel in found if wanted in kernel.name]
    if not kernels:
        print(f"ringslab: compile: no kernel is named {args.kernel!r}", file=sys.stderr)
        return 1
    disassembler = None if args.no_sass else find_disassembler()
    rows = []
    failures = [
        {"name": file, "arch": None, "error": f"{file}: no launcher has it in its KERNELS"}
        for file in orphans
        if wanted in file
    ]
    with progress_to(_progress_line):
        for kernel, macros, arch in _builds(kernels, archs):
            try:
                rows.append(_report(kernel, macros, arch, disassembler))
            except KernelBuildError as error:
                failures.append({"name": kernel.name, "arch": arch, "error": str(error)})
    _progress_line("")
    if args.json:
        report = {"compiler": compiler_version(), "kernels": rows, "failures": failures}
        print(json.dumps(report, indent=2))
    else:
        _print_table(rows, disassembler is not None)
    for failure in failures:
        print(f"ringslab: {failure['error']}", file=sys.stderr)
    return 1 if failures else 0


def _builds(
    kernels: list[KernelSource], archs: list[str]
) -> Iterator[tuple[KernelSource, MacroItems, str]]:
    for kernel in kernels:
        for macros in kernel.macro_sets:
            for arch in archs:
                if arch in kernel.archs:
                    yield kernel, macros, arch


def _report(
    kernel: KernelSource, macros: MacroItems, arch: str, disassembler: str | None
) -> dict[str, Any]:
    build = build_kernel(kernel, macros, arch)
    resources = parse_resources(build.log)[kernel.name]
    sass = None
    if disassembler is not None:
        sass = dict(sorted(count_opcodes(build.cubin, disassembler)[kernel.name].items()))
    return {
        "name": kernel.name,
        "arch": arch,
        "registers": resources.registers,
        "shared_bytes": resources.shared_bytes,
        "spill_bytes": resources.spill_bytes,
        "sass": sass,
        "macros": dict(macros),
    }


def _print_table(rows: list[dict[str, Any]], with_sass: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel")
    table.add_column("arch")
    for heading in ("regs", "shared", "spills", *(TABLE_OPCODES if with_sass else ())):
        table.add_column(heading, justify="right")
    table.add_column("macros", no_wrap=True, overflow="ignore")
    for row in rows:
        counts = [str(row["sass"].get(opcode, 0)) for opcode in TABLE_OPCODES] if with_sass else []
        table.add_row(
            row["name"],
            row["arch"],
            str(row["registers"]),
            str(row["shared_bytes"]),
            str(row["spill_bytes"]),
            *counts,
            escape(" ".join(f"{name}={value}" for name, value in row["macros"].items())),
        )
    console.print(table)
    spilled = sum(row["spill_bytes"] > 0 for row in rows)
    console.print(f"{len(rows)} builds with NVRTC {compiler_version()}, {spilled} with spills")
    if not with_sass:
        console.print("opcodes not counted: pip install nvidia-cuda-nvdisasm")


def _progress_line(text: str) -> None:
    """Overwrite one line of a terminal's stderr; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
