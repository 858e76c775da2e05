"""Reports of a run, and of the contracts side by side, as pictures."""

import errno

import pytest
from engine_runs import tiny

import ringslab as rs
from ringslab.engine.traces import TraceEntry
from ringslab.errors import ArgumentError
from ringslab.tools.drawing.figure import check_plot_path
from ringslab.tools.drawing.prefix import write_contracts
from ringslab.tools.drawing.run import write_plots

TRACE = [TraceEntry(f"r{i}", 20, 5, 0.01 * i, (1, 2 + i % 2, 9), 8) for i in range(4)]


@pytest.mark.parametrize("contract", ["none", "full"])
def test_four_panels(tmp_path, contract):
    """With and without a prefix cache, arrivals waited for: an SVG that names what it shows."""
    pytest.importorskip("matplotlib")
    with rs.Engine(
        tiny(f"prefix.contract={contract}", "run.trace.time_scale=1.0"), "cpu"
    ) as engine:
        report = engine.run(TRACE)
    path = tmp_path / "run.svg"
    check_plot_path(str(path))
    write_plots(report, str(path))
    text = path.read_text()
    for words in ("State slots over time", "Prefix cache", "Latency", "Bytes"):
        assert f"<!-- {words} -->" in text
    assert ("<!-- best possible on this trace -->" in text) == (contract == "full")


def test_a_name_that_says_no_kind():
    with pytest.raises(ArgumentError, match="must end in"):
        check_plot_path("picture")


def contracts():
    """A report of `ringslab prefix`: 8 prompt blocks of the cache, of which `full` hits 3; the run
    without one counts 2 blocks of the trace."""
    row = {"seconds": 1.0, "computed_tokens": 9, "replayed_tokens": 0, "difference": {}}
    for part in ("stored_layers", "rebuilt_layers"):
        row["difference"][part] = {"largest": 0.0}
    none = row | {"contract": "none", "prompt_blocks": 2, "hit_blocks": 0, "best_blocks": None}
    full = row | {"contract": "full", "prompt_blocks": 8, "hit_blocks": 3, "best_blocks": 4}
    return {"model": "m", "backend": "cpu", "requests": 2, "rows": [none, full]}


def test_contracts_count_blocks_of_the_cache(tmp_path):
    """The title has the cache's 8 blocks; the trace's 2 are another unit."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "contracts.svg"
    write_contracts(contracts(), str(path))
    assert "<!-- Prompt blocks, of 8 -->" in path.read_text()


@pytest.mark.parametrize(
    ("suffix", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("PDF", b"%PDF")]
)
def test_a_failed_picture_leaves_the_old_one(suffix, begins, tmp_path, monkeypatch):
    """Each format of a plot is what its suffix says, and stays whole where the disk is full."""
    pytest.importorskip("matplotlib")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / f"contracts.{suffix}"
    write_contracts(contracts(), str(path))
    old = path.read_bytes()
    assert old.startswith(begins)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*contracts"):
        write_contracts(contracts() | {"model": "other"}, str(path))
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
