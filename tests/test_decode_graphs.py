"""Captured decode steps: the same bits as call by call, on every backend (on the host a captured
step is the same calls over the same fixed buffers), and in a caller's own capture."""

import json

import numpy as np
import pytest
from engine_runs import TINY, tiny
from helpers import to_host

import ringslab as rs
from ringslab.engine import activations as activations_module
from ringslab.engine.decode_inputs import StepSize, step_sizes
from ringslab.engine.recorded_source import device_source
from ringslab.engine.traces import TraceEntry
from ringslab.errors import ArgumentError, BatchError
from ringslab.rawkernels.memory import load_memory
from ringslab.schedules.plan_decode import build_decode_plan
from ringslab.tools.drawing.timeline import draw_timeline
from ringslab.tools.main import main

TRACE = [TraceEntry(f"r{i}", 3 + 11 * i, (7, 9, 1, 20)[i], 0.0) for i in range(4)]


def run(backend, *overrides, graphs, trace=TRACE, **options):
    with rs.Engine(tiny(*overrides), backend) as engine:
        return engine.run(trace, graphs=graphs, **options)


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_captured_steps_give_the_same_digests(backend, activations):
    """4 requests that end one after the other, so that steps of several sizes are captured and
    padded: every request has the digest of a run call by call, also with other batches."""
    kind = f"run.activations={activations}"
    plain = run(backend, kind, graphs=False)
    assert plain["decode_graphs"] is None
    for overrides in ((), ("engine.max_decode_seqs=3",), ("run.accept_rate=0.0",)):
        captured = run(backend, kind, *overrides, graphs=True)
        assert captured["completed"] == plain["completed"]
        counts = captured["decode_graphs"]
        assert counts["replayed_steps"] > 0
        steps = counts["replayed_steps"] + counts["called_steps"]
        assert steps == captured["batches"]["decode"]["steps"]
        sizes = step_sizes(3 if overrides == ("engine.max_decode_seqs=3",) else 4, 3)
        assert set(map(tuple, counts["captured"])) <= set(sizes)


def test_a_verified_run_replays_what_it_does_not_sample(backend):
    """60 sampled outputs are within the bound; they come from steps that ran call by call, over
    rings that replayed steps filled."""
    report = run(backend, "run.verify_samples=60", graphs=True, verify=True)
    assert report["verify"]["passed"] is True
    assert report["decode_graphs"]["called_steps"] > 0


def test_recorded_arrays_on_the_device(backend, tmp_path, monkeypatch):
    """Recorded arrays, one request with arrays of its own and of another length: gathered on the
    device, in captured steps and without, they give the digest of rows collected on the host."""
    rng = np.random.default_rng(0)
    arrays = {}
    for layer in range(4):
        for prefix, count in (("", 60), ("r1/", 31)):
            for name, shape in ((f"q.{layer}", (count, 4, 128)), (f"kv.{layer}", (count, 128))):
                values = rng.standard_normal(shape).astype(np.float32)
                arrays[prefix + name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "recorded.npz"
    np.savez(path, **arrays)
    source = ("run.activations=file", f"run.activations_path={path}")
    wanted = run("reference", *source, graphs=True)
    assert wanted["decode_graphs"] is None  # on the host rows are collected, not gathered
    monkeypatch.setattr(activations_module, "file_source", device_source)
    for graphs in (False, True):
        found = run(backend, *source, graphs=graphs)
        if backend == "reference":
            assert found["digest"] == wanted["digest"]
        else:
            wanted = found if not graphs else wanted
            assert found["digest"] == wanted["digest"]
    assert found["decode_graphs"]["replayed_steps"] > 0


def test_sizes_waste_at_most_half():
    """1, 2, 3, 4, 6, 8, 12, ... sequences and the largest itself, of one and of six tokens: a batch
    of n >= 2 sequences is padded to less than 1.5 n."""
    sizes = step_sizes(200, 6)
    counts = sorted({size.num_seqs for size in sizes})
    assert counts == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 200]
    assert len(sizes) == 2 * len(counts)
    assert [size.num_tokens for size in sizes] == sorted(size.num_tokens for size in sizes)
    for n in range(2, 201):
        assert min(count for count in counts if count >= n) < 1.5 * n
    assert step_sizes(1, 1) == (StepSize(1, 1),)


