"""Copies of the packaged configurations with one thing changed, and the faults that they give."""

import re
from pathlib import Path

import pytest

import ringslab as rs
from ringslab.errors import ConfigError

QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"
FLASH = QUICKSTART.with_name("deepseek_v4_1_flash.yaml")


def edited(tmp_path, *edits: tuple[str, str], base: Path = QUICKSTART) -> Path:
    """A copy of a packaged file with the first occurrence of each text replaced."""
    text = base.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / "edited.yaml"
    path.write_text(text)
    return path


def faults_of(path, overrides: tuple[str, ...] = ()) -> list[str]:
    """The lines of the ConfigError that a file gives."""
    with pytest.raises(ConfigError) as caught:
        rs.load_config(path, overrides)
    return str(caught.value).splitlines()


def message_of(path) -> str:
    """The message of the ConfigError that a file gives, or the path where it loads."""
    try:
        hash(rs.load_config(path))
    except ConfigError as error:
        return str(error)
    return str(path)


def line_of(path: Path, text: str) -> int:
    return path.read_text()[: path.read_text().index(text)].count("\n") + 1


def one_fault(path: Path, key: str, got: str, expected: str) -> str:
    """Asserts that a file has exactly one fault, `file:line:col: key: got VALUE, expected ...`."""
    lines = faults_of(path)
    assert len(lines) == 1, lines
    assert re.match(rf"{re.escape(str(path))}:\d+:\d+: ", lines[0]), lines[0]
    assert f" {key}: got {got}, expected {expected}" in lines[0], lines[0]
    return lines[0]


def table(text: str) -> list[tuple[str, ...]]:
    """Rows of a table written as text: a row a line, cells between bars, \\n a line's end."""
    rows = [line.split("|") for line in text.strip().splitlines()]
    return [tuple(cell.strip().replace("\\n", "\n") for cell in row) for row in rows]
