"""Snapshots of boundaries inside a prefill chunk: when they are taken, and that they hold what a
chunk that ends there leaves in its slot."""

import numpy as np
import pytest
from prefix_model import BOUNDED, Cached
from prefix_story import Run, block, cached, tiny_alone

import ringslab as rs
from ringslab.engine.snapshot_stage import plan_stage
from ringslab.schedules.prefix_orders import Stage

STAGE = Stage(places=3, ring_len=10)


def numbered(count, first=0):
    return np.arange(first, first + count, dtype=np.int32)


def test_a_chunk_passes_its_boundaries():
    """50 tokens, a snapshot every 16: one chunk, with snapshots at 16, 32 and 48."""
    one = Cached(interval=2, stage=STAGE)
    assert one.run(rs.Request("a", numbered(50), 1)) == [(0, 50)]
    _, _, orders = one.batches[-1]
    assert [(order.blocks, order.place) for order in orders] == [(2, 0), (4, 1), (6, 2)]
    assert one.run(rs.Request("b", numbered(50), 1)) == [(48, 50)]


def test_the_end_of_a_chunk_is_taken_from_the_slot():
    """48 tokens: the snapshot at 48 needs no place."""
    one = Cached(interval=2, stage=STAGE)
    assert one.run(rs.Request("a", numbered(48), 1)) == [(0, 48)]
    orders = one.batches[-1][2]
    assert [(order.blocks, order.place) for order in orders] == [(2, 0), (4, 1), (6, None)]


def test_a_chunk_ends_where_the_stage_is_full():
    """Three places and 100 tokens: the fourth boundary ends the chunk."""
    one = Cached(interval=2, stage=STAGE, token_budget=200)
    assert one.run(rs.Request("a", numbered(100), 1)) == [(0, 64), (64, 100)]
    assert [order.place for order in one.batches[0][2]] == [0, 1, 2, None]
    assert sorted(one.stored.values()) == [2, 4, 6, 8, 10, 12]


def test_a_boundary_close_behind_the_first_token_ends_the_chunk():
    """A budget of 25 tokens: the second chunk starts at 25, 7 before 32, and a ring of 10 would
    hold older tokens, so it ends at 32. 16 is passed, and so is 48, 16 behind 32."""
    one = Cached(interval=2, stage=STAGE, token_budget=25)
    assert one.run(rs.Request("a", numbered(52), 1)) == [(0, 25), (25, 32), (32, 52)]
    assert sorted(one.stored.values()) == [2, 4, 6]


def test_two_requests_with_one_prefix_in_a_batch():
    """The snapshot that both are due is made once; places go on with the next of the other."""
    one = Cached(interval=2, stage=STAGE)
    tail = numbered(20, first=500)
    for id, prompt in (("a", numbered(20)), ("b", np.concatenate([numbered(18), tail]))):
        one.submit(rs.Request(id, prompt, 1))
    one.step()
    batch, _, orders = one.batches[-1]
    assert batch.seqlens_q.tolist() == [20, 38]
    assert [(order.state_id, order.blocks, order.place) for order in orders] == [
        (batch.state_ids[0], 2, 0),
        (batch.state_ids[1], 4, 1),
    ]


def test_what_is_staged_takes_no_place_twice():
    """Two requests with the same 48 tokens and three places: the second passes them all, and is not
    cut where the first has filled the stage."""
    one = Cached(interval=2, stage=STAGE, token_budget=200)
    for id, count in (("a", 50), ("b", 60)):
        one.submit(rs.Request(id, numbered(count), 1))
    one.step()
    batch, _, orders = one.batches[-1]
    assert batch.seqlens_q.tolist() == [50, 60]
    assert [(order.blocks, order.place) for order in orders] == [(2, 0), (4, 1), (6, 2)]


def test_a_request_may_rely_on_one_that_is_aborted():
    """Two requests share a boundary, whose snapshot the first was to leave; it is aborted while the
    batch is computed. The second leaves its own, and the next one that passes makes it up."""
    one = Cached(interval=2, stage=STAGE, token_budget=200)
    for id, tail in (("a", 300), ("b", 500)):
        one.submit(rs.Request(id, np.concatenate([numbered(16), numbered(18, first=tail)]), 1))
    batch = one.scheduler.next_batch()
    assert [(s.boundary, s.place) for s in one.planner.staged] == [(16, 0), (32, 1), (32, 2)]
    one.scheduler.abort("a")
    one.scheduler.commit(batch, [0, 0], [7, 7])
    assert [(order.blocks, order.place) for order in one.planner.take_snapshots()] == [(4, 2)]
    one.run(rs.Request("c", np.concatenate([numbered(16), numbered(4, first=700)]), 1))
    assert sorted(one.stored.values()) == [2]


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_what_ends_in_flight_leaves_no_snapshot(end):
    """A request that is aborted or preempted while its batch is computed; the next batch has the
    whole stage again."""
    one = Cached(interval=2, stage=STAGE)
    one.submit(rs.Request("a", numbered(50), 1))
    one.submit(rs.Request("b", numbered(14, first=900), 1))
    batch = one.scheduler.next_batch()
    assert len(one.planner.staged) == 3
    getattr(one.scheduler, end)("a")
    one.scheduler.commit(batch, [0, 0], [7, 7])
    assert one.planner.take_snapshots() == []
    assert one.planner.staged == []
    while one.step():
        pass
    assert sorted(one.stored.values()) == ([2, 4, 6] if end == "preempt" else [])


