"""docs/tutorial.md, followed: its edits lead to the messages and numbers that it shows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ringslab as rs
from ringslab.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
EDITS = re.findall(r"^sed -i .* mine\.yaml$", TEXT, re.MULTILINE)
assert len(EDITS) == 5


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the copy that the tutorial edits."""
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(*commands):
    for command in commands:
        subprocess.run(command, shell=True, check=True)


def test_edits_lead_to_the_messages_and_the_layout(folder):
    """window 64 needs rings of 67, and 68 records are 8,992 bytes: the loader says both in the
    words that are shown; after the last edit a slot is 82,176 bytes."""
    shown = re.findall(r"^ringslab: (mine\.yaml:.*)$", TEXT, re.MULTILINE)
    for command, message in zip(EDITS, shown, strict=False):
        edit(command)
        with pytest.raises(ConfigError) as caught:
            rs.load_config("mine.yaml")
        assert str(caught.value).splitlines()[0] == message
    assert len(shown) == 2
    edit(*EDITS[2:])
    layout = rs.load_config("mine.yaml").slot_layout
    assert (layout.stored_bytes, layout.slot_bytes) == (26_976, 82_176)
    assert f"slot_bytes {layout.slot_bytes:,}" in TEXT


def test_step_prints_what_is_shown(folder, capsys):
    """The step by hand agrees with the definition, and starts at rows 105 and 108."""
    edit(*EDITS)
    code, shown = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", TEXT, re.M | re.S)[0]
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_schedule_does_not_show(folder):
    """The three runs of one configuration that it compares, on 4 requests: one digest."""
    edit(*EDITS)
    digests = set()
    for change in ((), ("engine.token_budget=32",), ("run.accept_rate=0.1",)):
        cfg = rs.load_config("mine.yaml", ("run.trace.num_requests=4", *change))
        with rs.Engine(cfg, backend="cpu") as engine:
            digests.add(engine.run()["digest"])
    assert len(digests) == 1
    assert len(set(re.findall(r"^digest (583a\w+)$", TEXT, re.MULTILINE))) == 1