def test_fixed_buffers_hold_the_batch_and_padding(backend):
    """Batches of 1 to 4 sequences with 0 to 2 drafts: the fixed arrays are the batch's, then state
    id -1; plans are the host's for its tokens, and empty behind; addresses never change."""
    with rs.Engine(tiny(), backend) as engine:
        for i in range(4):
            engine.submit(rs.Request(f"r{i}", np.arange(9 + i, dtype=np.int32), 3 + 4 * i))
        addresses, shapes = {}, set()
        while (batch := engine.next_batch()) is not None:
            if batch.kind == "decode":
                padded = engine.padded(batch)
                shapes.add((padded.num_seqs, padded.num_tokens))
                check_padded(engine, batch, padded)
                first = addresses.setdefault((padded.num_seqs, padded.num_tokens), padded)
                assert padded is first
            drafts = np.full((batch.num_seqs, 2), -1, np.int32)
            drafts[::2, : batch.step % 3] = 5
            engine.replayed(batch)
            engine.commit(batch, np.zeros(batch.num_seqs, int), [5] * batch.num_seqs, drafts)
    assert len(shapes) >= 4


def check_padded(engine, batch, padded):
    tokens = batch.num_tokens
    arrays = padded.on_device
    assert np.array_equal(to_host(arrays.token_ids)[:tokens], batch.token_ids)
    assert np.array_equal(to_host(arrays.positions)[:tokens], batch.positions)
    states = to_host(arrays.token_state_ids)
    assert np.array_equal(states[:tokens], batch.token_state_ids)
    assert (states[tokens:] == -1).all()
    cu = to_host(arrays.cu_seqlens_q)
    assert cu.tolist()[: batch.num_seqs + 1] == batch.cu_seqlens_q.tolist()
    assert (cu[batch.num_seqs :] == tokens).all()
    for key, plan in padded.plans.items():
        wanted = build_decode_plan(
            batch.token_state_ids,
            batch.positions,
            window=key.window,
            ring_len=key.ring_len,
            mode=key.mode,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=plan.max_seqlen_q,
        )
        assert np.array_equal(to_host(plan.offset_len)[:tokens], wanted.offset_len)
        assert np.array_equal(to_host(plan.index)[:tokens], wanted.index)
        assert not to_host(plan.offset_len)[tokens:].any()
        assert (to_host(plan.index)[tokens:] == -1).all()


HASH = """
  unsigned t = i / width, e = i % width;
  unsigned h = tokens[t] * 2654435761u ^ positions[t] * 40503u ^ e * 97u ^ layer * 131071u;
  h ^= h >> 15; h *= 0x2c1b3c6du; h ^= h >> 12;
  float x = ((int)(h & 255) - 128) / 128.0f;
  x += 0.5f * __uint_as_float((unsigned)previous[(size_t)t * stride + e] << 16);
  unsigned bits = __float_as_uint(x);
  y = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
"""


