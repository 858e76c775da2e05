"""Engines of hybrid models: rings of K and V for local layers, the paged pool for global ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from config_edits import edited

import ringslab as rs
from ringslab.engine.activations import VALUE_LAYER
from ringslab.engine.traces import TraceEntry
from ringslab.engine.workspace import engine_sizes
from ringslab.errors import ArgumentError, BatchError, ConfigError, RequestError
from ringslab.layouts.budget import kv_bytes
from ringslab.rawkernels.operations import load_operations
from ringslab.rawkernels.reference.activation_hash import hash_values
from ringslab.tools.main import main

TINY = Path(__file__).with_name("tiny_hybrid.yaml")
TRACE = [TraceEntry(f"r{i}", 3 + 11 * i, (7, 0, 1, 20, 30)[i], 0.0) for i in range(5)]
# Rings in bf16 and pages in MXFP8, the reverse of the file.
SWAPPED = (
    "layer_groups.local.record_format=kv_bf16",
    "layer_groups.drafts.record_format=kv_bf16",
    "layer_groups.global.record_format=kv_mxfp8",
    "slot.rings.0.record_bytes=512",
    "slot.rings.0.ring_bytes=4096",
    "slot.rings.1.record_bytes=512",
    "slot.rings.1.ring_bytes=4096",
    "slot.rings.1.offset=8192",
    "slot.stored_bytes=8192",
    "slot.slot_bytes=12288",
    "paged.layers.0.record_bytes=264",
    "paged.layers.0.layer_bytes=1056",
    "paged.block_bytes=2112",
)


def tiny(*overrides):
    return rs.load_config(TINY, overrides=overrides)


def run(backend, *overrides, trace=TRACE, **options):
    with rs.Engine(tiny(*overrides), backend) as engine:
        return engine.run(trace, **options)


@pytest.mark.parametrize("formats", [(), SWAPPED], ids=["mxfp8 rings", "mxfp8 pages"])
def test_a_hybrid_run_verifies_itself(backend, formats):
    """5 requests: outputs of 300 tokens of local, global and draft layers are within the bound of
    float64 over their whole history; both record types in rings and in pages."""
    report = run(backend, *formats, "run.verify_samples=300", verify=True)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 300
    assert 0 < report["verify"]["worst_error"] <= report["verify"]["bound"]
    assert report["requests"] == 5
    assert {"paged_store", "paged_load", "paged_decode", "window_attention"} <= set(
        report["kernels"]
    )


@pytest.mark.parametrize("accept_rate", [0.0, 0.7])
def test_a_stacked_hybrid_run_verifies_every_layer_and_the_stack(backend, accept_rate):
    """Outputs of layer l are inputs of layer l + 1, for K and V alike: 32 samples from the inputs
    that the run had, whole histories of global layers among them, and 8 of them from layer 0 up."""
    overrides = ("run.activations=stacked", f"run.accept_rate={accept_rate}")
    report = run(backend, *overrides, verify=True)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 32 + 8


def test_stacked_inputs_follow_the_layer_before():
    """K and V of layer l + 1 change where the output of layer l does, and differ."""
    from ringslab.engine.activations import open_source

    cfg = tiny("run.activations=stacked")
    with rs.Engine(cfg, "reference") as engine:
        source = open_source(cfg, engine.tools.ops, engine.memory, 8)
        ids, positions = np.array([7, 8], np.int32), np.array([0, 1], np.int32)
        before = np.zeros((2, 4, 64), np.uint16)
        q, (k, v) = source.rows(1, "a", ids, positions, before)
        before[1, 2] = 0x4000  # 2.0
        other_q, (other_k, other_v) = source.rows(1, "a", ids, positions, before)
        for one, other in ((q, other_q), (k, other_k), (v, other_v)):
            assert np.array_equal(one[0], other[0])
            assert not np.array_equal(one[1], other[1])
        assert not np.array_equal(k, v)
        late, _ = source.rows(1, "a", ids, positions, before, q_from=1)
        assert np.array_equal(late, other_q[1:])


def test_bytes_of_the_longest_sequence(backend):
    """47 + 30 tokens, of which the last was a draft once: 77 tokens in 20 blocks of 4, and bytes
    measured equal the budget's."""
    report = run(backend, "run.accept_rate=0.0")
    found = report["bytes_per_sequence"]
    assert (found["context"], found["num_blocks"], found["block_bytes"]) == (77, 20, 4096)
    assert found["measured"] == found["formula"] == 6336 + 20 * 4096
    assert found["formula"] == kv_bytes(tiny(), 77).real_bytes


