"""Figures of matplotlib (`pip install 'ringslab[plot]'`), made without a screen."""

import io
from pathlib import Path
from typing import Any

from ...engine.output_files import write_whole
from ...layouts.errors import ArgumentError

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_path(path: str) -> None:
    """Raises ArgumentError for another kind of file, or where matplotlib is missing."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"--plot {path} but must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            f"a picture needs matplotlib ({error}); pip install 'ringslab[plot]'"
        ) from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path, **options: Any) -> None:
    """Writes a figure in the format of the path's suffix. Raises OSError where it cannot be
    written; the file that was there stays then."""
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix.lower()[1:], **options)
    write_whole(path, picture.getvalue())
