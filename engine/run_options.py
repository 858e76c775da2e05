"""What `Engine.run` checks of its options before anything runs."""

import os
from typing import Any

from ..layouts.config import Config
from ..layouts.errors import ArgumentError, ConfigError, TraceError
from ..layouts.sizes import is_flag
from .output_files import check_output_path, check_separate_files


def check_run_options(
    cfg: Config,
    verify: Any,
    report_path: Any,
    timeline_path: Any,
    graphs: Any,
    progress: Any,
    on_step: Any,
) -> None:
    """Raises ArgumentError for options of another kind, OSError where a file could not be written,
    ConfigError where there is nothing to verify."""
    if not is_flag(verify):
        raise ArgumentError(f"run: verify={verify!r} but must be True or False")
    if graphs is not None and not is_flag(graphs):
        raise ArgumentError(f"run: graphs={graphs!r} but must be True, False or None")
    for name, function in (("progress", progress), ("on_step", on_step)):
        if function is not None and not callable(function):
            raise ArgumentError(f"run: {name}={function!r} but must be a function or None")
    if verify and cfg.run.verify_samples == 0:
        raise ConfigError(f"{cfg.path}: run.verify_samples is 0, so there is nothing to verify")
    for name, path in (("report_path", report_path), ("timeline_path", timeline_path)):
        if path is None:
            continue
        if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
            raise ArgumentError(f"run: {name}={path!r} but must be a path or None")
    files = {"report_path": report_path, "timeline_path": timeline_path}
    check_separate_files("run", files)
    for path in files.values():
        if path is not None:
            check_output_path(path)


def trace_list(trace: Any) -> list:
    """A trace that was given as a collection of requests, as a list that is not empty."""
    try:
        items = list(trace)
    except TypeError:
        kind = type(trace).__name__
        raise TraceError(f"run: trace is {kind}; pass a path, or a list of Request") from None
    if not items:
        raise TraceError("run: the list of requests is empty")
    return items