def caller_kernel(backend):
    """mix(tokens, positions, previous, width, stride, layer, y): the activations of a caller's
    model, bf16 bits y [T, width], from the tokens and from the output of the layer below."""
    if backend == "cuda":
        import cupy

        return cupy.ElementwiseKernel(
            "raw int32 tokens, raw int32 positions, raw uint16 previous, uint32 width, "
            "uint32 stride, uint32 layer",
            "uint16 y",
            HASH,
            "caller_mix",
        )

    def mix(tokens, positions, previous, width, stride, layer, y):
        e = np.arange(width, dtype=np.uint32)
        rows = tokens.astype(np.uint32) * np.uint32(2654435761)
        rows ^= positions.astype(np.uint32) * np.uint32(40503)
        h = rows[:, None] ^ (e * np.uint32(97)) ^ np.uint32(layer * 131071)
        h ^= h >> np.uint32(15)
        h *= np.uint32(0x2C1B3C6D)
        h ^= h >> np.uint32(12)
        x = ((h & np.uint32(255)).astype(np.float32) - 128) / 128
        below = previous.reshape(len(tokens), stride)[:, :width].astype(np.uint32) << np.uint32(16)
        bits = (x + np.float32(0.5) * below.view(np.float32)).astype(np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        y[...] = (rounded >> np.uint32(16)).astype(np.uint16).reshape(y.shape)

    return mix


class Caller:
    """An embedding caller whose queries depend on the layer below, and its fixed buffers."""

    def __init__(self, engine, most_tokens):
        cfg, empty = engine.cfg, engine.memory.empty
        self.engine, self.mix = engine, caller_kernel(engine.backend)
        self.q, self.out, self.zero = (
            empty((most_tokens, cfg.num_q_heads, cfg.head_dim), np.uint16) for _ in range(3)
        )
        self.kv = empty((most_tokens, cfg.head_dim), np.uint16)
        self.zero[...] = 0
        self.graphs = {}
        self.outputs = {}

    def forward(self, batch):
        """Every layer of a batch; nothing is allocated."""
        cfg, size = self.engine.cfg, batch.num_tokens
        q, kv, out = self.q[:size], self.kv[:size], self.out[:size]
        width = cfg.num_q_heads * cfg.head_dim
        arrays, below = batch.on_device, self.zero[:size]
        for layer in range(len(cfg.layers)):
            given = arrays.token_ids, arrays.positions, below
            self.mix(*given, width, width, 2 * layer, q)
            self.mix(*given, cfg.head_dim, width, 2 * layer + 1, kv)
            self.engine.attend(layer, batch, q, kv, out=out)
            below = out

    def step(self, batch, *, captured, capture):
        if not captured or batch.kind == "prefill":
            self.forward(batch)
        else:
            padded = self.engine.padded(batch)
            shape = padded.num_seqs, padded.num_tokens
            if shape in self.graphs:
                self.graphs[shape]()
                self.engine.replayed(batch)
            else:
                self.forward(padded)  # this step; and its kernels are there for the capture
                self.graphs[shape] = capture(lambda: self.forward(padded))
        out = to_host(self.out[: batch.num_tokens])
        for i, request in enumerate(batch.request_ids):
            begin, end = batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1]
            kept = int(batch.num_drafts[i] > 0) + 1 if batch.kind == "decode" else end - begin
            for t in range(begin, begin + kept):
                self.outputs[request, int(batch.positions[t])] = out[t].copy()

    def commit(self, batch):
        """The first draft is right, the others are not."""
        drafted = batch.num_drafts > 0
        drafts = np.full((batch.num_seqs, 2), 5, np.int32)
        drafts[1::2, 1:] = -1
        self.engine.commit(batch, drafted.astype(int), [5] * batch.num_seqs, drafts)


def caller_outputs(backend, *, captured, **options):
    """Outputs of the last layer of every accepted token, by request and position."""
    with rs.Engine(tiny(), backend, **options) as engine:
        engine.slab[...] = 0xFF
        caller = Caller(engine, 32)
        stream = options.get("stream")

        def capture(run):
            if backend != "cuda":
                return run
            stream.begin_capture()
            run()
            graph = stream.end_capture()
            return lambda: graph.launch(stream)

        for i in range(4):
            prompt = np.full(4 + 9 * i, 5, np.int32) + np.arange(4 + 9 * i, dtype=np.int32)
            engine.submit(rs.Request(f"r{i}", prompt, 9 + 5 * i))
        while (batch := engine.next_batch()) is not None:
            caller.step(batch, captured=captured, capture=capture)
            caller.commit(batch)
        assert len(caller.graphs) == 0 or captured
        return caller.outputs, len(caller.graphs)


def test_attend_in_a_callers_capture(backend):
    """A model whose queries depend on the layer below captures its decode steps, each shape once,
    and replays them over padded batches: every accepted token's last output has the bits of the
    same model call by call."""
    if backend == "cuda":
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            wanted, _ = caller_outputs(backend, captured=False, stream=stream)
            found, graphs = caller_outputs(backend, captured=True, stream=stream)
    else:
        wanted, _ = caller_outputs(backend, captured=False)
        found, graphs = caller_outputs(backend, captured=True)
    assert graphs >= 3
    assert found.keys() == wanted.keys()
    for key, rows in wanted.items():
        assert np.array_equal(found[key], rows), key


