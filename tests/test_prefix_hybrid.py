"""Prefix hits beside layers that see all keys: rings from a snapshot, pages block by block."""

from pathlib import Path

import numpy as np
import pytest
from prefix_story import STACKED, Run, prompt_of

import ringslab as rs
from ringslab.engine.traces import TraceEntry
from ringslab.schedules.prefix_index import Entry

HYBRID = Path(__file__).with_name("tiny_hybrid.yaml")
IDS = {"a": (1, 2, 3, 4), "b": (1, 2, 3, 7, 8), "c": (1, 2, 3, 7, 8, 9), "d": (5, 6)}
TRACE = [TraceEntry(id, 8 * len(ids), 6, 0.0, ids, 8) for id, ids in IDS.items()]


def hybrid(contract, *overrides, backend="cpu", slots=None):
    overrides = (*STACKED, f"prefix.contract={contract}", *overrides)
    return rs.Engine(rs.load_config(HYBRID, overrides), backend, num_state_slots=slots)


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_a_hybrid_run_with_hits_verifies_itself(backend, activations):
    """4 requests, one after another: 3 + 5 blocks come from the cache, pages and rings alike, and
    the outputs are within the bound of float64 over the whole history."""
    with hybrid(
        "full",
        f"run.activations={activations}",
        "run.verify_samples=60",
        "engine.max_prefill_seqs=1",
        backend=backend,
        slots=1,
    ) as engine:
        report = engine.run(TRACE, verify=True)
    assert report["verify"]["passed"] is True
    prefix = report["prefix"]
    assert (prefix["hit_blocks"], prefix["best_blocks"]) == (8, 8)
    assert [item["cached_tokens"] for item in report["completed"]] == [0, 24, 40, 0]
    kinds = prefix["kinds"]
    assert kinds["pages"]["hit_blocks"] == kinds["rings"]["hit_blocks"] == 8
    assert kinds["pages"]["bytes"] > kinds["pages"]["entries"] * 2 * 4096


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_bits_after_a_hit_are_those_of_a_run_alone(name):
    """Preempted, evicted, with drafts kept and dropped: the bits of an engine without a cache. The
    pool is small, so pages move between sequences."""
    rng = np.random.default_rng(3)
    wanted = {}
    with hybrid(
        "full", "prefix.budget_bytes=150000", "engine.num_blocks=40", backend=name
    ) as engine:
        run = Run(engine)
        for turn in range(12):
            names = [10 * k + int(rng.integers(2)) for k in range(rng.integers(1, 5))]
            run.submit(f"r{turn}", prompt_of(*names, tail=int(rng.integers(1, 8))), 9)
            for _ in range(int(rng.integers(1, 12))):
                run.step(
                    drafts=lambda id, room: (min(2, room), int(rng.integers(min(2, room) + 1)))
                )
            if turn % 4 == 3:
                live = [i for i in run.known if engine.scheduler.state(i) in ("prefill", "decode")]
                if live:
                    engine.preempt(live[-1])
        run.run()
        assert engine.prefix.planner.counters.hits > 2
        assert engine.prefix.index.stats["pages"].evicted > 0
        assert engine.scheduler.free_blocks == 40
    with hybrid("none", backend=name) as engine:
        alone = Run(engine)
        for id, known in run.known.items():
            alone.submit(id, known, 0)
            alone.run()
            wanted |= alone.outputs
    for key, rows in run.outputs.items():
        np.testing.assert_array_equal(rows, wanted[key])


def test_a_page_that_is_gone_hides_what_is_behind_it():
    """The pages of block 2 vanish from the store: 1 of 4 blocks can be had, what needs the lost
    ones is forgotten, and the outputs are right."""
    with hybrid("full", slots=1) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4), 0)
        run.run()
        keys = engine.prefix.planner._rows  # gone with the request
        assert not keys
        values = engine.prefix.store.shelf._values
        pages = [name for name in values if b"/pages/" in name]
        assert len(pages) == 4
        del values[pages[1]]
        run.submit("b", prompt_of(1, 2, 3, 4, tail=2), 0)
        run.run()
        assert run.first_outputs["b"] == (8, 8)
        assert engine.prefix.planner.counters.failed_reads == 1
        assert Entry("pages", pages[0].rpartition(b"/pages/")[2]) in engine.prefix.index
        run.submit("c", prompt_of(1, 2, 3, 4, tail=3), 0)
        run.run()
        assert run.first_outputs["c"] == (32, 32)  # b has put them back


def test_lmdb_keeps_pages_too(tmp_path):
    """A second engine finds rings and pages of 3 blocks."""
    pytest.importorskip("lmdb")
    found = []
    for _ in range(2):
        with hybrid("full", f"prefix.store='lmdb:{tmp_path}/store'", slots=1) as engine:
            run = Run(engine)
            run.submit("a", prompt_of(1, 2, 3, tail=2), 0)
            run.run()
            found.append(run.first_outputs["a"][0])
    assert found == [0, 24]
