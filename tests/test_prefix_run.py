"""Runs with a prefix cache: hits of a trace, digests, verification, n-gram drafts, arrivals."""

import time
from pathlib import Path

import numpy as np
import pytest
from engine_runs import preempt_every_third, tiny

import ringslab as rs
from ringslab.engine.ngram import NgramDrafts
from ringslab.engine.occupancy import MOST_POINTS, Occupancy
from ringslab.engine.run_requests import load_requests
from ringslab.engine.tokens import PASSAGE_TOKENS, StepTokens, TokenRules, request_key
from ringslab.engine.traces import TraceEntry, read_trace

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
CONVERSATION = SHARED / "mooncake_conversation_first2000.jsonl"
needs_trace = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the public traces are not beside the repository"
)

# Prompts of 8-token blocks: b shares 3 with a, c all 5 of b, d nothing; e is b again.
IDS = {
    "a": (1, 2, 3, 4),
    "b": (1, 2, 3, 7, 8),
    "c": (1, 2, 3, 7, 8, 9),
    "d": (5, 6),
    "e": (1, 2, 3, 7, 8),
}
TRACE = [TraceEntry(id, 8 * len(ids), 6, 0.0, ids, 8) for id, ids in IDS.items()]
ONE_BY_ONE = ("engine.num_state_slots=1", "engine.max_prefill_seqs=1")


def run(backend, contract, *overrides, trace=TRACE, **options):
    with rs.Engine(tiny(f"prefix.contract={contract}", *overrides), backend) as engine:
        return engine.run(trace, **options)


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
@pytest.mark.parametrize("contract", ["full", "exact", "bounded"])
def test_a_run_with_hits_verifies_itself(backend, contract, activations):
    """5 requests, 25 blocks: 3 + 5 + 0 + 5 can be had. Outputs after hits are those of the whole
    history, in float64; `exact` starts above 0 only past its reach of 21."""
    report = run(
        backend, contract, f"run.activations={activations}", "run.verify_samples=60", *ONE_BY_ONE,
        verify=True,
    )  # fmt: skip
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] >= 15
    prefix = report["prefix"]
    assert (prefix["prompt_blocks"], prefix["best_blocks"], prefix["hit_blocks"]) == (22, 13, 13)
    assert (prefix["hits"], prefix["share_of_best"]) == (3, 1.0)
    assert [item["cached_tokens"] for item in report["completed"]][:4] == [0, 24, 40, 0]
    assert prefix["store"]["bytes_in"] == prefix["snapshots"] * prefix["snapshot_bytes"]
    computed = report["throughput"]["computed_tokens"]
    assert computed < run(backend, "none", *ONE_BY_ONE)["throughput"]["computed_tokens"]


def test_digests_are_of_the_request_and_of_no_replay(backend):
    """A request without a hit has the digest of a run without a cache; one with a hit has that of
    the positions that it computed for its own sake, whatever the contract replayed before them."""
    plain = run(backend, "none", *ONE_BY_ONE)
    found = {c: run(backend, c, *ONE_BY_ONE) for c in ("full", "exact", "bounded")}
    digests = {
        c: {item["id"]: item["digest"] for item in report["completed"]}
        for c, report in (found | {"none": plain}).items()
    }
    for id in "ad":
        assert len({each[id] for each in digests.values()}) == 1
    for id in "bc":
        assert digests["exact"][id] == digests["bounded"][id] == digests["full"][id]
        assert digests["full"][id] != digests["none"][id]


def test_concurrent_arrival_never_has_more(backend):
    """All at once, 4 slots: fewer blocks than one after another, and the same outputs."""
    report = run(backend, "full", "run.verify_samples=40", verify=True)
    assert report["verify"]["passed"] is True
    assert report["prefix"]["hit_blocks"] <= report["prefix"]["best_blocks"] == 13


