"""Pieces of SVG for the pictures of the command line. SVG is text: nothing is needed to draw it."""

from collections.abc import Iterable
from xml.sax.saxutils import escape

INK, PALE = "#222222", "#dddddd"


def document(width: int, height: float, parts: Iterable[str]) -> str:
    """A whole picture on white, of `width` x `height` pixels."""
    size = f'width="{width}" height="{height:.0f}" viewBox="0 0 {width} {height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{width}" height="{height:.0f}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = INK
) -> str:
    """Words whose baseline begins, ends ("end") or is centred ("middle") at (x, y)."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    """A filled rectangle with a thin white edge; `tip` is shown where the pointer rests on it."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{fill}" '
        f'stroke="white" stroke-width="0.5">{title}</rect>'
    )
