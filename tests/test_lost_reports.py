"""A folder that is removed, or a disk that fills, while a command runs: what it found is printed
and kept all the same."""

import errno
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from engine_runs import TINY, tiny

import ringslab as rs
from ringslab.engine import run as engine_run
from ringslab.engine import run_files
from ringslab.errors import ReportError, RingslabError
from ringslab.tools import bench_cmd, prefix_cmd, run_cmd
from ringslab.tools.main import main

RUN = ["run", str(TINY), "--backend", "reference", "--set", "run.trace.num_requests=2"]
REQUESTS = [rs.Request("a", [1, 2], 1)]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The system's folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A folder that is gone when a run has ended."""
    folder = tmp_path / "out"
    folder.mkdir()
    settle = engine_run.settle_prefix

    def settle_and_remove(engine):
        settle(engine)
        shutil.rmtree(folder)

    monkeypatch.setattr(engine_run, "settle_prefix", settle_and_remove)
    return folder


def fill_disk(monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)


def kept_report(error, path):
    """The report at the place that the message names; the message also names what was asked for."""
    assert error.count("\n") == 1, error
    assert str(path) in error
    (kept,) = re.findall(r"the report is in (\S+)", error)
    assert kept.endswith(f"/{path.name}")
    return json.loads(Path(kept).read_text())