def test_a_replay_is_not_staged():
    """A hit at 32 under `bounded` starts at 28 and ends its chunk at 32; only then boundaries are
    passed."""
    one = Cached(BOUNDED, interval=2, stage=STAGE)
    one.run(rs.Request("a", numbered(40), 1))
    prompt = np.concatenate([numbered(32), numbered(30, first=700)])
    assert one.run(rs.Request("b", prompt, 1)) == [(28, 32), (32, 62)]
    assert [order.place for order in one.batches[-1][2]] == [0]


@pytest.mark.parametrize("contract", ["full", "exact"])
def test_staged_snapshots_are_those_of_chunks_that_end_there(backend, contract):
    """Four prompts in one batch, snapshots every 16 tokens. The ring records of every value in the
    store, byte for byte, are those of an engine whose chunks end at snapshots; and requests that
    hit them give the outputs of requests alone."""
    overrides = (
        "prefix.snapshot_blocks=2",
        "engine.token_budget=200",
        "engine.num_state_slots=4",
        "engine.max_prefill_seqs=4",
    )
    prompts = [
        np.concatenate([*(block(10 * n + k) for k in range(2 * n)), block(90 + n)[:5]])
        for n in (1, 2, 3, 3)
    ]
    found, chunks = [], []
    for staged in (True, False):
        with cached(contract, *overrides, backend=backend) as engine:
            assert engine.prefix.planner.stage == Stage(16, 11)
            if not staged:
                engine.prefix.planner.stage = None
            run = Run(engine)
            for i, prompt in enumerate(prompts):
                run.submit(f"r{i}", prompt.astype(np.int32), 3)
            batch = run.step()
            chunks.append(batch.seqlens_q.tolist())
            run.run()
            engine.prefix.flush()
            found.append(stored_records(engine))
            for i, prompt in enumerate(prompts):
                id = f"again{i}"
                run.submit(id, prompt.astype(np.int32), 2)
                run.run()
                boundary = len(prompt) - 5
                is_hit = contract == "full" or boundary > 3 * 7 + 10  # the reach of `exact`
                assert run.first_outputs[id][1] == (boundary if is_hit else 0)
                wanted = tiny_alone(tuple(run.known[id].tolist()))
                if backend == "cpu":
                    for (name, layer, position), rows in run.outputs.items():
                        if name == id:
                            assert np.array_equal(rows, wanted[layer, position])
    assert chunks == [[21, 37, 53, 53], [16, 16, 16, 16]]
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) >= 6
    for key, records in found[0].items():
        for one, other in zip(records, found[1][key], strict=True):
            assert np.array_equal(one, other)


def stored_records(engine):
    """By key, the records of each ring of a snapshot, uint8 [ring_len, record_bytes]."""
    shelf, layout, found = engine.prefix.store.shelf, engine.cfg.slot_layout, {}
    for key, sealed in shelf._values.items():
        value = np.frombuffer(sealed, np.uint8)[-engine.prefix.num_bytes :]
        slot = np.zeros(layout.slot_bytes, np.uint8)
        slot[: len(value)] = value
        found[key] = [
            layout.view(slot, ring.layer)[0, :, 0].copy()
            for ring in layout.rings
            if ring.kind == "swa" and ring.offset < len(value)
        ]
    return found


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (("prefix.snapshot_blocks=1",), None),  # 8 tokens from one to the next, rings of 11
        (("prefix.snapshot_blocks=2",), Stage(2, 11)),  # a budget of 32
        (("prefix.snapshot_blocks=2", "engine.token_budget=9"), None),
        (("prefix.snapshot_blocks=2", "engine.token_budget=5000"), Stage(16, 11)),
    ],
)
def test_where_there_is_a_stage(overrides, wanted):
    """Not where snapshots would share tokens, nor where a chunk is shorter than a ring; its places
    are bounded."""
    with cached("full", *overrides) as engine:
        assert plan_stage(engine.cfg, engine.prefix.num_bytes) == wanted
        assert engine.prefix.planner.stage == wanted


def test_no_stage_beside_pinned_positions():
    """The first positions of a sequence are in its ring for good, and rarely in the chunk."""
    cfg = rs.load_config("deepseek_v4_1_flash.yaml", ("prefix.contract=full",))
    size = cfg.slot_layout.slot_bytes
    assert plan_stage(cfg, size) == Stage(16, 134)
    ring = cfg.slot_layout.rings[0]
    object.__setattr__(ring, "sink_tokens", 4)
    try:
        assert plan_stage(cfg, size) is None
    finally:
        object.__setattr__(ring, "sink_tokens", 0)
