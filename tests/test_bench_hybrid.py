"""`ringslab bench --config` of a model that keeps K and V apart: the record operations and
attention take pairs, checked against the reference."""

import json

import pytest

from ringslab.tools import main as cli

OPS = (
    "encode_records",
    "ring_store",
    "store_records",
    "load_history",
    "window_decode",
    "window_prefill",
)


@pytest.mark.parametrize("op", OPS)
def test_bench_of_a_hybrid_model(capsys, op):
    """The smoke shape on the CPU with 8 KV heads of 64: the result is checked and timed."""
    config = ["--config", "quickstart_hybrid.yaml"]
    status = cli.main(["bench", op, *config, "--smoke", "--json", "--backend", "cpu"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert status == 0, row
    assert row["median_us"] > 0


def test_bytes_of_a_pair(capsys):
    """encode_records: K and V of 8 heads of 64 in bf16, a position, a record of 1,056 bytes."""
    config = ["--config", "quickstart_hybrid.yaml", "--smoke", "--json", "--backend", "cpu"]
    cli.main(["bench", "encode_records", *config])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["bytes"] == row["shape"]["tokens"] * (2 * 2 * 8 * 64 + 4 + 1056)
