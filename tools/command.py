"""What several commands state and do alike."""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..engine.report import write_report
from ..layouts.errors import ReportError, RingslabError


def add_overrides(parser: argparse.ArgumentParser, example: str) -> None:
    """`--set KEY=VALUE`, which may be repeated: `args.overrides`, the list that `load_config` takes
    as a tuple."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help=f"change one value of the YAML, as {example}; may be repeated",
    )


def attempt(faults: list[str], write: Callable[..., Any], *arguments: Any) -> None:
    """Calls `write`, which writes a file; adds its error to `faults`. A command that has measured
    something prints it before it tells what could not be written."""
    try:
        write(*arguments)
    except (OSError, RingslabError) as error:
        faults.append(str(error))


def raise_faults(faults: list[str], report: dict) -> None:
    """Raises ReportError with all of them; nothing where there are none."""
    if faults:
        raise ReportError("; ".join(faults), report)


def keep_report(report: dict, path: str | Path, *, printed: bool) -> str:
    """Says where to find a report that could not be written to `path`: on stdout, or in a new
    folder among the system's temporary ones, where this puts it under its name."""
    if printed:
        return "the report is on stdout"
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="ringslab-"))
        kept = folder / Path(path).name
        write_report(report, kept)
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return f"nor could the report be kept elsewhere ({error}); --json prints it"
    return f"the report is in {kept}"
