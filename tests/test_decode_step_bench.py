"""The benchmark of a whole decode step, small, on the CPU."""

import json

import pytest

from ringslab.errors import ArgumentError
from ringslab.tools.bench import decode_step


def test_a_step_is_measured(capsys, tmp_path):
    """Two numbers of sequences: replayed and called steps have one digest (else BenchError); each
    row has its times, and shares add up to 1."""
    out = tmp_path / "steps.json"
    command = ["--smoke", "--backend", "cpu", "--json", "--out", str(out)]
    assert decode_step.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == report
    assert [row["sequences"] for row in report["rows"]] == [1, 1, 3, 3]
    for row in report["rows"]:
        assert row["tokens"] == row["padded_tokens"]
        assert min(row["host_us"], row["device_us"], row["called_host_us"]) > 0
        assert sum(one["share"] for one in row["shares"]) == pytest.approx(1, abs=1e-2)
    assert any(line.endswith("%") for line in decode_step.table(report))
    with pytest.raises(ArgumentError, match="'1,x'"):
        decode_step.main(["--smoke", "--backend", "cpu", "--sequences", "1,x"])
