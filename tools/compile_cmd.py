"""`ringslab compile`: build every CUDA kernel and show what came out. Needs no GPU."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from ..layouts.errors import KernelBuildError
from ..rawkernels.cuda.registry import find_kernels
from ..rawkernels.device.kernel_source import PORTABLE_ARCHS, KernelSource, MacroItems
from ..rawkernels.device.module import build_kernel
from ..rawkernels.device.nvrtc import compiler_version, parse_resources
from ..rawkernels.device.progress import progress_to
from ..rawkernels.device.sass import count_opcodes, find_disassembler

DESCRIPTION = """Builds every kernel in its default shapes for each architecture, on a machine with
or without a GPU, and fills the cubin cache. Status 1 where a kernel does not build."""
EXAMPLE = "ringslab compile --kernel window_decode --arch sm_90a"
# Counted in the table: tensor cores of sm_80 and of sm_90a, and local memory, which is spills.
TABLE_OPCODES = ("HMMA", "HGMMA", "LDL", "STL")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    with progress_to(_progress_line), ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [
            # A thread begins without our progress hook, so it is given this context.
            (build, pool.submit(copy_context().run, _report, *build, disassembler))
            for build in _builds(kernels, archs)
        ]
        for (kernel, _, arch), report in waiting:
            try:
                rows.append(report.result())
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
    """One line a build; the macros come last and are not cut, whatever the terminal's width."""
    opcodes = TABLE_OPCODES if with_sass else ()
    lines = [("kernel", "arch", "regs", "shared", "spills", *opcodes, "macros")]
    for row in rows:
        numbers = [row["registers"], row["shared_bytes"], row["spill_bytes"]]
        numbers += [row["sass"].get(opcode, 0) for opcode in opcodes]
        macros = " ".join(f"{name}={value}" for name, value in row["macros"].items())
        lines.append((row["name"], row["arch"], *map(str, numbers), macros))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, arch, *numbers, macros in lines:
        cells = [name.ljust(widths[0]), arch.ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[2:-1], strict=True)]
        print("  ".join([*cells, macros]))
    spilled = sum(row["spill_bytes"] > 0 for row in rows)
    print(f"{len(rows)} builds with NVRTC {compiler_version()}, {spilled} with spills")
    if not with_sass:
        print("opcodes not counted: pip install nvidia-cuda-nvdisasm, and leave --no-sass out")


def _progress_line(text: str) -> None:
    """Overwrite one line of a terminal's stderr; nothing where stderr is a file."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
