"""`ringslab prefix`: the contracts side by side, and what snapshots cost."""

import json

import pytest
from engine_runs import TINY

import ringslab as rs
from ringslab.engine.engine import Engine
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
    both = zip(found["seconds"]["bounded"], found["seconds"]["none"], strict=True)
    assert found["turn_ratios"] == [one / other for one, other in both]


def test_overhead_alternates_who_goes_first(capsys, trace):
    """A host that slows down would favour one."""
    words = ("--overhead", "2", "--set", "run.trace.num_requests=2")
    assert main(["prefix", str(TINY), *COMMON, *words]) == 0
    said = [line.split() for line in capsys.readouterr().err.splitlines()]
    turns = [(words[1], words[-1]) for words in said if words[:1] == ["turn"]]
    order = ["none", "bounded", "bounded", "none", "none", "bounded"]
    assert turns == [(str(i // 2), name) for i, name in enumerate(order)]


def test_a_store_that_outlives_a_run(capsys, trace, tmp_path):
    """Contracts and comparisons share the directory and hit nothing of each other: the second
    comparison has the numbers of the first, and nothing is left in the store."""
    url = f"lmdb:{tmp_path / 's'}"
    words = ("--trace", trace, "--set", f"prefix.store={url}", "--contracts", "none,exact,bounded")
    hits = [[row["hit_blocks"] for row in ask(capsys, *words)["rows"]] for _ in range(2)]
    assert hits == [[0, 8, 8], [0, 8, 8]]
    with rs.open_store(url) as store, store.shelf._env.begin() as txn:
        assert txn.stat(store.shelf._values)["entries"] == 0


@pytest.mark.parametrize(("lines", "asked", "warm"), [(10, 10, 8), (3, None, 3), (10, 5, 5)])
def test_a_few_requests_warm_up(capsys, monkeypatch, tmp_path, lines, asked, warm):
    """The first 8 requests, or as many as there are, run before the contracts; nothing of that run
    is in the table or in the first contract's store."""
    run, counts = Engine.run, []

    def counted(engine, *args, **options):
        report = run(engine, *args, **options)
        counts.append(report["requests"])
        return report

    monkeypatch.setattr(Engine, "run", counted)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % (i, 2 * 512, [1, 10 + i]) for i in range(lines)))
    words = ["--trace", str(path), "--contracts", "full,none"]
    words += ["--set", f"prefix.store=lmdb:{tmp_path / 's'}"]
    if asked is None:
        words += ["--set", "run.trace.kind=mooncake", "--set", f"run.trace.path={path}"]
    words += ["--set", f"run.trace.num_requests={asked or 'null'}"]
    found = ask(capsys, *words)
    whole = asked or lines
    assert counts == [warm, whole, whole]
    assert [row["hit_blocks"] for row in found["rows"]] == [whole - 1, 0]


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_ctrl_c_ends_the_comparison(capsys, monkeypatch, trace, tmp_path, runs):
    """Warming up, or a contract's run, that was interrupted is compared with nothing: status 130,
    no table and no report."""
    run, seen = Engine.run, []

    def interrupted(engine, *args, **options):
        seen.append(run(engine, *args, **options))
        return seen[-1] | {"interrupted": len(seen) == runs}

    monkeypatch.setattr(Engine, "run", interrupted)
    report = tmp_path / "report.json"
    words = ["prefix", str(TINY), *COMMON, "--trace", trace, "--report", str(report)]
    assert main(words) == 130
    assert len(seen) == runs
    assert capsys.readouterr().out == ""
    assert not report.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--overhead", "0"), "--overhead 0"),
        (("--overhead", "-1"), "--overhead -1"),
        (("--overhead", "1", "--contracts", "full,none"), "takes snapshots"),
        (("--watch", "-1"), "--watch -1"),
    ],
)
def test_counts_that_make_no_sense(capsys, words, problem):
    assert main(["prefix", str(TINY), *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_contract_that_is_none(capsys):
    assert main(["prefix", str(TINY), "--contracts", "full"]) == 2
    assert "two or more of none, full" in capsys.readouterr().err


HYBRID = str(TINY.with_name("tiny_hybrid.yaml"))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ((), "exact or bounded"),
        (("--contracts", "none,full,bounded"), "bounded"),
        (("--contracts", "exact,none"), "exact"),
        (("--overhead", "1"), "bounded"),
    ],
)
def test_a_contract_that_the_model_cannot_have(capsys, monkeypatch, words, refused):
    """Layers that see all keys: `exact` and `bounded` are refused before `none` and `full` have
    run, with the contracts and what to give instead; that is taken."""
    monkeypatch.setattr(Engine, "__init__", None)
    assert main(["prefix", HYBRID, *words]) == 2
    error = capsys.readouterr().err
    assert f"cannot run under {refused} (" in error
    assert "full where layers see all keys" in error
    assert error.endswith("; take --contracts none,full\n")
    assert error.count("\n") == 1
    monkeypatch.undo()
    words = ("--contracts", "none,full,none", "--set", "run.trace.num_requests=2", "--json")
    assert main(["prefix", HYBRID, *words, "--backend", "reference"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["contract"] for row in rows] == ["none", "full", "none"]


def test_a_fault_that_is_not_the_contracts(capsys):
    """A block size that no contract can have is told as what it is."""
    assert main(["prefix", str(TINY), "--set", "prefix.block_size=7"]) == 2
    error = capsys.readouterr().err
    assert "prefix.block_size: got 7" in error
    assert "--contracts" not in error
