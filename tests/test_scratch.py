"""What kernels take of a GPU beside their arguments is stated before: the launchers' own sums."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ringslab as rs
from ringslab.engine.scratch import Scratch, ScratchSizes, take_scratch
from ringslab.engine.workspace import engine_sizes, take_run_buffers, take_workspace
from ringslab.errors import DeviceMemoryError
from ringslab.rawkernels.cuda import gqa_workspace, prefill_scratch, window_prefill_gqa
from ringslab.rawkernels.memory import load_memory

TINY = Path(__file__).with_name("tiny_hybrid.yaml")
GROUPED = ("gemma2_27b", "gemma3_27b", "gpt_oss_120b", "mistral_7b", "quickstart_hybrid", TINY)


@pytest.fixture
def host_pool(monkeypatch):
    """Launchers that take their memory from NumPy; it is not touched."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=np.empty, zeros=np.zeros))
    monkeypatch.setattr(prefill_scratch, "cupy_stream", lambda stream: nullcontext())


def padded(array):
    return -(-array.nbytes // 512) * 512  # rounded up to what CuPy's pool gives


@pytest.mark.parametrize("name", GROUPED)
def test_a_prefill_takes_what_was_stated(name, host_pool):
    """The largest batch of each model, of all sequences and the whole token budget: bytes of the
    arrays that the launcher takes for its largest layer."""
    cfg = rs.load_config(name)
    sizes = engine_sizes(cfg)
    seqs = min(cfg.engine.max_prefill_seqs, sizes.num_state_slots)
    lengths = [sizes.prefill_tokens - seqs + 1] + [1] * (seqs - 1)
    taken = []
    for layer in cfg.layers:
        if layer.kind == "swa":
            ends = [layer.ring_len + length for length in lengths]
            window = {"window": layer.window, "ring_len": layer.ring_len}
            plan = rs.plan_prefill(list(range(seqs)), lengths, ends, **window)
            scratch = prefill_scratch.take_scratch(plan, layer.record_format, None)
            taken.append(sum(map(padded, scratch)))
            bounds = [np.lib.array_utils.byte_bounds(part) for part in scratch]
            assert all(low[1] <= high[0] for low, high in pairwise(bounds))
    assert sizes.scratch.prefill_bytes == max(taken)


def test_an_engine_hands_its_scratch_on():
    """The workspace for a GPU has the stated bytes, counters of 0, and every window_prefill,
    window_decode and paged_decode of a run gets its part, prefills enough for what a launch works
    with. On a host there is none, and the operations get none."""
    cfg, seen = rs.load_config(TINY), []
    sizes = replace(engine_sizes(cfg).scratch, partial_bytes=gqa_workspace.SPLIT_SCRATCH_BYTES)
    scratch = take_scratch(sizes, load_memory("cpu"))
    assert scratch.prefill.nbytes == sizes.prefill_bytes > 0
    assert sum(part.nbytes for part in scratch.decode) == sizes.partial_bytes
    assert not scratch.decode[1].any()

    def wrapped(name, run, given):
        def call(*arguments, scratch, **options):
            assert scratch is given
            if name == "window_prefill":
                _, _, plan, fmt, *_ = arguments
                parts = prefill_scratch.cut_scratch(scratch, plan, fmt)
                assert parts.v.shape == (plan.most_keys, fmt.num_kv_heads, fmt.head_dim)
            seen.append(name)
            run(*arguments, **options)

        return call

    with rs.Engine(cfg, "cpu") as engine:
        tools = engine.tools
        assert tools.workspace.scratch == Scratch()
        ops = {"window_prefill": scratch.prefill, "window_decode": scratch.decode}
        ops = {name: wrapped(name, getattr(tools.ops, name), ops[name]) for name in ops}
        name = "paged_decode"
        tools.paged.ops[name] = wrapped(name, tools.paged.ops[name], scratch.decode)
        workspace = replace(tools.workspace, scratch=scratch)
        engine.tools = replace(tools, ops=replace(tools.ops, **ops), workspace=workspace)
        digest = engine.run()["digest"]
    assert set(seen) == {"window_prefill", "window_decode", "paged_decode"}
    with rs.Engine(cfg, "cpu") as engine:
        assert engine.run()["digest"] == digest


@pytest.mark.parametrize(
    ("name", "parts"), [("gpt_oss_120b", True), ("mistral_7b", True), (TINY, False)]
)
def test_partial_sums_are_those_of_the_launcher(name, parts, host_pool):
    """64 MiB and the counters where a key list is longer than a part of 256, however many steps are
    captured; rings of 11 and 256 tokens of pages have one part."""
    cfg = rs.load_config(name)
    sizes = engine_sizes(cfg)
    assert sizes.scratch.partial_bytes == parts * sum(map(padded, gqa_workspace._make()))


def test_of_the_small_model():
    """3 prefill sequences with 4 keys of history and 32 tokens, 2 heads of 64: K and V of 44 keys,
    11,264 B each, and two arrays of 5 ints, 512 B of the pool each."""
    cfg = rs.load_config(TINY)
    assert (cfg.engine.max_prefill_seqs, cfg.engine.token_budget) == (3, 32)
    assert engine_sizes(cfg).scratch == ScratchSizes(prefill_bytes=2 * 11_264 + 2 * 512)


def test_scratch_is_part_of_the_sum():
    """It is in the total and said apart; a host has none, nor have latent layers."""
    cfg = rs.load_config("mistral_7b")
    gpu, host = engine_sizes(cfg), engine_sizes(cfg, on_gpu=False)
    assert host.scratch == ScratchSizes()
    assert gpu.total_bytes - host.total_bytes == gpu.scratch.total_bytes > 200_000_000
    assert f"scratch of kernels {gpu.scratch.total_bytes:,} B" in gpu.describe()
    assert "scratch" not in host.describe()
    assert engine_sizes(rs.load_config("deepseek_v4_1_flash")).scratch == ScratchSizes()
    with rs.Engine(rs.load_config(TINY), "cpu") as engine:
        assert engine.sizes.scratch == ScratchSizes()


@pytest.mark.parametrize("missing", [0, 1])
def test_memory_that_has_no_room_for_scratch_is_refused(missing):
    """Free to the byte: the arrays and the scratch fit; a byte less is refused with both sums, in
    the workspace; the buffers of a run come later, by themselves."""
    cfg = rs.load_config(TINY)
    sizes = engine_sizes(cfg)
    sizes = replace(sizes, scratch=replace(sizes.scratch, partial_bytes=1000))
    scratch = sizes.scratch.prefill_bytes
    workspace = sizes.joint_bytes + sizes.lse_bytes + sizes.staging_bytes + scratch + 1000
    for take, asked in (
        (take_workspace, workspace),
        (take_run_buffers, sizes.run_bytes),
    ):
        free = asked - missing
        memory = replace(load_memory("cpu"), free_bytes=lambda free=free: (free, free))
        if missing:
            says = rf"needs {asked:,} bytes but {free:,} are free"
            with pytest.raises(DeviceMemoryError, match=says):
                take(cfg, sizes, memory)
        else:
            take(cfg, sizes, memory)


@pytest.mark.gpu
def test_steps_on_a_gpu_work_in_the_engines_scratch(monkeypatch):
    """Kernels of an engine's run take no memory themselves, where they would find none, captured
    steps included; outputs have the bits of an engine that has no scratch, whose kernels take it,
    for split decode steps as well."""
    cfg, taken = rs.load_config("quickstart_hybrid"), []
    take = gqa_workspace.stream_workspace

    def counted(what, *arguments):
        taken.append(what)
        return take(what, *arguments)

    monkeypatch.setattr(gqa_workspace, "stream_workspace", counted)
    with rs.Engine(cfg, "cuda") as engine:
        workspace = replace(engine.tools.workspace, scratch=Scratch())
        engine.tools = replace(engine.tools, workspace=workspace)
        wanted = engine.run()["digest"]
    assert "partial sums" in taken
    monkeypatch.setattr(gqa_workspace, "stream_workspace", None)
    monkeypatch.setattr(window_prefill_gqa, "take_scratch", None)
    with rs.Engine(cfg, "cuda") as engine:
        report = engine.run()
        assert not engine.tools.workspace.scratch.decode[1].any()
    assert report["digest"] == wanted
    assert report["decode_graphs"]["replayed_steps"] > 0
