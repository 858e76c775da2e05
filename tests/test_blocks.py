"""Blocks of the paged pool: given out, grown into, taken back, and made room for."""

import numpy as np
import pytest
from scheduler_model import limits, prompt, watched

import ringslab as rs
from ringslab.errors import ArgumentError, RequestError
from ringslab.schedules.blocks import BlockTables


def test_blocks_grow_and_come_back():
    """Blocks of 4 tokens: 9 tokens need 3, 12 still 3, 13 a fourth; the lowest ones go first, and
    what one sequence gave back the next one takes in the same order."""
    blocks = BlockTables(num_blocks=6, block_size=4, num_state_slots=2, max_seq_len=100)
    assert blocks.tables.shape == (2, 6)  # no sequence can hold more than there are
    blocks.grow(1, 9)
    assert blocks.tables[1].tolist() == [0, 1, 2, -1, -1, -1]
    blocks.grow(1, 12)
    assert (blocks.num_free, blocks.missing(1, 13), blocks.missing(1, 1)) == (3, 1, 0)
    blocks.grow(0, 1)
    blocks.grow(1, 13)
    assert blocks.rows(np.array([1, 0])).tolist() == [[0, 1, 2, 4], [3, -1, -1, -1]]
    blocks.release(1)
    assert (blocks.num_free, blocks.counts.tolist()) == (5, [1, 0])
    blocks.grow(1, 20)
    assert blocks.tables[1].tolist() == [0, 1, 2, 4, 5, -1]
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        blocks.grow(0, 5)


def test_admission_knows_paged_tokens():
    """Three slots, 5 blocks of 4: a prompt of 12 takes 3, the next of 4 would leave no spare block
    for the first (5 - 3 - 1 = 1 is enough: it runs), a third of 4 waits for blocks."""
    w = watched(num_state_slots=3, tokens_per_step=1, token_budget=64, num_blocks=5, block_size=4)
    for id, count in (("a", 12), ("b", 4), ("c", 4)):
        w.submit(id, prompt(count), 1)
    batch = w.next_batch()
    assert batch.request_ids == ("a", "b")
    assert batch.block_tables.tolist() == [[0, 1, 2], [3, -1, -1]]
    assert w.scheduler.free_blocks == 1
    w.commit(batch, w.compute(batch), lambda right: [])
    assert w.scheduler.free_blocks == 5  # both have ended
    w.run()


def test_request_that_never_fits():
    """5 blocks of 4: 20 tokens are taken, 21 refused with both numbers."""
    w = watched(num_blocks=5, block_size=4)
    with pytest.raises(RequestError, match=r"15 prompt tokens .* 21, more than the 20 tokens of"):
        w.scheduler.submit(rs.Request("big", prompt(15), 6))
    w.submit("full", prompt(15), 5)
    w.run()
    assert w.scheduler.state("full") == "finished"


def test_the_youngest_gives_way():
    """Two sequences of 8 tokens in 6 blocks of 4 grow to 16 each: the pool runs out when both need
    a fourth block. The younger is preempted, the older goes on to its end, then the younger is
    computed again; both give the tokens of a run alone."""
    w = watched(num_state_slots=2, tokens_per_step=1, token_budget=64, num_blocks=6, block_size=4)
    w.submit("old", prompt(8), 8)
    w.submit("young", prompt(8, first=2), 8)
    while w.scheduler.counters.block_preemptions == 0:
        assert w.step()
    assert (w.scheduler.state("old"), w.scheduler.state("young")) == ("decode", "waiting")
    assert w.scheduler.tokens("old").shape == (14,)  # the 13th began its fourth block
    while w.scheduler.state("old") != "finished":
        assert w.scheduler.state("young") == "waiting", "admitted without room to grow"
        assert w.step()
    w.run()
    counters = w.scheduler.counters
    assert (counters.preempted, counters.block_preemptions, counters.finished) == (1, 1, 2)


def test_aborts_and_preemptions_give_blocks_back():
    """A preempted request holds no block, an aborted one neither, even with its batch in flight."""
    w = watched(num_state_slots=2, token_budget=64, num_blocks=20, block_size=4)
    w.submit("a", prompt(30), 5)
    w.submit("b", prompt(10), 5)
    w.step()
    assert w.scheduler.free_blocks == 20 - 8 - 3
    w.preempt("a")
    assert w.scheduler.free_blocks == 17
    batch = w.next_batch()
    out = w.compute(batch)
    w.abort(batch.request_ids[0])
    w.commit(batch, out, lambda right: [])
    w.abort("b" if batch.request_ids[0] == "a" else "a")
    assert w.scheduler.free_blocks == 20


def test_limits_of_the_pool():
    """One of num_blocks and block_size alone, and numbers below 1, are refused."""
    for change in ({"num_blocks": 3}, {"block_size": 3}):
        with pytest.raises(ArgumentError, match="give both or neither"):
            limits(**change)
    with pytest.raises(ArgumentError, match="num_blocks=0 must be 1 or more"):
        limits(num_blocks=0, block_size=4)


@pytest.mark.parametrize("seed", range(6))
def test_no_one_starves(seed):
    """40 requests through a pool that holds little more than the longest of them, with drafts and
    preemptions at random steps: all finish, with the tokens of a run alone, in the steps that
    they would need one after the other at most (each preempts the others a few times)."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 2, 5, 16]))
    w = watched(
        window=int(rng.choice([1, 4, 9])),
        num_state_slots=int(rng.integers(2, 6)),
        token_budget=int(rng.choice([7, 16, 64])),
        max_prefill_seqs=int(rng.integers(1, 5)),
        max_decode_seqs=int(rng.integers(1, 5)),
        tokens_per_step=int(rng.integers(1, 5)),
        max_seq_len=90,
        chunked_prefill=bool(rng.integers(0, 2)),
        num_blocks=-(-90 // block_size) + int(rng.integers(0, 4)),
        block_size=block_size,
    )
    for i in range(40):
        count = int(rng.integers(1, 60))
        w.submit(str(i), rng.integers(0, 23, count).tolist(), int(rng.integers(0, 30)))
    steps = 0
    while w.step(lambda right: [int(t + (rng.random() < 0.3)) % 23 for t in right]):
        steps += 1
        assert steps < 10_000
        running = [id for id, seq in w.live.items() if seq.slot >= 0]
        if running and rng.random() < 0.02:
            w.preempt(str(rng.choice(running)))
    assert w.scheduler.done
    assert w.scheduler.counters.finished == 40
    assert w.scheduler.counters.block_preemptions > 0
    w.check_outputs()
