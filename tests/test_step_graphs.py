"""Captured decode steps from run to run of an engine: replayed where nothing has changed."""

import numpy as np
import pytest
from engine_runs import tiny

import ringslab as rs
from ringslab.engine import activations as activations_module
from ringslab.engine.recorded_source import device_source
from ringslab.engine.traces import TraceEntry

TRACE = [TraceEntry(f"r{i}", 3 + 11 * i, (7, 9, 1, 20)[i], 0.0) for i in range(4)]


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_a_later_run_replays_what_an_earlier_one_captured(backend, activations):
    """The second run of an engine captures nothing and calls what it looks into only; a run that
    samples outputs between them changes nothing. Digests stay."""
    with rs.Engine(tiny(f"run.activations={activations}"), backend) as engine:
        first = engine.run(TRACE, graphs=True)
        launches = dict(engine.step_graphs)
        verified = engine.run(TRACE, graphs=True, verify=True)
        again = engine.run(TRACE, graphs=True)
        assert verified["verify"]["passed"] is True
        assert engine.step_graphs.items() == launches.items()
        assert again["digest"] == first["digest"] == verified["digest"]
        counts, before = again["decode_graphs"], first["decode_graphs"]
        assert counts["captured"] == before["captured"]
        assert counts["called_steps"] < before["called_steps"]
        assert counts["replayed_steps"] > before["replayed_steps"]
    assert engine.step_graphs == {}


def test_new_sinks_are_captured_anew(backend):
    """Captured steps read the sinks that were there: set_sink forgets them, and the next run has
    the digest of an engine that had these sinks from the start."""
    sink = np.linspace(-1, 1, 4, dtype=np.float32)
    with rs.Engine(tiny(), backend) as engine:
        layer = next(one.id for one in engine.cfg.layers if one.sink)
        before = engine.run(TRACE, graphs=True)["digest"]
        engine.set_sink(layer, sink)
        assert engine.step_graphs == {}
        found = engine.run(TRACE, graphs=True)
    with rs.Engine(tiny(), backend) as engine:
        engine.set_sink(layer, sink)
        assert engine.run(TRACE, graphs=False)["digest"] == found["digest"] != before


def test_recorded_arrays_are_captured_in_each_run(backend, tmp_path, monkeypatch):
    """Their rows lie elsewhere in every run: what was captured of another run is not replayed."""
    rng = np.random.default_rng(1)
    arrays = {
        f"{name}.{layer}": rng.integers(0, 0x4000, (60, *shape)).astype(np.uint16)
        for layer in range(4)
        for name, shape in (("q", (4, 128)), ("kv", (128,)))
    }
    path = tmp_path / "recorded.npz"
    np.savez(path, **arrays)
    monkeypatch.setattr(activations_module, "file_source", device_source)
    with rs.Engine(tiny("run.activations=file", f"run.activations_path={path}"), backend) as engine:
        reports = [engine.run(TRACE, graphs=True) for _ in range(2)]
    assert reports[0]["digest"] == reports[1]["digest"]
    assert reports[0]["decode_graphs"] == reports[1]["decode_graphs"]
