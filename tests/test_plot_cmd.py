"""`ringslab plot`: every kind of report becomes its picture; anything else is told what it is."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from ringslab.tools import plot_cmd
from ringslab.tools.main import main

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE = ROOT / "docs" / "performance"
TRACE = ["--set", "run.trace.num_requests=4", "--backend", "cpu"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    """One report of each kind: those of a run and of prefix contracts by their commands, that of a
    bench from the documentation."""
    folder = tmp_path_factory.mktemp("reports")
    paths = {name: folder / f"{name}.json" for name in ("run", "timeline", "bench", "prefix")}
    outputs = ["--report", str(paths["run"]), "--timeline", str(paths["timeline"])]
    assert main(["run", "quickstart.yaml", *TRACE, *outputs]) == 0
    shutil.copy(PERFORMANCE / "window_decode.json", paths["bench"])
    contracts = ["--contracts", "none,full", "--watch", "16", "--report", str(paths["prefix"])]
    assert main(["prefix", "quickstart.yaml", *TRACE, *contracts]) == 0
    return paths


WORDS = {
    "run": ("State slots over time", "Latency"),
    "timeline": ("operations of one step", "window_decode"),
    "bench": ("window_decode", "medians, min to p90"),
    "prefix": ("Tokens", "best possible on this trace"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_each_kind_is_drawn(reports, kind, tmp_path, capsys):
    """An SVG with the words of that kind; --json names kind and file."""
    if kind != "timeline":
        pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    assert main(["plot", str(reports[kind]), "--out", str(picture), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"report": str(reports[kind]), "kind": kind, "picture": str(picture)}
    text = picture.read_text()
    assert "<svg" in text
    for words in WORDS[kind]:
        assert words in text


def test_the_picture_lies_beside_the_report(reports, tmp_path, capsys):
    """Without --out: the report's name with .svg, said on one line."""
    report = tmp_path / "steps.json"
    shutil.copy(reports["timeline"], report)
    assert main(["plot", str(report)]) == 0
    assert capsys.readouterr().out == f"timeline: {tmp_path / 'steps.svg'}\n"
    assert (tmp_path / "steps.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not JSON", "is no JSON"),
        ("[1, 2]", "no JSON object"),
        ("{}", "no report that can be drawn"),
        ('{"rows": [], "requests": 1, "model": "m"}', "no report that can be drawn"),
        ('{"model": "m", "latency": {}, "schema_version": 1}', "ringslab run --report"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, text, words):
    """One line on stderr with the file's name, status 2, and no picture."""
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main(["plot", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(path) in error
    assert error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_wrong_pictures_are_refused(reports, tmp_path, capsys):
    """A timeline is SVG only; no picture takes the place of its report, nor goes to a folder that
    is not there; a report that is not there is told."""
    for kind, out in (("timeline", "a.png"), ("run", "a.gif"), ("run", "no/where.svg")):
        assert main(["plot", str(reports[kind]), "--out", str(tmp_path / out)]) == 2
        assert str(out).split("/")[0] in capsys.readouterr().err
    assert main(["plot", str(reports["run"]), "--out", str(reports["run"])]) == 2
    assert json.loads(reports["run"].read_text())["schema_version"] == 1
    drawn = tmp_path / "report.svg"
    shutil.copy(reports["timeline"], drawn)
    assert main(["plot", str(drawn)]) == 2
    assert "REPORT and --out are both" in capsys.readouterr().err
    assert json.loads(drawn.read_text())["steps"]
    drawn.unlink()
    assert main(["plot", str(tmp_path / "none.json")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(reports, tmp_path, monkeypatch, capsys):
    """Where matplotlib is not installed: what to install, status 2. Timelines need none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for kind in ("run", "bench", "prefix"):
        assert main(["plot", str(reports[kind]), "--out", str(tmp_path / "a.svg")]) == 2
        assert "pip install 'ringslab[plot]'" in capsys.readouterr().err
    assert main(["plot", str(reports["timeline"]), "--out", str(tmp_path / "a.svg")]) == 0


def test_each_kind_says_its_command():
    """The refusal names what writes each kind; every named command exists."""
    with pytest.raises(plot_cmd.ArgumentError) as refused:
        plot_cmd.kind_of({}, "a.json")
    for command in ("run --report", "run --timeline", "bench --out", "prefix --report"):
        assert f"ringslab {command}" in str(refused.value)
