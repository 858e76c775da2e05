"""Benchmark reports as Markdown and as a picture."""

import json
import sys

import pytest

from ringslab.tools import main as cli
from ringslab.tools.bench import table
from ringslab.tools.drawing.bench import panels_of


def test_out_and_table(capsys, tmp_path):
    """--out writes the report; the table has a line a row, the rates, and nothing by hand."""
    path = tmp_path / "new" / "report.json"
    argv = ["bench", "load_history", "--smoke", "--backend", "cpu", "--out", str(path)]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert table.main([str(path)]) == 0
    assert capsys.readouterr().out == printed
    report = json.loads(path.read_text())
    assert report["environment"]["command"]
    assert report["complete"] is True
    assert "| load_history | 3 sequences |" in printed
    assert "| copy of 1,048,576 B, read + written |" in printed


def test_table_of_peers_kernels_and_errors():
    """Peer, its ratio to ours, kernel and sustained time are columns where a row has them; a
    failed row is listed under the table."""
    good = {"op": "window_decode", "shape": {"heads": 64, "queries": 6}, "median_us": 125.0}
    good |= {"min_us": 124.0, "p90_us": 126.5, "floor_us": 103.0, "times_floor": 1.214}
    good |= {"gbps": 3509.0, "tflops": 412.0, "flops": 1, "kernel": "window_decode_sm90"}
    good |= {"peer": "torch.compile by hand", "peer_us": 250.0, "sustained_us": 130.0}
    bad = {"op": "apply_rope", "shape": {"tokens": 4096}, "error": "BackendError: no"}
    report = {"backend": "cuda", "device": "H200", "rows": [good, bad], "copy_bytes": 1 << 32}
    report |= {"copy_gbps": 4260.0, "sustained_copy_gbps": 4250.0, "matmul_dtype": "bfloat16"}
    report |= {"matmul_tflops": None, "sustained_matmul_tflops": None, "matmul_size": 8192}
    where = {"date": "2026-12-01", "command": "ringslab bench", "commit": "abc", "nvrtc": "13.0"}
    where |= {"versions": {"cupy-cuda13x": "14.2.0"}, "gpu": {"driver_version": "580.159.04"}}
    text = table.render([report | {"environment": where}])
    assert (
        "| window_decode | 64 heads, 6 queries | 125.0 | 124.0 .. 126.5 | 103.0 | 1.21 | 3,509 "
        "| 412.0 | 130.0 | 250.0 | 2.00 | window_decode_sm90 |" in text
    )
    assert "H200, driver 580.159.04, NVRTC 13.0, CuPy 14.2.0, commit abc" in text
    assert "- apply_rope (4,096 tokens): BackendError: no" in text


def test_plot_without_matplotlib(monkeypatch, capsys):
    """--plot names the extra before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "apply_rope", "--smoke", "--backend", "cpu", "--plot", "a.png"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'ringslab[plot]'" in error
    assert "measuring" not in error


def test_panels_of_a_plot():
    """Rows of 2 heads and 3 sequences are one panel along sequences with two lines of 3 points; a
    row without a time is left out."""
    rows = [
        {"op": "window_decode", "shape": {"heads": h, "sequences": s}, "median_us": 1.0}
        for h in (64, 128)
        for s in (512, 1, 16)
    ]
    rows.append({"op": "apply_rope", "shape": {"tokens": 1}, "median_us": None})
    panels = panels_of(rows)
    assert list(panels) == ["window_decode"]
    axis, lines = panels["window_decode"]
    assert axis == "sequences"
    assert {k: [r["shape"]["sequences"] for r in v] for k, v in lines.items()} == {
        "heads 64": [1, 16, 512],
        "heads 128": [1, 16, 512],
    }


def test_plot_is_a_picture(capsys, tmp_path):
    """With matplotlib, --plot writes a PNG."""
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    path = tmp_path / "a.png"
    argv = ["bench", "plan_decode", "load_history", "--smoke", "--backend", "cpu"]
    assert cli.main([*argv, "--sequences", "2,3,5", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