def test_a_second_run_finds_what_the_first_left():
    """The same trace again: every whole block but of the last tokens; another seed finds none."""
    with rs.Engine(tiny("prefix.contract=full", *ONE_BY_ONE), "cpu") as engine:
        first = engine.run(TRACE)
        again = engine.run(TRACE)
    assert again["prefix"]["store"]["bytes_in"] < first["prefix"]["store"]["bytes_in"]
    assert again["prefix"]["kinds"]["rings"]["lookups"] == 5
    assert again["prefix"]["kinds"]["rings"]["entries"] > 0
    assert again["prefix"]["hit_blocks"] == 22
    assert again["prefix"]["best_blocks"] == 13  # of this trace alone
    with rs.Engine(tiny("prefix.contract=full", *ONE_BY_ONE), "cpu") as engine:
        engine.run(TRACE)
        engine.prefix.depend_on("run", "seeded", "2")
        assert next(engine.prefix.index.boundaries([b"x" * 16]), 0) == 0
        engine.submit(rs.Request("z", TRACE[0].prompt(seed=1, vocab_size=1000), 0))
        assert engine.next_batch().start_positions.tolist() == [0]


@needs_trace
def test_a_scaled_trace_has_the_same_blocks():
    """Ids of 4 tokens for 512: 322 of the blocks of the first 200 requests, as unscaled."""
    entries = read_trace(CONVERSATION, num_requests=200, block_tokens=4)
    full = read_trace(CONVERSATION, num_requests=200)
    for one, other in zip(entries, full, strict=True):
        assert one.prompt_len // 4 == other.prompt_len // 512
        assert (one.prompt_len % 4 == 0) == (other.prompt_len % 512 == 0)
    limits = ("engine.token_budget=64", "model.max_seq_len=4096", "run.trace.hash_block_tokens=4")
    cfg = tiny("prefix.contract=full", "prefix.block_size=4", *limits, *ONE_BY_ONE)
    with rs.Engine(cfg, "cpu") as engine:
        report = engine.run(entries[:40])
    assert report["prefix"]["hit_blocks"] == report["prefix"]["best_blocks"]
    seen, best = set(), 0
    for entry in full[:40]:
        ids = entry.hash_ids[: entry.prompt_len // 512]
        best += next((k for k, id in enumerate(ids) if id not in seen), len(ids))
        seen.update(ids)
    assert report["prefix"]["best_blocks"] == best > 0


def test_passages_repeat():
    """Rate 0.9: most passages of 16 tokens equal one of the 8 before them, token by token, and the
    same request says the same. Rate 0 says what it always did."""
    keys = np.array([request_key("a")], np.uint64)
    where = np.arange(1000)
    plain = TokenRules(1, 50_000, 0.5, 4).next_tokens(keys, where)
    said = TokenRules(1, 50_000, 0.5, 4, 0.9).next_tokens(keys, where)
    rows = said[: 1000 // PASSAGE_TOKENS * PASSAGE_TOKENS].reshape(-1, PASSAGE_TOKENS)
    repeats = [any((rows[i] == rows[j]).all() for j in range(max(i - 8, 0), i)) for i in range(62)]
    assert sum(repeats) > 45
    assert len(set(plain.tolist())) > 950
    assert not repeats[0]


def test_ngram_drafts_are_what_followed():
    """1 2 3 9 8 ... 1 2 3: drafts 9 8 ...; nothing where the last three tokens are new; what was
    kept of the drafts counts as said."""
    drafts = NgramDrafts(2)
    speaks, prompts = np.array([True]), [lambda: np.array([1, 2, 3, 9, 8, 1, 2], np.int32)]
    none = np.zeros((1, 2), np.int32)

    def step(kept, token, tried=none):
        tokens = StepTokens(np.array([kept]), np.array([token]), none)
        return drafts.after(np.array([0]), speaks, prompts, tokens, tried).tolist()

    assert step(0, 3) == [[9, 8]]
    assert step(2, 1, np.array([[9, 8]])) == [[2, 3]]
    assert step(0, 7) == [[-1, -1]]
    drafts.forget(np.array([0]))
    assert not drafts.histories


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_ngram_drafts_change_no_output(backend, activations):
    """Repeating passages, drafts of 0 to 2 tokens in one batch: some are kept, and the digest is
    that of seeded drafts."""
    trace = [TraceEntry(f"r{i}", 5 + 9 * i, 60, 0.0) for i in range(4)]
    common = (f"run.activations={activations}", "run.repeat_rate=0.9")
    seeded = run(backend, "none", *common, trace=trace)
    ngram = run(backend, "full", "run.drafts=ngram", *common, trace=trace)
    assert ngram["digest"] == seeded["digest"]
    batches = ngram["batches"]
    assert 0 < batches["accepted_drafts"] < batches["drafted_tokens"]
    assert batches["decode"]["steps"] < 4 * 60


def test_arrivals_are_waited_for():
    """Two requests half a second apart, at a fifth of the time: the second starts after 0.1 s, its
    times count from then on, and the queue is part of them."""
    trace = [TraceEntry("a", 9, 4, 0.0), TraceEntry("b", 9, 4, 0.5)]
    start = time.perf_counter()
    report = run("cpu", "none", "run.trace.time_scale=0.2", trace=trace)
    assert time.perf_counter() - start > 0.1
    assert report["latency"]["since"] == "arrival"
    for item in report["times"]:
        assert 0 <= item["queue_s"] <= item["first_token_s"]
        assert item["per_token_s"] > 0
    assert report["latency"]["queue_s"]["p50"] < 0.1
    assert run("cpu", "none", trace=trace)["latency"]["queue_s"] is None
    assert max(report["occupancy"]["slots"]) == 1


def test_occupancy_keeps_its_size():
    """5,000 steps leave 512 to 1,024 points, evenly spaced, the first among them."""
    noted = Occupancy()
    for step in range(5000):
        noted.note(step / 10, step % 7, step)
    times = noted.as_report()["waiting"]
    assert MOST_POINTS // 2 <= len(times) <= MOST_POINTS
    assert times == list(range(0, 5000, noted.stride))


def test_requests_of_a_caller_keep_their_ids():
    """A list of Request: ids go with them; ids that do not cover the prompt are refused."""
    cfg = tiny("prefix.contract=full")
    (request,) = load_requests(cfg, [rs.Request("a", list(range(16)), 1, 0.0, (4, 5))])
    assert request.hash_ids == (4, 5)
    with rs.Engine(cfg, "cpu") as engine, pytest.raises(rs.errors.RequestError, match="hash_ids"):
        engine.submit(rs.Request("a", list(range(16)), 1, 0.0, (4,)))


@pytest.mark.parametrize("contract", ["full", "exact"])
def test_what_a_replay_computes_is_no_sample(contract):
    """A sequence that is preempted behind its samples replays tokens below its prefix: what the
    samples saw before stays, and their outputs pass."""
    done = []

    def preempt_once(engine, batch):
        if batch.kind == "decode" and not done:
            done.append(engine.preempt("a"))

    trace = [rs.Request("a", np.arange(51, dtype=np.int32), 6)]
    options = ("run.activations=stacked", "run.verify_samples=64", "engine.token_budget=64")
    report = run("cpu", contract, *options, trace=trace, verify=True, on_step=preempt_once)
    assert report["scheduler"]["preempted"] == 1
    assert report["prefix"]["restores"] == 1
    assert report["verify"]["passed"] is True


@pytest.mark.parametrize("contract", ["full", "exact", "bounded"])
def test_captured_steps_and_preemption(backend, contract):
    """Decode steps replayed from graphs, n-gram drafts, and every third step a preemption whose
    victim finds its own snapshots: outputs are right, and the tokens are those of a plain run."""
    trace = [TraceEntry(f"r{i}", 40 + 9 * i, 30, 0.0) for i in range(3)]
    options = ("run.drafts=ngram", "run.repeat_rate=0.8", "run.verify_samples=60")
    preempt = preempt_every_third()
    report = run(
        backend, contract, *options, trace=trace, verify=True, graphs=True, on_step=preempt
    )
    assert report["verify"]["passed"] is True
    assert report["scheduler"]["preempted"] > 5
    assert report["prefix"]["restores"] > 0
    assert report["prefix"]["hit_blocks"] == report["prefix"]["best_blocks"] == 0
    assert report["decode_graphs"]["replayed_steps"] > 0
    assert [item["output_tokens"] for item in report["completed"]] == [30] * 3
    assert report["batches"]["accepted_drafts"] > 0
