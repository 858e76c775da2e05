"""Reports of a run, and of the contracts side by side, as pictures."""

import pytest
from engine_runs import tiny

import ringslab as rs
from ringslab.engine.traces import TraceEntry
from ringslab.errors import ArgumentError
from ringslab.tools.plots import check_plot_path, write_contracts, write_plots

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


def test_contracts_count_blocks_of_the_cache(tmp_path):
    """8 prompt blocks of the cache, of which `full` hits 3; the run without one counts 2 of the
    trace, which is another unit and not the title's."""
    pytest.importorskip("matplotlib")
    row = {"seconds": 1.0, "computed_tokens": 9, "replayed_tokens": 0, "difference": {}}
    for part in ("stored_layers", "rebuilt_layers"):
        row["difference"][part] = {"largest": 0.0}
    none = row | {"contract": "none", "prompt_blocks": 2, "hit_blocks": 0, "best_blocks": None}
    full = row | {"contract": "full", "prompt_blocks": 8, "hit_blocks": 3, "best_blocks": 4}
    report = {"model": "m", "backend": "cpu", "requests": 2, "rows": [none, full]}
    path = tmp_path / "contracts.svg"
    write_contracts(report, str(path))
    assert "<!-- Prompt blocks, of 8 -->" in path.read_text()
