"""docs/reference.md is what the docstrings say today."""

import shutil
from pathlib import Path

import ringslab
from ringslab.tools import reference

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / reference.PAGE).read_text()


def test_page_is_up_to_date():
    """`python -m ringslab.tools.reference` would write what lies there."""
    assert reference.reference_page(ROOT) == PAGE


def test_every_public_name_is_described():
    """Each name has one heading, and text beneath it."""
    names = set(dir(ringslab)) - {"__version__"}
    for name in names:
        section = PAGE.split(f"\n### rs.{name}\n")
        assert len(section) == 2, name
        body = section[1].split("\n##")[0]
        assert any(line and not line.startswith(("```", name)) for line in body.splitlines()), name
    assert PAGE.count("\n### rs.") == len(names)


def test_a_changed_docstring_is_seen(tmp_path):
    """Another default of one signature, or another word of one docstring, changes the page."""
    for name in ("__init__.py", "errors.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("engine", "layouts", "rawkernels", "schedules"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.cu*", "__*"))
    assert reference.reference_page(tmp_path) == PAGE
    home = tmp_path / "rawkernels" / "quantize_mxfp8.py"
    for old, new in (("1e-4,", "1e-5,"), ("share a", "divide a")):
        text = home.read_text()
        assert old in text
        home.write_text(text.replace(old, new))
        assert reference.reference_page(tmp_path) != PAGE
        home.write_text(text)


def test_signatures_are_split_between_parameters():
    """Commas of annotations, tuples and text stay inside of their parameter."""
    source = "def f(a: dict[str, int], b=(1, 2), *, c: str = 'x, y') -> None: ...\n"
    (node,) = reference.ast.parse(source).body
    assert reference._parameters(node.args) == [
        "a: dict[str, int]",
        "b=(1, 2)",
        "*",
        "c: str = 'x, y'",
    ]