def test_any_schedule_gives_the_same_digest():
    """Chunks of 5 tokens, one sequence at a time, decode steps of two, a pool so small that
    sequences are preempted, no drafts accepted, steps over fixed buffers: the same bits."""
    plain = run("cpu")
    assert plain["scheduler"]["block_preemptions"] == 0
    for overrides, options in (
        (("engine.token_budget=5",), {}),
        (("engine.max_prefill_seqs=1", "engine.max_decode_seqs=2"), {}),
        (("engine.num_blocks=26",), {}),
        (("run.accept_rate=0.0",), {}),
        (("engine.num_state_slots=2",), {"graphs": True}),
        ((), {"graphs": True}),
    ):
        report = run("cpu", *overrides, **options)
        assert report["completed"] == plain["completed"], overrides
        if "engine.num_blocks=26" in overrides:
            assert report["scheduler"]["block_preemptions"] > 0


def test_all_backends_make_the_same_pages(fast_backend):
    """After a prefill of 37 and two decode steps, slab and pool hold the bytes of the reference."""
    found = {}
    for backend in ("reference", fast_backend):
        with rs.Engine(tiny(), backend) as engine:
            engine.tools.slab.fill(0)
            engine.tools.paged.pool.fill(0)
            ops = load_operations("reference")
            engine.submit(rs.Request("a", np.arange(37, dtype=np.int32), 3))
            while (batch := engine.next_batch()) is not None:
                for layer in range(len(engine.cfg.layers)):
                    engine.attend(layer, batch, *activations(ops, engine.cfg, layer, batch))
                engine.commit(batch, np.zeros(1, np.int32), np.array([5], np.int32))
            to_host = engine.memory.to_host
            found[backend] = to_host(engine.slab), to_host(engine.tools.paged.pool)
    for one, other in zip(found["reference"], found[fast_backend], strict=True):
        assert np.array_equal(one, other)
    assert found["reference"][1].any()


def activations(ops, cfg, layer, batch):
    """q, (k, v) of a batch, bf16 bits, from the same hash for every backend."""
    tokens, heads = batch.num_tokens, (cfg.num_q_heads, cfg.num_kv_heads, cfg.num_kv_heads)
    made = []
    for seed, count in zip((1, 2, 3), heads, strict=True):
        flat = np.empty((tokens, count * cfg.head_dim), np.uint16)
        ops.seeded_activations(seed, layer, batch.token_ids, batch.positions, flat)
        made.append(flat.reshape(tokens, count, cfg.head_dim))
    return made[0], (made[1], made[2])


# Local layers keep their first 3 keys: rings of 8 + 3.
PINNED = (
    ("window: 5\n", "window: 5\n    sink_tokens: 3\n"),
    ("ring_len: 8", "ring_len: 11"),
    ("padding_bytes: 0", "padding_bytes: 8"),
    ("ring_bytes: 2112", "ring_bytes: 2912"),
    ("      offset: 4224", "      offset: 5824"),
    ("stored_bytes: 4224", "stored_bytes: 5824"),
    ("slot_bytes: 6336", "slot_bytes: 7936"),
)