def test_padded_batches_are_for_the_open_decode_only():
    """A prefill batch, a batch of another step and a commit of the padded batch are refused; layers
    that are named must be there, and what a capture attended does not count as missing."""
    with rs.Engine(tiny(), "reference") as engine:
        engine.submit(rs.Request("a", np.arange(5, dtype=np.int32), 9))
        prefill = engine.next_batch()
        with pytest.raises(BatchError, match="prefill batch"):
            engine.padded(prefill)
        engine.replayed(prefill)
        engine.commit(prefill, [0], [5], [[5, 5]])
        batch = engine.next_batch()
        padded = engine.padded(batch)
        assert (batch.num_tokens, padded.num_tokens) == (3, 3)
        with pytest.raises(BatchError, match="not the open one"):
            engine.padded(prefill)
        with pytest.raises(BatchError, match="commit: batch -1 is not the open one"):
            engine.commit(padded, [0], [5])
        with pytest.raises(ArgumentError, match="layer=4"):
            engine.replayed(batch, [0, 4])
        engine.replayed(batch, [0, 1, 2])
        engine.commit(batch, [0], [5])
        following = engine.next_batch()
        with pytest.raises(BatchError, match="layer 3 was left out"):
            engine.replayed(following)
        engine.replayed(following, [0, 1, 2])


def test_rows_are_taken_and_bytes_are_moved():
    """The host's part of the memory functions that a captured step uses."""
    memory = load_memory("cpu")
    source = np.arange(12, dtype=np.uint16).reshape(4, 3)
    taken = memory.empty((5, 3), np.uint16)
    memory.take_rows(source, np.array([3, 0, 0, 2, 1], np.int32), taken)
    assert np.array_equal(taken, source[[3, 0, 0, 2, 1]])
    memory.zero(taken)
    assert not taken.any()
    memory.copy(taken[:2], source)
    assert np.array_equal(taken[:2], source[:2])
    memory.hold()()


def test_a_timeline_has_every_operation(backend, tmp_path, capsys):
    """`run --timeline`: of one prefill and one decode step every operation of 4 layers, in order
    and inside the step; shares add up to 1; the picture is drawn beside it."""
    path = tmp_path / "timeline.json"
    assert main(["run", str(TINY), "--backend", backend, "--timeline", str(path)]) == 0
    capsys.readouterr()
    timeline = json.loads(path.read_text())
    assert [step["kind"] for step in timeline["steps"]] == ["prefill", "decode"]
    prefill, decode = timeline["steps"]
    assert [op["name"] for op in prefill["ops"]][:6] == [
        "seeded_activations",
        "load_history",
        "encode_records",
        "window_prefill",
        "store_records",
        "digest_outputs",
    ]
    names = [op["name"] for op in decode["ops"]]
    assert (names.count("ring_store"), names.count("window_decode")) == (4, 4)
    assert names.count("digest_outputs") == 3
    for step in timeline["steps"]:
        begins = [op["begin_us"] for op in step["ops"]]
        assert begins == sorted(begins)
        assert all(0 <= op["begin_us"] <= op["end_us"] <= step["step_us"] for op in step["ops"])
        assert sum(share["share"] for share in step["shares"]) == pytest.approx(1, abs=1e-3)
    picture = path.with_suffix(".svg").read_text()
    assert picture == draw_timeline(timeline)
    assert picture.count("<title>") >= len(prefill["ops"]) + len(decode["ops"])


@pytest.mark.gpu
def test_the_full_model_replays_on_a_gpu():
    """All 43 rings of V4.1-Flash, 64 heads of 512: 6 requests with captured decode steps have the
    digests of the run call by call, and steps were replayed."""
    limits = ("engine.num_state_slots=6", "engine.token_budget=512", "run.verify_samples=8")
    cfg = rs.load_config("deepseek_v4_1_flash.yaml", overrides=limits)
    trace = [TraceEntry(f"r{i}", 40 + 71 * i, 30 + 9 * i, 0.0) for i in range(6)]
    with rs.Engine(cfg, "cuda") as engine:
        plain = engine.run(trace, graphs=False)
        captured = engine.run(trace, graphs=True, verify=True)
    assert captured["completed"] == plain["completed"]
    assert captured["verify"]["passed"] is True
    assert captured["decode_graphs"]["replayed_steps"] > 5  # 10 on an H200
