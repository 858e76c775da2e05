"""`ringslab doctor`: what this machine can run, why not, and the command that mends it."""

import argparse
import json
from typing import Any

from .doctor_facts import gather_facts
from .doctor_rules import Facts, Finding, find, why_no_cuda

DESCRIPTION = """Looks for Python packages, the NVIDIA driver, GPUs, the kernel compiler and the
kernel cache. Status 1 where installed things contradict each other, else 0."""
EXAMPLE = "ringslab doctor --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")


def run(args: argparse.Namespace) -> int:
    facts = gather_facts()
    findings = find(facts)
    if args.json:
        print(json.dumps(_report(facts, findings), indent=2))
    else:
        _print_tables(facts, findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _report(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    reason = why_no_cuda(facts)
    gpus = [
        {**gpu, "compute_capability": ".".join(map(str, gpu["compute_capability"]))}
        for gpu in facts.gpus
    ]
    return {
        "python": facts.python,
        "packages": facts.packages,
        "driver_cuda": facts.driver_cuda,
        "nvrtc": facts.nvrtc,
        "gpus": gpus,
        "cubin_cache": facts.cache,
        "programs": facts.programs,
        "backends": {
            "cuda": {"runs": reason is None, "why_not": reason},
            "cpu": {"runs": True, "why_not": None},
            "reference": {"runs": True, "why_not": None},
        },
        "findings": [vars(finding) for finding in findings],
    }


def _print_tables(facts: Facts, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("what", title="This machine", title_justify="left")
    table.add_column("found", overflow="fold")
    for what, found in _rows(facts):
        table.add_row(what, escape(found))
    console.print(table)

    table = Table("backend", "runs", "", title="Backends", title_justify="left")
    reason = why_no_cuda(facts)
    table.add_row("cuda", "no" if reason else "yes", escape(reason or ""))
    table.add_row("cpu", "yes", "the default where cuda does not run")
    table.add_row("reference", "yes", "NumPy float64, for checking")
    console.print(table)

    for finding in findings:
        console.print(f"{finding.level}: {escape(finding.what)}")
        console.print(f"    mend: {escape(finding.mend)}")
    if not findings:
        console.print("nothing to mend")


def _rows(facts: Facts) -> list[tuple[str, str]]:
    rows = [("python", facts.python)]
    rows += [(name, version or "-") for name, version in facts.packages.items()]
    rows.append(("driver", f"CUDA {facts.driver_cuda}" if facts.driver_cuda else "-"))
    rows.append(("NVRTC", facts.nvrtc or "-"))
    for gpu in facts.gpus:
        size = f"{gpu['total_bytes'] / 2**30:.1f} GiB"
        rows.append((f"GPU {gpu['id']}", f"{gpu['name']}, {gpu['arch']}, {size}"))
    cache = facts.cache
    size = f"{cache['files']} files, {cache['bytes'] / 2**20:.1f} MiB"
    rows.append(("cubin cache", f"{cache['path']}: {size}"))
    rows += [(name, path or "-") for name, path in facts.programs.items()]
    return rows