@pytest.mark.parametrize("activations", ["seeded", "stacked"])
def test_first_keys_that_stay_visible(tmp_path, activations):
    """A window of 5 and 3 first keys: outputs are within the bound of float64 over both ranges, in
    prefill chunks, decode steps and drafts; the bits do not depend on the schedule, and they differ
    from those without the first keys."""
    path = edited(tmp_path, *PINNED, base=TINY)
    overrides = (f"run.activations={activations}", "run.verify_samples=200")

    def pinned(*more, **options):
        with rs.Engine(rs.load_config(path, overrides + more), "cpu") as engine:
            return engine.run(TRACE, **options)

    found = pinned(verify=True)
    assert found["verify"]["passed"] is True
    assert found["bytes_per_sequence"]["measured"] == found["bytes_per_sequence"]["formula"]
    other = pinned("engine.token_budget=7", graphs=True)
    assert other["decode_graphs"] is None  # plans with first keys are built on the host
    assert other["completed"] == found["completed"]
    assert run("cpu", *overrides)["digest"] != found["digest"]


def test_first_keys_have_no_fixed_steps(tmp_path):
    """`padded` needs plans that are built on the device."""
    cfg = rs.load_config(edited(tmp_path, *PINNED, base=TINY))
    assert [ring.sink_tokens for ring in cfg.slot_layout.rings] == [3, 3, 0]
    assert kv_bytes(cfg, 100).hybrid_bytes == 264 * (2 * 8 + 5) + 512 * 2 * 100
    with rs.Engine(cfg, "reference") as engine:
        engine.submit(rs.Request("a", [7, 8], 2))
        engine.commit(engine.next_batch(), np.zeros(1, np.int32), np.array([5], np.int32))
        with pytest.raises(BatchError, match="sink_tokens have no steps of fixed shape"):
            engine.padded(engine.next_batch())


def test_a_wrong_page_is_seen(fast_backend):
    """A run whose pool loses a block's bytes halfway fails its verification, and so does one whose
    block table names another block."""

    def lose(engine, batch):
        if batch.kind == "decode":
            engine.tools.paged.pool[: 8 * engine.cfg.paged_layout.block_bytes] = 0x41

    def swap(engine, batch):
        tables = engine.tools.paged.tables
        tables[:, 0] = (tables[:, 1] if batch.kind == "decode" else tables[:, 0]).copy()

    for damage in (lose, swap):
        overrides = ("run.verify_samples=300",)
        report = run(fast_backend, *overrides, verify=True, on_step=damage)
        assert report["verify"]["passed"] is False


def test_values_have_a_stream_of_their_own():
    """Keys come from seed 2s at the layer's number, values from VALUE_LAYER behind it: their bits
    differ, and both are a function of layer, token and position."""
    cfg = tiny()
    with rs.Engine(cfg, "reference") as engine:
        engine.submit(rs.Request("a", [7, 8], 1))
        batch = engine.next_batch()
        from ringslab.engine.activations import open_source

        source = open_source(cfg, engine.tools.ops, engine.memory, 8)
        q, (k, v), _ = engine.run_buffers().first(2)
        source.fill(3, batch, q, (k, v), None)
        shape = (2, cfg.num_kv_heads, cfg.head_dim)
        arrays = (np.array([7, 8], np.int32), np.array([0, 1], np.int32))
        for part, hash_layer in ((k, 3), (v, VALUE_LAYER + 3)):
            wanted = hash_values(2 * cfg.run.seed, hash_layer, *arrays, shape[1] * shape[2])
            found = (part.astype(np.uint32) << 16).view(np.float32)
            assert np.array_equal(found, wanted.reshape(shape))
        assert not np.array_equal(k, v)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (np.zeros((2, 64), np.uint16), "kv must be the pair"),
        ((np.zeros((2, 2, 64), np.uint16),), "kv must be the pair"),
        (
            (np.zeros((2, 2, 64), np.uint16), np.zeros((2, 2, 32), np.uint16)),
            r"v\.shape=\(2, 2, 32",
        ),
        ((np.zeros((3, 2, 64), np.uint16),) * 2, r"k\.shape=\(3, 2, 64\) but the batch needs \(2,"),
    ],
)
def test_keys_and_values_that_do_not_fit(kv, message):
    """A single array, one part alone, and other shapes are refused before anything is stored."""
    with rs.Engine(tiny(), "reference") as engine:
        engine.submit(rs.Request("a", [7, 8], 1))
        batch = engine.next_batch()
        engine.tools.paged.pool.fill(0x55)
        for layer in (0, 1):
            with pytest.raises(ArgumentError, match=message):
                engine.attend(layer, batch, np.zeros((2, 4, 64), np.uint16), kv)
        assert (engine.tools.paged.pool == 0x55).all()


