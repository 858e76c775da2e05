"""The run report: percentiles, byte counts, atomic writes, and the digest that ends it."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ringslab as rs
from ringslab.engine.digests import combine, open_digests
from ringslab.engine.report import (
    bytes_per_sequence,
    percentiles,
    write_report,
)
from ringslab.rawkernels.memory import load_memory
from ringslab.rawkernels.reference.activation_hash import GOLDEN64, splitmix64


def test_percentiles_of_known_times():
    """1 .. 100 s: p50 50.5, p99 99.01, max 100; no times give None, not NaN."""
    found = percentiles([float(i) for i in range(1, 101)])
    wanted = {"p50": 50.5, "p90": 90.1, "p99": 99.01, "mean": 50.5, "max": 100.0}
    assert found == pytest.approx(wanted)
    assert percentiles([]) is None


def test_a_report_is_json(tmp_path):
    """A NaN is refused before the old file is touched."""
    path = tmp_path / "report.json"
    write_report({"digest": "old"}, path)
    with pytest.raises(ValueError, match="JSON"):
        write_report({"digest": float("nan")}, path)
    assert json.loads(path.read_text()) == {"digest": "old"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_path_is_tried_before_a_run(tmp_path):
    """A folder that is absent, and a path that is a folder: OSError before the first step."""
    with rs.Engine(rs.load_config(Path(__file__).with_name("tiny.yaml")), "reference") as engine:
        for bad, says in ((tmp_path / "absent" / "r.json", "No such file"), (tmp_path, "Is a dir")):
            with pytest.raises(OSError, match=says):
                engine.run(report_path=bad)
            assert engine.scheduler.counters.submitted == 0


def test_bytes_per_sequence_of_the_smallest_model():
    """4 rings of 11 x 132 B padded to 1,472 and one compression state of 4,096: 9,984 B."""
    layout = rs.load_config(Path(__file__).with_name("tiny.yaml")).slot_layout
    slab = rs.empty_slab(layout, 3)
    assert bytes_per_sequence(layout, slab, 3) == {
        "measured": 9984,
        "formula": 9984,
        "stored": 2944,
    }


def step(starts, ends, order=None):
    """A batch of sequences with new tokens starts[i] .. ends[i]."""
    starts, ends = np.array(starts), np.array(ends)
    cu = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
    return SimpleNamespace(
        seqlens_k=ends,
        seqlens_q=ends - starts,
        cu_seqlens_q=cu,
        num_tokens=int(cu[-1]),
        first_outputs=np.zeros(len(starts), np.int32),
    )


def run_digests(steps, capacity=64):
    """Sums of two requests whose token sums are 1000 * request + position."""
    log = open_digests(np.empty(capacity, np.uint64), [10, 5], load_memory("cpu"))
    for requests, starts, ends, kept in steps:
        batch = step(starts, ends)
        view = log.begin(batch.num_tokens)
        assert not view.any()
        for i, request in enumerate(requests):
            begin, end = batch.cu_seqlens_q[i : i + 2]
            view[begin:end] = 1000 * request + np.arange(starts[i], ends[i])
        log.keep(batch, np.array(requests), np.array(kept))
    log.flush()
    return log.sums.tolist()


def test_digests_do_not_depend_on_the_schedule():
    """Request 0 computes positions 0..9 and request 1 0..4: in one batch, in chunks with a rejected
    draft, with positions computed again after a preemption, and with the last token fed back as a
    draft (position 10, which does not count) the sums are the same."""
    with np.errstate(over="ignore"):
        want = [
            int(
                sum(
                    splitmix64(np.uint64(1000 * r + p) ^ (np.uint64(p) * GOLDEN64))
                    for p in range(n)
                )
            )
            for r, n in ((0, 10), (1, 5))
        ]
    whole = [([0, 1], [0, 0], [10, 5], [10, 5])]
    chunks = [
        ([1], [0], [5], [5]),
        ([0], [0], [6], [6]),
        ([0], [6], [9], [1]),
        ([0], [7], [10], [3]),
    ]
    again = [([0], [0], [7], [7]), ([0, 1], [0, 0], [9, 5], [9, 5]), ([0], [9], [11], [2])]
    for steps in (whole, chunks, again):
        assert run_digests(steps) == want
        assert run_digests(steps, capacity=31) == want


def test_the_combined_digest_ignores_order_and_sees_each_request():
    assert combine({"a": "01", "b": "02"}) == combine({"b": "02", "a": "01"})
    assert combine({"a": "01", "b": "02"}) != combine({"a": "02", "b": "01"})
