"""README and docs say what is so: examples run, commands exist, links lead somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest

import ringslab
from ringslab.layouts import config_schema
from ringslab.tools import main as cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
assert len(EXAMPLES) == 2


def test_decode_example():
    """The first example: the query at position 0 sees one key, so its output is that record's
    value in every head, and lse is finite for all four."""
    names: dict = {}
    exec(EXAMPLES[0], names)
    record = names["layout"].view(names["slab"], layer=0)[3, 0]
    head_dim = names["cfg"].head_dim
    value = ringslab.dequantize_mxfp8(record[:, :head_dim], record[:, head_dim:])
    out, lse = names["out"], names["lse"]
    assert out.shape == (4, names["cfg"].num_q_heads, head_dim)
    assert (out[0].astype("f4") == value).all()
    assert (abs(lse) < 100).all()


def test_engine_example(capsys):
    """The second example generates 8 and 5 tokens and leaves nothing open."""
    names: dict = {}
    exec(EXAMPLES[1], names)
    assert capsys.readouterr().out == "[42 42 42 42 42 42 42 42] [42 42 42 42 42]\n"
    assert names["engine"].done


def test_ci_runs_the_test_command():
    """The README's second command and .ci/run install the same extra and run the same tests."""
    (command,) = re.findall(r"^python3 .*\[dev\].*$", README, re.MULTILINE)
    install, tests = command.split(" && ")[-2:]
    script = (ROOT / ".ci" / "run").read_text()
    assert f"\n{install} --quiet\n" in script
    assert f"\n{tests} " in script


def test_commands_are_named():
    """Every `ringslab COMMAND` of README and docs is a command, and every command is in README."""
    said = {
        word
        for page in PAGES
        for word in re.findall(r"(?<!import )ringslab ([a-z]+)\b", _code_of(page.read_text()))
    }
    assert said == set(cli._COMMANDS)


def _code_of(text: str) -> str:
    return "\n".join(re.findall(r"`+([^`]+)`+", text))


def test_public_names_are_named():
    """The README's table of names is the public table."""
    table = README[README.index("| names | what |") : README.index("## Backends")]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row)}
    assert named == set(dir(ringslab)) - {"__version__"}


def test_every_key_is_explained():
    """docs/configuration.md names every key of the schema, and no packaged file is left out."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    words = set(re.findall(r"\w+", _code_of(text)))
    sections = [item for name, item in vars(config_schema).items() if name.endswith("Section")]
    assert len(sections) >= 10
    for section in sections:
        missing = {field.name for field in dataclasses.fields(section)} - words
        assert not missing, f"{section.__name__}: {missing}"
    packaged = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert packaged == set(re.findall(r"^\| `(\w+\.yaml)`", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Relative links name files of the repository, and headings that are there."""
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file.read_text()), f"{target}#{anchor}"


def _anchors(text: str) -> set[str]:
    """Headings as links name them: small letters and digits, hyphens for spaces."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index():
    """docs/index.md links each page beside it, and README links the index."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in PAGES[1:]} - {"index.md"}
    assert "(docs/index.md)" in README