def test_what_a_hybrid_engine_refuses():
    """Recorded activations (they are latent vectors), and a request of more tokens than the pool
    holds, by `submit` and before a run."""
    with pytest.raises(ConfigError, match=r"run\.activations is file"):
        rs.Engine(tiny("run.activations=file", "run.activations_path=x"), "reference")
    cfg = tiny("engine.num_blocks=10")
    with rs.Engine(cfg, "reference") as engine:
        with pytest.raises(RequestError, match="41, more than the 40 tokens of the paged pool"):
            engine.submit(rs.Request("a", np.zeros(40, np.int32), 1))
        with pytest.raises(RequestError, match="'r3': 56 tokens are more than the paged pool"):
            engine.run(TRACE)
        assert engine.done


def test_sizes_are_known_before():
    """64 blocks of 4,096 B, tables of 4 x 64 ints, and K and V of 64 x 4 keys: 2 heads of 64."""
    sizes = engine_sizes(tiny()).paged
    assert sizes.pool_bytes == 64 * 4096
    assert (sizes.table_width, sizes.table_bytes) == (64, 1024)
    assert (sizes.load_tokens, sizes.load_bytes) == (256, 2 * 256 * 2 * 64 * 2)
    assert engine_sizes(rs.load_config("quickstart")).paged.pool_bytes == 0
    assert engine_sizes(rs.load_config("mistral_7b")).paged.pool_bytes == 0
    assert engine_sizes(rs.load_config("gpt_oss_120b")).paged.pool_bytes == 32_768 * 589_824


def test_block_tables_follow_the_schedule():
    """The device's table of each state slot equals the scheduler's after every step, through a pool
    so small that slots and blocks are handed on."""

    def check(engine, batch):
        paged, blocks = engine.tools.paged, engine.scheduler.blocks
        for row, state_id in enumerate(batch.state_ids.tolist()):
            held = batch.block_tables[row][batch.block_tables[row] >= 0]
            assert paged.tables[state_id, : len(held)].tolist() == held.tolist()
        assert blocks.num_free + blocks.counts.sum() == 26

    report = run("cpu", "engine.num_blocks=26", on_step=check)
    assert report["scheduler"]["block_preemptions"] > 0
    assert report["requests"] == 5


def test_quickstart_hybrid_on_the_command_line(capsys):
    """`ringslab run quickstart_hybrid --verify` on the CPU: 16 requests, 64 outputs checked, bytes
    measured equal to the formula, sequences preempted for blocks."""
    assert main(["run", "quickstart_hybrid", "--backend", "cpu", "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 64
    assert report["requests"] == 16
    found = report["bytes_per_sequence"]
    assert found["measured"] == found["formula"]
    assert report["scheduler"]["block_preemptions"] > 0


def test_a_pool_that_is_too_large_names_its_key():
    """A pool beyond the memory is refused before it is taken; the message says what to lower."""
    with pytest.raises(rs.errors.DeviceMemoryError, match=r"paged pool of .* lower .*num_blocks"):
        rs.Engine(tiny("engine.num_blocks=1000000000"), "cpu")
