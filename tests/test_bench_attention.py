"""What attention adds to benchmark reports: tiles, growth with length, several peers."""

import numpy as np
import pytest
from test_bench import CEILINGS, UnbackedPlace

from ringslab.tools.bench import common, growth, runs, table


def test_visited_tiles_are_counted(monkeypatch):
    """N = 8,192, W = 1,024: 540 tiles of 128 x 128, whose FLOPs stand in the row beside those of
    the visible pairs, at the same time."""
    place = UnbackedPlace(monkeypatch, "window_attention")
    shape = {"layer": "mistral", "window": 1024, "sequences": 1, "tokens": 8192}
    bench = runs.bench_of("window_attention")
    work = bench.prepare(place, None, shape, np.random.default_rng(1))
    assert work.visited_flops == 540 * 128 * 128 * 4 * 128 * 32
    row = common.numbers([100.0], work, CEILINGS)
    assert row["visited_tflops"] / row["tflops"] == pytest.approx(work.visited_flops / work.flops)
    assert bench.sequence_ends(10, 3).tolist() == [0, 3, 6, 10]


def test_growth_is_fitted():
    """Times of 1, 2 and 4 units over 4,096, 8,192 and 16,384 tokens grow as tokens^1, times of 1,
    4, 16 as tokens^2; two lengths, or a row without a time, are not fitted."""

    def rows(window, times):
        lengths = (4096, 8192, 16384)
        shapes = [{"window": window, "tokens": length} for length in lengths]
        named = zip(shapes, times, strict=False)
        return [{"op": "window_attention", "shape": s, "median_us": t} for s, t in named]

    found = list(growth.exponents(rows(128, (1, 2, 4)) + rows("none", (1, 4, 16))))
    assert [item[1] for item in found] == [{"window": 128}, {"window": "none"}]
    assert [item[3] for item in found] == pytest.approx([1.0, 2.0])
    assert found[0][2] == 4.0
    assert not list(growth.exponents(rows(128, (1, 2)) + rows(64, (1, 2, None))))


def test_peers_stand_side_by_side():
    """Two rows with two libraries, one of which refused a shape: a column each, an empty cell."""
    rows = [
        {
            "op": "window_attention",
            "shape": {"window": 128},
            "median_us": 10.0,
            "peers": {"A": 20.0},
        },
        {"op": "window_attention", "shape": {"window": 64}, "median_us": 5.0, "peers": {"B": 7.5}},
        {"op": "apply_rope", "shape": {}, "median_us": 1.0},
    ]
    lines = table.peers_table(rows).splitlines()
    assert lines[0] == "| operation | shape | ours us | A us | B us |"
    assert lines[2:] == [
        "| window_attention | 128 window | 10.0 | 20.0 |  |",
        "| window_attention | 64 window | 5.00 |  | 7.50 |",
    ]
