"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

LINE_EVERY_S = 15.0  # seconds from line to line where stderr is no terminal
BAR_EVERY_S = 0.1


@dataclass(frozen=True)
class Progress:
    """say(text) prints a line; update(done_requests, tokens) moves the bar or, now and then, prints
    a line; stop() leaves the terminal as it was."""

    say: Callable[[str], None]
    update: Callable[[int, int], None]
    stop: Callable[[], None]


QUIET = Progress(lambda text: None, lambda done, tokens: None, lambda: None)


def open_progress(total: int, stream: TextIO | None = None) -> Progress:
    """Progress over `total` requests: rich's bar on a terminal where rich is installed, else
    lines."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        try:
            return _rich_progress(total, stream)
        except ImportError:
            pass
    return _line_progress(total, stream)


def _rich_progress(total: int, stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
    )
    task = bar.add_task("requests", total=total, tokens=0)
    bar.start()
    update = _every(
        BAR_EVERY_S, lambda done, tokens: bar.update(task, completed=done, tokens=tokens)
    )

    def say(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False)

    return Progress(say, update, bar.stop)


def _line_progress(total: int, stream: TextIO) -> Progress:
    start = time.monotonic()

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    def line(done: int, tokens: int) -> None:
        seconds = time.monotonic() - start
        say(f"{done} of {total} requests, {tokens:,} tokens, {seconds:.0f} s")

    return Progress(say, _every(LINE_EVERY_S, line), lambda: None)


def _every(seconds: float, function: Callable[[int, int], Any]) -> Callable[[int, int], None]:
    """`function`, but at most once in so many seconds."""
    last = [time.monotonic()]

    def limited(done: int, tokens: int) -> None:
        now = time.monotonic()
        if now - last[0] >= seconds:
            last[0] = now
            function(done, tokens)

    return limited