def test_a_run_prints_its_summary_and_keeps_its_report(out, capsys):
    """The folder of --report is gone at the end: the summary with the verdict of --verify, status
    2, and the whole report in another place that is named."""
    path = out / "r.json"
    assert main([*RUN, "--verify", "--report", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("2 of 2 requests")
    assert "verify: passed" in said.out
    error = said.err.splitlines()[-1] + "\n"
    assert "No such file or directory" in error
    report = kept_report(error, path)
    assert report["digest"] in said.out
    assert report["verify"]["passed"] is True
    assert not out.exists()


def test_with_json_the_report_is_on_stdout(out, temporary, capsys):
    """Nothing is kept elsewhere then."""
    assert main([*RUN, "--json", "--report", str(out / "r.json")]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["requests"] == 2
    assert "r.json'; the report is on stdout" in said.err
    assert list(temporary.iterdir()) == []


def test_a_disk_that_is_full_everywhere(tmp_path, temporary, monkeypatch, capsys):
    """The old report stays, nothing is left behind, and the message says how to see the new one."""
    path = tmp_path / "r.json"
    path.write_text("old")
    fill_disk(monkeypatch)
    assert main([*RUN, "--report", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("2 of 2 requests")
    assert re.search(
        r"No space left on device: .*r\.json'; nor could .*; --json prints it", said.err
    )
    assert path.read_text() == "old"
    assert list(temporary.iterdir()) == []


def test_a_timeline_that_is_lost_has_no_picture(out, tmp_path, capsys):
    """The report is written; the timeline is named, and no picture is drawn in its place."""
    report = tmp_path / "r.json"
    words = [*RUN, "--report", str(report), "--timeline", str(out / "t.json")]
    assert main(words) == 2
    said = capsys.readouterr()
    assert json.loads(report.read_text())["digest"] in said.out
    assert "t.json" in said.err
    assert "t.svg" not in said.err
    assert "the report is" not in said.err


def test_a_plot_that_is_lost(tmp_path, monkeypatch, capsys):
    """The summary and the report are there all the same."""
    pytest.importorskip("matplotlib")

    def fail(report, path):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(run_cmd, "write_plots", fail)
    report, plot = tmp_path / "r.json", tmp_path / "p.svg"
    assert main([*RUN, "--report", str(report), "--plot", str(plot)]) == 2
    said = capsys.readouterr()
    assert json.loads(report.read_text())["digest"] in said.out
    assert f"No space left on device: '{plot}'" in said.err


def test_a_timeline_that_is_gone_again(tmp_path, monkeypatch, capsys):
    """Removed before its picture is drawn: the summary all the same, and which file it was."""
    write = run_files.write_timeline

    def write_and_remove(engine, path):
        write(engine, path)
        Path(path).unlink()

    monkeypatch.setattr(run_files, "write_timeline", write_and_remove)
    assert main([*RUN, "--timeline", str(tmp_path / "t.json")]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("2 of 2 requests")
    assert "No such file or directory" in said.err
    assert "t.json" in said.err


def test_the_error_of_a_run_holds_its_report(out):
    """ReportError is an OSError with the report and the paths; the engine runs again after it."""
    paths = {"report_path": out / "r.json", "timeline_path": out / "t.json"}
    with rs.Engine(tiny(), "reference") as engine:
        with pytest.raises(ReportError, match=r"r\.json.*; .*t\.json") as raised:
            engine.run(REQUESTS, **paths)
        assert isinstance(raised.value, (OSError, RingslabError))
        assert raised.value.paths == tuple(paths.values())
        out.mkdir()
        again = engine.run(REQUESTS)
    assert raised.value.report["completed"] == again["completed"]


def test_a_report_that_can_be_written_later_is_not_lost(tmp_path, monkeypatch):
    """The disk is full at the end of the run and has room again after the verification."""
    path = tmp_path / "r.json"
    verify = engine_run._verify

    def make_room(*arguments):
        monkeypatch.undo()
        return verify(*arguments)

    monkeypatch.setattr(engine_run, "_verify", make_room)
    fill_disk(monkeypatch)
    with rs.Engine(tiny(), "reference") as engine:
        report = engine.run(REQUESTS, verify=True, report_path=path)
    assert json.loads(path.read_text()) == report


def test_prefix_prints_its_table(tmp_path, monkeypatch, capsys):
    """As `run`: the table, status 2, and the report elsewhere."""
    path = tmp_path / "out" / "r.json"
    path.parent.mkdir()
    compare = prefix_cmd.side_by_side

    def compare_and_remove(*arguments):
        found = compare(*arguments)
        path.parent.rmdir()
        return found

    monkeypatch.setattr(prefix_cmd, "side_by_side", compare_and_remove)
    words = ["prefix", *RUN[1:], "--contracts", "none,full", "--report", str(path)]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "rebuilt layers" in said.out
    found = kept_report(said.err.splitlines()[-1] + "\n", path)
    assert [row["contract"] for row in found["rows"]] == ["none", "full"]


BENCH = ["bench", "apply_rope", "digest_outputs", "--smoke", "--backend", "cpu"]


def test_bench_measures_on_and_prints_its_table(tmp_path, monkeypatch, capsys):
    """Each writing of --out fails: all rows are measured and printed, and kept elsewhere."""
    path = tmp_path / "out" / "r.json"
    run = bench_cmd.run_benches

    def remove_and_run(*arguments):
        path.parent.rmdir()
        return run(*arguments)

    monkeypatch.setattr(bench_cmd, "run_benches", remove_and_run)
    assert main([*BENCH, "--out", str(path)]) == 2
    said = capsys.readouterr()
    found = kept_report(said.err.splitlines()[-1] + "\n", path)
    assert {row["op"] for row in found["rows"]} == {"apply_rope", "digest_outputs"}
    assert all(row["op"] in said.out for row in found["rows"])


def test_bench_has_a_report_where_the_last_writing_went_well(tmp_path):
    """What failed before is of no interest then."""
    faults = []
    save = bench_cmd._saver(str(tmp_path / "out" / "r.json"), faults)
    (tmp_path / "out").rmdir()
    save({"rows": [1]})
    assert len(faults) == 1
    (tmp_path / "out").mkdir()
    save({"rows": [1, 2]})
    assert faults == []
    assert json.loads((tmp_path / "out" / "r.json").read_text()) == {"rows": [1, 2]}


@pytest.mark.parametrize(("plot", "says"), [("a.gif", "must end in .png"), ("x", "must end in")])
def test_bench_refuses_a_picture_before_it_measures(plot, says, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_cmd, "run_benches", None)
    assert main([*BENCH, "--plot", str(tmp_path / plot)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_device_that_takes_nothing(capsys):
    """/dev/full, a disk that is full for real: the report is kept under its name elsewhere."""
    assert main([*RUN, "--report", "/dev/full"]) == 2
    said = capsys.readouterr()
    error = said.err.splitlines()[-1] + "\n"
    assert "No space left on device: '/dev/full'" in error
    assert kept_report(error, Path("/dev/full"))["digest"] in said.out
    assert Path("/dev/full").is_char_device()
