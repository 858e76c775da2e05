"""The ends of every range: positions, state slots, windows, drafts, vocabulary. Addresses past 2^31
and 2^32 bytes are in test_large_slab.py."""

import numpy as np
import pytest
from engine_runs import Story, tiny
from helpers import (
    encoded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    run_decode,
    run_prefill,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.errors import ArgumentError, RequestError
from ringslab.layouts.rings import MAX_POSITION, ring_index
from ringslab.schedules.scheduler import Scheduler, SchedulerLimits

GROUPS = ("producers_plain", "producers_compressed", "consumers", "drafts")


@pytest.mark.parametrize("position", [MAX_POSITION, MAX_POSITION - 1, 2**30])
def test_positions_to_the_last_int32(position):
    """A step of one and of several tokens at the largest positions: plans hold them, and one more
    is refused by its number."""
    first = position - 2
    plan = rs.plan_decode(
        [1] * 3, list(range(first, position + 1)), window=4, ring_len=7, cu_seqlens_q=[0, 3]
    )
    assert plan.positions.tolist() == [first, first + 1, position]
    oldest = np.array([first, first + 1, position], np.int64) - 3
    assert plan.offset_len[:, 0].tolist() == (7 + ring_index(oldest, 7)).tolist()
    prefill = rs.plan_prefill([0], [3], [position + 1], window=4, ring_len=7)
    assert prefill.positions.tolist() == [first, first + 1, position]
    for refused in (
        lambda: rs.plan_decode([0], [MAX_POSITION + 1], window=4, ring_len=7),
        lambda: rs.plan_prefill([0], [1], [MAX_POSITION + 2], window=4, ring_len=7),
        lambda: SchedulerLimits(1, 1, 1, 1, 1, MAX_POSITION + 2),
    ):
        with pytest.raises(ArgumentError, match=r"214748364[678]"):
            refused()


@pytest.mark.parametrize("plane_order", ["interleaved", "planar"])
def test_the_last_positions_are_like_any_others(backend, plane_order):
    """A chunk of 5 and a step of 3 that end at position 2^31 - 2, over a ring of 11: the bytes of
    the slab and every output bit are those of the same tokens 11 * 195,225,000 positions
    earlier."""
    fmt, window, ring_len = record_format(32, plane_order=plane_order), 8, 11
    layout = make_layout(fmt, ring_len)
    rng = np.random.default_rng(3)
    kv, q = random_bf16(rng, (16, 32)), random_bf16(rng, (16, 2, 32))
    ops, found = operations(backend), []
    for last in (MAX_POSITION, MAX_POSITION - 11 * 195_225_000):
        slab = to_backend(poisoned_slab(layout, 2), backend)
        first = last - 15
        positions = np.arange(first, last + 1, dtype=np.int64).astype(np.int32)
        ids = to_backend(np.ones(16, np.int32), backend)
        place = to_backend(positions, backend)
        ops.ring_store(slab, layout, 0, to_backend(kv[:8], backend), ids[:8], place[:8])
        plan = rs.plan_prefill([1], [5], [first + 13], window=window, ring_len=ring_len)
        joint = np.full((window + 5, fmt.record_bytes), 0xFF, np.uint8)
        joint = to_backend(joint, backend)
        ops.load_history(slab, layout, 0, to_backend(plan, backend), joint)
        joint[window:] = to_backend(encoded(kv[8:13], fmt), backend)
        host = to_host(joint)
        chunk, _ = run_prefill(backend, q[8:13], host, plan, fmt, softmax_scale=0.2)
        ops.store_records(slab, layout, 0, joint[window:], ids[:5], place[8:13])
        ops.ring_store(slab, layout, 0, to_backend(kv[13:], backend), ids[:3], place[13:])
        plan = rs.plan_decode(
            [1] * 3, positions[13:], window=window, ring_len=ring_len, cu_seqlens_q=[0, 3]
        )
        step, _ = run_decode(backend, q[13:], to_host(slab), layout, 0, plan, softmax_scale=0.2)
        found.append((to_host(slab), chunk, step))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("slots", [1, 2, 4096])
def test_one_to_4096_state_slots(backend, slots):
    """The last slot of 1, 2 and 4,096 stores, loads and decodes like a slab of its own: equal bits;
    the slots before it keep their bytes, and the slot behind it is refused on the host."""
    fmt, ring_len, state = record_format(32), 9, slots - 1
    layout = make_layout(fmt, ring_len)
    kv, q = (random_bf16(np.random.default_rng(1), shape) for shape in ((5, 32), (1, 2, 32)))
    found = []
    for count, slot in ((slots, state), (1, 0)):
        slab = to_backend(poisoned_slab(layout, count), backend)
        ids = to_backend(np.full(5, slot, np.int32), backend)
        positions = to_backend(i32(range(5, 10)), backend)
        operations(backend).ring_store(slab, layout, 1, to_backend(kv, backend), ids, positions)
        host = to_host(slab)
        plan = rs.plan_decode([slot], [9], window=4, ring_len=ring_len)
        out, lse = run_decode(backend, q, host, layout, 1, plan, softmax_scale=0.2)
        assert (host[: slot * layout.slot_bytes] == 0xFF).all()
        found.append((host[slot * layout.slot_bytes :], out, lse))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    host = poisoned_slab(layout, slots)
    with pytest.raises(ArgumentError, match=rf"state_ids\[0\]={slots} but must be -1"):
        rs.ring_store(host, layout, 1, kv[:1], i32([slots]), i32([0]))


def test_4096_sequences_at_once():
    """A scheduler of 4,096 slots fills all of them, each once, decodes all in one batch, and has
    all of them free at the end; 0 and a fraction are no number of slots."""
    limits = SchedulerLimits(4096, 1 << 20, 4096, 4096, 2, 64)
    scheduler = Scheduler(limits)
    for i in range(4100):
        scheduler.submit(rs.Request(str(i), [i % 7], 2))
    batch = scheduler.next_batch()
    assert sorted(batch.state_ids.tolist()) == list(range(4096))
    scheduler.commit(batch, [0] * 4096, [1] * 4096)
    batch = scheduler.next_batch()
    assert batch.kind == "prefill" or batch.num_seqs == 4096
    while batch is not None:
        n = batch.num_seqs
        scheduler.commit(batch, [0] * n, [1] * n)
        batch = scheduler.next_batch()
    assert scheduler.free_slots == 4096
    assert scheduler.counters.finished == 4100
    for slots in (0, -1, 1.5, True, None):
        with pytest.raises(ArgumentError):
            rs.empty_slab(tiny().slot_layout, slots)


@pytest.mark.parametrize("window", [1, 2, 9])
def test_smallest_and_largest_window_of_a_ring(backend, window):
    """Windows of 1, 2 and 9 (the most that a ring of 11 holds with 3 tokens a step): a whole run
    with drafts, chunks and full slots is within the bound of float64."""
    changes = [f"layer_groups.{group}.window={window}" for group in GROUPS]
    with rs.Engine(tiny(*changes, "run.verify_samples=200"), backend) as engine:
        report = engine.run(verify=True)
    assert report["verify"]["passed"] is True
    assert report["verify"]["checked"] == 200


def test_a_window_past_the_ring_is_refused():
    """10 + 3 - 1 = 12 > 11: both numbers, for each of the four rings."""
    with pytest.raises(rs.errors.ConfigError) as caught:
        tiny(*[f"layer_groups.{group}.window=10" for group in GROUPS])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all("10 + 3 - 1 = 12 (11 < 12)" in line for line in lines)


@pytest.mark.parametrize("name", ["model.vocab_size=1", "engine.token_budget=1"])
def test_a_run_at_the_smallest_numbers(name):
    """A vocabulary of one token (no wrong draft exists), and one prompt token a batch."""
    with rs.Engine(tiny(name, "engine.num_state_slots=1"), "reference") as engine:
        report = engine.run(verify=True)
    assert report["verify"]["passed"] is True
    if "vocab" in name:
        assert report["batches"]["accepted_drafts"] == report["batches"]["drafted_tokens"]


def test_a_request_of_the_longest_sequence():
    """max_seq_len 512: 512 tokens run to the last position, 511; 513 are refused with both."""
    story = Story()
    with rs.Engine(tiny(), "reference", 1) as engine:
        with pytest.raises(RequestError, match=r"513, more than max_seq_len=512"):
            engine.submit(rs.Request("a", story.prompt("a", 500), 13))
        engine.submit(rs.Request("a", story.prompt("a", 500), 12))
        positions = []
        story.run(engine, drafts=2, right=2, after_step=lambda b: positions.append(b.positions[-1]))
        assert max(positions) <= 511
        assert len(engine.tokens("a")) == 512
    assert i32([511]) == max(positions)
