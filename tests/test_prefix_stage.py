"""Snapshots of boundaries inside a prefill chunk, as the planner orders them: which are staged, and
where chunks end all the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_model import BOUNDED, EXACT, FULL, Cached

import ringslab as rs
from ringslab.engine.snapshot_stage import SnapshotStage
from ringslab.schedules.prefix_index import Entry
from ringslab.schedules.prefix_orders import RINGS, Stage

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


def test_a_boundary_right_before_the_last_token_is_passed():
    """33 tokens: the chunk has one token behind 32, so its slot no longer holds that snapshot."""
    one = Cached(interval=2, stage=STAGE)
    assert one.run(rs.Request("a", numbered(33), 1)) == [(0, 33)]
    assert [(order.blocks, order.place) for order in one.batches[0][2]] == [(2, 0), (4, 1)]


@pytest.mark.parametrize(("budget", "second"), [(22, (22, 40)), (23, (23, 32))])
def test_a_chunk_passes_a_boundary_a_ring_behind_its_first_token(budget, second):
    """A ring of 10 is full of the chunk's own tokens where that begins at 22, not at 23."""
    one = Cached(interval=2, stage=STAGE, token_budget=budget)
    assert one.run(rs.Request("a", numbered(40), 1))[1] == second
    assert sorted(one.stored.values()) == [2, 4]


def test_sequences_of_a_batch_share_the_stage():
    """The first takes two of three places and the second the last, so its chunk ends at 32; the
    next batch has all of them again."""
    one = Cached(interval=2, stage=STAGE, token_budget=200)
    for first, id in ((0, "a"), (500, "b")):
        one.submit(rs.Request(id, numbered(47, first), 1))
    one.step()
    batch, _, orders = one.batches[-1]
    assert batch.seqlens_q.tolist() == [47, 32]
    places = [(order.state_id, order.blocks, order.place) for order in orders]
    a, b = batch.state_ids
    assert places == [(a, 2, 0), (a, 4, 1), (b, 2, 2), (b, 4, None)]
    assert len(one.run(rs.Request("c", numbered(64, first=900), 1))) > 1
    assert [order.place for order in one.batches[1][2]] == [0, 1, 2, None]


def test_places_of_tokens():
    """Two prompts beside a decoding request, so that no row is its sequence's number. Each
    boundary takes the 10 tokens before it, from the batch's first token on where it is at 10."""
    stage = SnapshotStage(Stage(3, 10), None, frozenset())
    one = Cached(block_size=10, stage=stage.room, num_state_slots=3)
    one.submit(rs.Request("x", numbered(3, first=900), 9))
    one.step()
    for id, first, count in (("a", 0, 13), ("b", 500, 24)):
        one.submit(rs.Request(id, numbered(count, first), 1))
    one.step()
    batch = one.scheduler.next_batch()
    assert batch.seqlens_q.tolist() == [13, 24]
    assert batch.slots.tolist() == [1, 2]
    places = stage.places_of(batch, one.planner.staged)
    assert places.dtype == np.int32
    assert places.tolist() == [0] * 10 + [-1] * 3 + [1] * 10 + [2] * 10 + [-1] * 4
    places = stage.places_of(batch, one.planner.staged[2:])
    assert places.tolist() == [-1] * 23 + [2] * 10 + [-1] * 4


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


def test_a_batch_that_fails_while_it_is_picked_leaves_nothing_staged():
    """The store raises at the second request of a batch, after the first one's chunk was cut. The
    first is aborted then, and the second runs with the whole stage."""
    one = Cached(interval=2, stage=STAGE)
    one.run(rs.Request("z", numbered(16), 0))
    fetch, one.planner.fetch = one.planner.fetch, lambda keys, blocks: 1 // 0
    for id, prompt in (("a", numbered(20, first=500)), ("b", numbered(40))):
        one.submit(rs.Request(id, prompt, 0))
    with pytest.raises(ZeroDivisionError):
        one.scheduler.next_batch()
    one.planner.fetch = fetch
    one.scheduler.abort("a")
    batch = one.scheduler.next_batch()
    assert batch.request_ids == ("b",)
    assert [(staged.boundary, staged.place) for staged in one.planner.staged] == [(32, 0)]


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


