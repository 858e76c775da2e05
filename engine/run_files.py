"""The report and the timeline of a run, and what is told where they cannot be written any more."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..layouts.errors import ReportError
from .report import write_report
from .timeline import write_timeline


@dataclass
class RunFiles:
    """Where the files of a run go (None: not asked for), and the faults of those that failed.

    A file that was tried before the run can fail after hours of it. What ran must not be lost with
    it: a fault is kept, the run goes on to its end, and `settle` raises what holds the report.
    """

    report_path: str | Path | None
    timeline_path: str | Path | None
    faults: dict[str | Path, OSError] = field(default_factory=dict)

    def write_report(self, report: dict) -> None:
        self._write(self.report_path, lambda path: write_report(report, path))

    def write_timeline(self, engine: Any) -> None:
        self._write(self.timeline_path, lambda path: write_timeline(engine, path))

    def settle(self, report: dict) -> None:
        """Raises ReportError where a file is missing."""
        if self.faults:
            raise ReportError("; ".join(map(str, self.faults.values())), report, tuple(self.faults))

    def _write(self, path: str | Path | None, write: Callable[[Any], Any]) -> None:
        if path is None:
            return
        self.faults.pop(path, None)  # a report is written again after the verification
        try:
            write(path)
        except OSError as error:
            self.faults[path] = error
