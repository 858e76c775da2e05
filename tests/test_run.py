"""Runs: verification, digests over schedules, traces and files, Ctrl-C, the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engine_runs import TINY, preempt_every_third, tiny

import ringslab as rs
from ringslab.engine.batches import build_batch
from ringslab.engine.nvtx_ranges import Ranges, load_ranges
from ringslab.engine.traces import TraceEntry
from ringslab.engine.watch import SAMPLE_EVERY, SAMPLED_STEPS, Watch, is_sampled
from ringslab.engine.workspace import engine_sizes, take_staging
from ringslab.errors import ActivationError, ConfigError, RequestError, TraceError
from ringslab.rawkernels.memory import load_memory
from ringslab.tools.main import main

TRACE = [TraceEntry(f"r{i}", 3 + 11 * i, (7, 0, 1, 20)[i], 0.0) for i in range(4)]
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": [%d]}\n'


def run(backend, *overrides, **options):
    with rs.Engine(tiny(*overrides), backend) as engine:
        return engine.run(options.pop("trace", TRACE), **options)


def test_a_run_verifies_itself(backend):
    """4 requests: outputs of 300 of their 412 tokens and layers, drafts of draft layers among them,
    within the bound, and every key of the report."""
    report = run(backend, "run.verify_samples=300", verify=True)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 300
    assert 0 < report["verify"]["worst_error"] <= report["verify"]["bound"]
    assert report["requests"] == 4
    assert report["prompt_tokens"] == 3 + 14 + 25 + 36
    assert report["output_tokens"] == 28
    assert report["slot_bytes"] == 9984
    assert report["bytes_per_sequence"]["measured"] == report["bytes_per_sequence"]["formula"]
    assert report["prefix"] == {"prompt_blocks": 4, "hit_blocks": 0}
    assert report["backend"] == backend
    family = "portable" if backend == "cuda" else backend  # tiny.yaml is no Hopper shape
    assert report["attention_kernels"] == {family: 3 + 1}
    assert report["schema_version"] == 1
    assert report["interrupted"] is False
    assert [item["output_tokens"] for item in report["completed"]] == [7, 0, 1, 20]
    assert "window_decode" in report["kernels"]
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (rs.Request("b", [1, 1000], 2), r"prompt\[1\]=1000 but vocab_size=1000"),
        (rs.Request("b", [], 2), "shape"),
        (rs.Request("b", [1], "2"), "max_new_tokens='2'"),
        (rs.Request(7, [1], 2), "id=7"),
    ],
)
def test_a_request_that_submit_refuses_is_found_before_a_run(request_, says):
    """The second of two requests is wrong: nothing of the first has run, and the engine is free."""
    with rs.Engine(tiny(), "reference") as engine:
        with pytest.raises(rs.errors.RequestError, match=says):
            engine.run([rs.Request("a", [1, 2], 2), request_])
        assert engine.done
        assert engine.scheduler.counters.submitted == 0


@pytest.mark.parametrize("accept_rate", [0.0, 0.7])
def test_a_stacked_run_verifies_every_layer_and_the_stack(backend, accept_rate):
    """Outputs of layer l are inputs of layer l + 1: 32 samples from the inputs that the run had,
    on draft layers too, and the 8 from layer 0 up once more."""
    overrides = ("run.activations=stacked", f"run.accept_rate={accept_rate}")
    report = run(backend, *overrides, verify=True)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 40


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_one_digest_whatever_the_schedule(backend, activations):
    """Small budgets, few slots, all drafts right or wrong, whole prompts, preemptions, twice the
    same: one digest. Another seed gives another."""
    kind = f"run.activations={activations}"
    wanted = run(backend, kind)["digest"]
    for override in (
        "engine.token_budget=7",
        "engine.num_state_slots=1",
        "run.accept_rate=0.0",
        "run.accept_rate=1.0",
        "engine.chunked_prefill=false",
        "run.seed=1",
    ):
        assert run(backend, kind, override)["digest"] == wanted, override
    report = run(backend, kind, on_step=preempt_every_third())
    assert report["digest"] == wanted
    assert report["scheduler"]["preempted"] >= 3
    assert run(backend, kind, "run.seed=2")["digest"] != wanted


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_verification_fails_where_the_rings_were_damaged(backend, activations):
    """After every step one byte of each record is flipped: the digest differs and --verify says
    no. A verification that cannot fail proves nothing."""

    def damage(engine, batch):
        records = engine.slab[: 2 * 1472 * (engine.slab.shape[0] // (2 * 1472))]
        records[5::132] ^= 0x55

    kind = f"run.activations={activations}"
    good = run(backend, kind)
    bad = run(backend, kind, verify=True, on_step=damage)
    assert bad["verify"]["passed"] is False
    assert bad["verify"]["worst_error"] is None or (
        bad["verify"]["worst_error"] > bad["verify"]["bound"]
    )
    assert bad["digest"] != good["digest"]


@pytest.mark.parametrize("name", ["window_decode", "window_prefill"])
def test_verification_fails_where_a_log_sum_exp_is_wrong(backend, name):
    """Every lse of decode (or prefill) is 0.02 too large, no output is wrong: --verify says no, and
    its numbers say that it was the lse. The bound is 2^-12 of the largest score, below 0.01."""
    with rs.Engine(tiny(), backend) as engine:
        right = getattr(engine.tools.ops, name)

        def wrong(*arguments, **options):
            right(*arguments, **options)
            lse = next(x for x in arguments if getattr(x, "dtype", None) == np.float32)
            lse += np.float32(0.02)

        ops = dataclasses.replace(engine.tools.ops, **{name: wrong})
        engine.tools = dataclasses.replace(engine.tools, ops=ops)
        verify = engine.run(TRACE, verify=True)["verify"]
    assert verify["passed"] is False
    assert verify["worst_lse_error"] == pytest.approx(0.02, abs=5e-3)
    assert verify["worst_lse_error"] > 2 * verify["lse_bound"] > 0
    assert verify["worst_error"] <= verify["bound"]


def test_a_second_run_counts_from_zero():
    with rs.Engine(tiny(), "reference") as engine:
        first, second = engine.run(TRACE), engine.run(TRACE)
    assert first["digest"] == second["digest"]
    assert first["scheduler"] == second["scheduler"]
    assert first["kernels"].keys() == second["kernels"].keys()


def test_aborted_requests_are_not_reported_as_done():
    def abort(engine, batch):
        if "r3" in batch.request_ids and batch.kind == "decode":
            engine.abort("r3")

    report = run("reference", on_step=abort)
    assert [item["id"] for item in report["completed"]] == ["r0", "r1", "r2"]
    assert report["scheduler"]["aborted"] == 1


def test_recorded_activations_run_and_verify(tmp_path):
    """Arrays recorded from the seeded source for 60 positions; a request of 61 is refused before
    anything runs."""
    rng = np.random.default_rng(0)
    arrays = {}
    for layer in range(4):
        for name, shape in ((f"q.{layer}", (60, 4, 128)), (f"kv.{layer}", (60, 128))):
            values = rng.standard_normal(shape).astype(np.float32)
            arrays[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "recorded.npz"
    np.savez(path, **arrays)
    source = ("run.activations=file", f"run.activations_path={path}")
    report = run("reference", *source, verify=True)
    assert report["verify"]["passed"] is True
    assert report["activations"] == "file"
    with pytest.raises(ActivationError, match=r"'long' has 61 positions but 60 are recorded"):
        run("reference", *source, trace=[TraceEntry("long", 61, 0, 0.0)])


def test_prompts_and_ids_of_a_list_are_checked_before_the_run():
    cfg = tiny()
    with rs.Engine(cfg, "reference") as engine:
        with pytest.raises(RequestError, match=r"max_seq_len=512; cut prompts"):
            engine.run([TraceEntry("a", 510, 3, 0.0)])
        with pytest.raises(RequestError, match="the same id"):
            engine.run([TRACE[0], TRACE[0]])
        with pytest.raises(TraceError, match="empty"):
            engine.run([])
        with pytest.raises(TraceError, match="str in the list"):
            engine.run(["a"])
        requests = [rs.Request("a", np.arange(5, dtype=np.int32), 3)]
        assert engine.run(requests)["output_tokens"] == 3
        assert engine.tokens("a")[:5].tolist() == [0, 1, 2, 3, 4]
        engine.submit(requests[0])
        with pytest.raises(RequestError, match="still has requests"):
            engine.run(requests)
    with pytest.raises(ConfigError, match="nothing to verify"):
        run("reference", "run.verify_samples=0", verify=True)


def test_a_batch_uploaded_in_one_copy_is_the_batch():
    """The packed int32 buffer of a GPU engine, tried on host memory with the largest batches: every
    plan array comes out as it went in, and the buffer's stated size suffices."""
    cfg = tiny()
    memory = load_memory("cpu")
    staging = take_staging(engine_sizes(cfg).staging_bytes // 2, memory)
    kinds = set()
    with rs.Engine(cfg, "reference") as engine:
        for i in range(4):
            engine.submit(rs.Request(f"r{i}", np.arange(30 + i, dtype=np.int32), 20))
        while (host := engine.scheduler.next_batch()) is not None:
            plain = build_batch(cfg, host, staging, "cpu")
            packed = build_batch(cfg, host, staging, "cuda")
            kinds.add(host.kind)
            pairs = [(plain.on_device, packed.on_device)]
            pairs += [(plain.plans[key], packed.plans[key]) for key in plain.plans]
            for a, b in pairs:
                for name, value in vars(a).items():
                    assert np.array_equal(getattr(b, name), value), name
            drafts = np.full((host.num_seqs, 2), 5)
            engine.scheduler.commit(host, np.zeros(host.num_seqs, int), [5] * host.num_seqs, drafts)
    assert kinds == {"prefill", "decode"}


def test_watch_costs_nothing_until_someone_looks():
    """Off: one shared context. On: a range with layer and tokens, popped also after an error."""
    calls = []
    memory = load_memory("cpu")
    off = Watch(Ranges(False, calls.append, calls.clear), memory)
    assert off.op("ring_store", 3, 96) is off.op("window_decode", 4, 1)
    on = Watch(Ranges(True, calls.append, lambda: calls.append("pop")), memory)
    with pytest.raises(ZeroDivisionError), on.op("ring_store", 3, 96):
        raise ZeroDivisionError
    assert calls == ["ring_store layer=3 tokens=96", "pop"]
    sampled = sum(is_sampled(step) for step in range(SAMPLED_STEPS * SAMPLE_EVERY * 2))
    assert sampled == SAMPLED_STEPS
    assert not is_sampled(0)  # it compiles


def test_the_command_line_runs_a_trace_and_reports(tmp_path, capsys):
    """Mooncake and Azure files: exit 0, a report file equal to --json, a last line that says what
    was verified."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE % (0, 20, 1) + MOONCAKE % (5, 30, 1))
    report = tmp_path / "report.json"
    command = ["run", str(TINY), "--backend", "reference", "--verify"]
    assert main([*command, "--trace", str(trace), "--report", str(report)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("verify: passed, 32 outputs against float64")
    assert json.loads(report.read_text())["requests"] == 2
    azure = tmp_path / "trace.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,17,4\n")
    assert main([*command, "--trace", str(azure), "--json", "--set", "run.seed=3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["seed"], printed["prompt_tokens"]) == (3, 17)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "absent.jsonl"], "absent.jsonl: cannot be read"),
        (["--set", "run.sed=3"], "run.sed"),
        (["--set", "engine.num_state_slots=1000000"], "slab of"),
        (["--set", "engine.num_state_slots=0"], "num_state_slots"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, says, capsys, tmp_path, monkeypatch):
    """Bad input ends with status 2 and one message, and leaves no report."""
    monkeypatch.chdir(tmp_path)
    if says == "slab of":
        monkeypatch.setattr("ringslab.rawkernels.memory.host_bytes", lambda: (10**9, 10**9))
    command = ["run", str(TINY), "--backend", "cpu", "--report", "report.json", *arguments]
    assert main(command) == 2
    assert says in capsys.readouterr().err
    assert not Path("report.json").exists()


def test_an_engine_runs_again_after_ctrl_c():
    """SIGINT in the third step of a run: every slot is free again, and the next run has the digest
    of one that nobody stopped."""

    def interrupt(engine, batch):
        if batch.step == 2:
            signal.raise_signal(signal.SIGINT)

    with rs.Engine(tiny(), "reference") as engine:
        stopped = engine.run(TRACE, on_step=interrupt)
        assert (stopped["interrupted"], stopped["scheduler"]["aborted"]) == (True, 0)
        assert stopped["requests"] < len(TRACE)
        assert engine.done
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
        assert engine.run(TRACE)["digest"] == run("reference")["digest"]


def test_ctrl_c_stops_cleanly_and_keeps_what_was_done(tmp_path):
    """SIGINT in the middle of 400 requests: status 130, a whole report that says so, and the
    digests of what it calls completed are those of a run that nobody stopped."""
    report_path = tmp_path / "report.json"
    overrides = ("run.trace.num_requests=400", "run.trace.output_len=[30, 40]")
    command = [sys.executable, "-m", "ringslab", "run", str(TINY), "--backend", "reference"]
    command += ["--report", str(report_path), "--verify"]
    for override in overrides:
        command += ["--set", override]
    site = str(Path(rs.__file__).parent.parent)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": site},
    )
    line = process.stderr.readline() + process.stderr.readline()
    assert "backend reference" in line
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in out
    report = json.loads(report_path.read_text())
    assert report["interrupted"] is True
    assert 0 < report["requests"] < 400
    assert report["requests"] == len(report["completed"])
    assert report["verify"]["passed"] is not False
    ids = {item["id"] for item in report["completed"]}
    with rs.Engine(tiny(*overrides), "reference") as engine:
        from ringslab.engine.run import load_requests

        first = [r for r in load_requests(engine.cfg, None) if r.id in ids][:5]
        again = engine.run([TraceEntry(r.id, r.prompt_len, r.max_new_tokens, 0.0) for r in first])
    found = {item["id"]: item["digest"] for item in report["completed"]}
    assert all(found[item["id"]] == item["digest"] for item in again["completed"])


def test_the_full_model_runs_and_planar_rings_change_nothing(backend):
    """All 43 rings of V4.1-Flash, 64 heads of 512: one request of 9 + 4 tokens, verified; the
    planar layout gives the same digest and the same bytes a sequence, 3,128,352."""
    digests = set()
    for name in ("deepseek_v4_1_flash.yaml", "deepseek_v4_1_flash_planar.yaml"):
        limits = ("engine.num_state_slots=2", "engine.token_budget=16", "run.verify_samples=8")
        cfg = rs.load_config(name, overrides=limits)
        with rs.Engine(cfg, backend) as engine:
            report = engine.run([TraceEntry("a", 9, 4, 0.0)], verify=True)
        assert report["verify"]["passed"] is True
        assert report["bytes_per_sequence"]["measured"] == 3128352
        digests.add(report["digest"])
    assert len(digests) == 1


def test_ranges_come_from_the_nvtx_package_where_it_is(monkeypatch):
    """Off without a profiler, on with RINGSLAB_NVTX=1 or under one, never with 0."""
    pytest.importorskip("nvtx")
    for name in ("RINGSLAB_NVTX", "NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert not load_ranges().enabled
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "injection.so")
    assert load_ranges().enabled
    with load_ranges().span("ring_store", 3, 96):
        pass
    monkeypatch.setenv("RINGSLAB_NVTX", "0")
    assert not load_ranges().enabled