def test_a_replay_over_a_boundary_that_is_gone_is_not_staged():
    """A hit at 32 under `exact` computes from 23 on. The snapshot at 24 was evicted: a replay's
    records are not the sequence's, so none is taken of it."""
    one = Cached(EXACT, stage=Stage(places=3, ring_len=1))
    one.run(rs.Request("a", numbered(32), 0))
    keys = {blocks: key for key, blocks in one.stored.items()}
    one.index.drop(Entry(RINGS, keys[3]))
    del one.stored[keys[3]]
    prompt = np.concatenate([numbered(32), numbered(12, first=700)])
    assert one.run(rs.Request("b", prompt, 0)) == [(23, 32), (32, 44)]
    assert keys[3] not in one.stored
    assert [(order.blocks, order.place) for order in one.batches[-1][2]] == [(5, 0)]


@settings(max_examples=60)
@given(data=st.data())
def test_random_batches(data):
    """Requests that share blocks, in batches of any size: what is staged lies inside a chunk, a
    ring behind its first token, outside of replays, each in a place of its own; and in the end
    every boundary of every prompt has had its snapshot."""
    draw, interval = data.draw, data.draw(st.integers(1, 3))
    room = Stage(draw(st.integers(1, 4)), draw(st.integers(1, 8 * interval)))
    budget = draw(st.sampled_from([None, 3, 6]))  # snapshots
    one = Cached(
        draw(st.sampled_from([FULL, EXACT, BOUNDED])),
        interval=interval,
        budget_bytes=budget,
        stage=room,
        token_budget=draw(st.sampled_from([7, 20, 33, 60, 150])),
        max_prefill_seqs=draw(st.integers(2, 4)),
        num_state_slots=draw(st.integers(1, 4)),
    )
    names = st.lists(st.sampled_from([0, 0, 1]), min_size=2, max_size=9)
    prompts = [
        np.concatenate([*(numbered(8, 1000 * k + 100 * n) for k, n in enumerate(blocks)), tail])
        for blocks in draw(st.lists(names, min_size=2, max_size=6))
        for tail in [numbered(draw(st.integers(1, 7)), 9999)]
    ]
    wanted, stored, waiting = set(), set(), list(enumerate(prompts))
    while waiting or not one.scheduler.done:
        count = draw(st.integers(int(one.scheduler.done), 2))
        for id, prompt in [waiting.pop(0) for _ in waiting[:count]]:
            one.submit(rs.Request(str(id), prompt, draw(st.integers(0, 20))))
            keys = one.planner._rows[one.scheduler._row_of[str(id)]].keys
            wanted |= set(keys[interval - 1 : len(prompt) // 8 : interval])
        batch = one.scheduler.next_batch()
        if batch is None:
            continue
        check_staged(one, batch, room)
        one.scheduler.commit(batch, [0] * batch.num_seqs, [7] * batch.num_seqs)
        for order in one.planner.take_snapshots():
            stored.add(order.keys[order.blocks - 1])
            one.stored[order.keys[order.blocks - 1]] = order.blocks
            for entry in one.index.insert(RINGS, order.keys, order.blocks):
                del one.stored[entry.key]
    assert wanted <= stored


def check_staged(one, batch, room):
    staged, rows = one.planner.staged, batch.slots.tolist()
    assert [each.place for each in staged] == list(range(len(staged)))
    assert len(staged) <= room.places
    assert batch.kind == "prefill" or not staged
    for each in staged:
        i = rows.index(each.row)
        first = int(batch.seqlens_k[i] - batch.seqlens_q[i])
        assert first >= batch.first_outputs[i]
        assert first + room.ring_len <= each.boundary < batch.seqlens_k[i]
    keys = [one.planner._rows[each.row].keys[each.boundary // 8 - 1] for each in staged]
    assert len(set(keys)) == len(keys)
