"""`ringslab prefix`: the contracts side by side, and what snapshots cost."""

import json

import pytest
from engine_runs import TINY

from ringslab.tools.main import main

LINE = '{"timestamp": %d, "input_length": %d, "output_length": 6, "hash_ids": %s}\n'
COMMON = ("--set", "run.trace.hash_block_tokens=8", "--set", "engine.num_state_slots=1", "--set",
          "run.activations=stacked", "--backend", "cpu", "--watch", "60", "--json")  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Three prompts of 5 blocks that share 4, of 512 tokens in the file and 8 here."""
    path = tmp_path / "trace.jsonl"
    lines = [LINE % (i, 5 * 512 - 100, [1, 2, 3, 4, 10 + i]) for i in range(3)]
    path.write_text("".join(lines))
    return str(path)


def ask(capsys, *words):
    assert main(["prefix", str(TINY), *COMMON, *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_contracts_side_by_side(capsys, trace):
    """2 hits of 4 blocks each: `full` computes 64 tokens less, `exact` replays 22 of each 32 and
    gives the same bits, `bounded` replays 8 and differs in the rebuilt layer alone."""
    rows = {row["contract"]: row for row in ask(capsys, "--trace", trace)["rows"]}
    plain = rows["none"]["prefill_tokens"]
    for contract, replayed in (("full", 0), ("exact", 2 * 22), ("bounded", 2 * 8)):
        row = rows[contract]
        assert (row["hit_blocks"], row["best_blocks"]) == (8, 8)
        assert row["replayed_tokens"] == replayed
        assert row["prefill_tokens"] == plain - 64 + replayed
        assert row["difference"]["stored_layers"]["differ"] == 0
        assert row["difference"]["stored_layers"]["outputs"] > 0
        assert (row["difference"]["rebuilt_layers"]["differ"] > 0) == (contract == "bounded")
    size = 2 * 1472
    assert rows["exact"]["store_bytes_out"] == 2 * size
    assert rows["full"]["store_bytes_out"] == 2 * 2 * size


def test_overhead(capsys, trace):
    """Twice each, in turns, the cache emptied before: one row of seconds a turn, and no hit of a
    prompt that shares nothing."""
    found = ask(capsys, "--overhead", "2", "--set", "run.trace.num_requests=3")
    assert [len(times) for times in found["seconds"].values()] == [2, 2]
    assert found["hit_blocks"] == 0
    assert found["snapshots"] > 0
    assert found["ratio"] > 0


def test_a_contract_that_is_none(capsys):
    assert main(["prefix", str(TINY), "--contracts", "full"]) == 2
    assert "two or more of none, full" in capsys.readouterr().err
