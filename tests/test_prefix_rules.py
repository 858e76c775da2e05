"""The arithmetic of the three contracts, and what the scheduler makes of a hit."""

from pathlib import Path

import numpy as np
import pytest
from prefix_model import BOUNDED, EXACT, FULL, Cached

import ringslab as rs
from ringslab.engine.traces import read_trace
from ringslab.errors import RequestError
from ringslab.schedules.prefix_rules import Resume, resume_rule

FLASH = "deepseek_v4_1_flash.yaml"


def test_the_numbers_of_v4_1_flash():
    """40 layers of window 128: a reach of 40 x 127 = 5,080. Ring 134 = 127 + 5 + 2: a snapshot
    that a decode step of 6 tokens overshot still allows to start 2 positions before it, a whole
    group of compression ratio 2."""
    rule = resume_rule(rs.load_config(FLASH), "exact")
    assert (rule.reach, rule.window, rule.ratio, rule.back) == (5080, 128, 2, 2)
    assert rule.resume(8192, 9000) == Resume(8192, 3112, 3112, 8192, restore_first=False)
    assert rule.resume(5080, 9000) is None  # as much work as without a hit
    assert rule.resume(5120, 9000).start == 40
    assert rule.resume(8192, 8192) == Resume(8192, 3110, 3110, 8191, restore_first=False)


@pytest.mark.parametrize("case", [(256, 300), (256, 256), (255, 257)])
def test_where_computing_begins(case):
    """Ring 134, window 128. `full` goes on at the boundary, or at the group of the last token;
    `bounded` one window before it."""
    boundary, tokens = case
    cfg = rs.load_config(FLASH)
    if boundary % 2:
        return
    full = resume_rule(cfg, "full").resume(boundary, tokens)
    bounded = resume_rule(cfg, "bounded").resume(boundary, tokens)
    assert full.start == min(boundary, tokens - 2)
    assert (full.swa_valid_start, full.first_output) == (0, full.start)
    assert (bounded.start, bounded.swa_valid_start) == (boundary - 128, boundary - 128)
    assert bounded.first_output == min(boundary, tokens - 1)


@pytest.mark.parametrize("name", ["quickstart.yaml", FLASH, "tiny"])
def test_a_decode_step_leaves_what_a_start_needs(name):
    """For every boundary that a decode step of up to tokens_per_step tokens can pass, and every
    number of kept drafts: the oldest key of the earliest start is still in the ring. One position
    earlier it is not."""
    from engine_runs import TINY

    cfg = rs.load_config(TINY if name == "tiny" else name)
    rule = resume_rule(cfg, "full")
    layer = cfg.layers[0]
    boundary = 10 * layer.ring_len
    lost = 0
    for first in range(boundary - cfg.tokens_per_step, boundary):
        end = first + cfg.tokens_per_step  # every position below was stored
        kept = [first + 1 + n for n in range(cfg.tokens_per_step) if first + 1 + n >= boundary]
        if not kept:
            continue  # the step does not commit the boundary
        needed = boundary - rule.back - (layer.window - 1)
        in_ring = range(end - layer.ring_len, end)
        assert needed in in_ring
        lost += needed - 1 not in in_ring
    assert lost == 1  # of the step that overshoots most


def test_the_last_token_is_computed_once():
    """A prompt of 16 tokens in blocks of 8, twice: the second time 1 token at position 15."""
    cached = Cached(FULL)
    prompt = np.arange(16, dtype=np.int32)
    assert cached.run(rs.Request("a", prompt, 1)) == [(0, 8), (8, 16)]
    assert cached.run(rs.Request("b", prompt, 1)) == [(15, 16)]
    batch, restores, snapshots = cached.batches[-1]
    assert batch.is_last_chunk.all()
    assert batch.is_first_chunk.all()
    assert [order.snapshot for order in restores] == [2]
    assert snapshots == []


def test_tokens_are_counted_after_the_hit():
    """465 tokens, 256 of them cached: 209 are computed, and the chunk ends at 465. A hit of 128
    tokens of 128 computes one."""
    cached = Cached(FULL, block_size=128, token_budget=1000)
    start = np.arange(256, dtype=np.int32)
    cached.run(rs.Request("a", start, 1))
    tail = np.arange(1000, 1209, dtype=np.int32)
    found = cached.run(rs.Request("b", np.concatenate([start, tail]), 1))
    assert found == [(256, 384), (384, 465)]  # a snapshot is due at 384
    assert cached.run(rs.Request("c", start[:128], 1)) == [(127, 128)]


def test_a_sequence_without_a_boundary_gives_nothing():
    """500 tokens in blocks of 512: a request that shares 400 of them finds no snapshot, whatever
    its windows."""
    cached = Cached(FULL, block_size=512, token_budget=1000)
    tokens = np.arange(500, dtype=np.int32)
    cached.run(rs.Request("a", tokens, 1))
    assert cached.run(rs.Request("b", tokens[:400], 1)) == [(0, 400)]
    assert cached.planner.counters.hits == 0


@pytest.mark.parametrize(("rule", "start"), [(EXACT, 7), (BOUNDED, 12)])
def test_a_replay_ends_at_its_boundary_and_is_not_stored(rule, start):
    """Reach 9, window 4, blocks of 8, a hit of 16 tokens: `exact` starts at 7, `bounded` at 12;
    its chunk ends at 16 with the copy of the stored rings, position 8 is passed without a snapshot,
    and the next snapshot is that of 24."""
    cached = Cached(rule)
    prompt = np.arange(30, dtype=np.int32)
    cached.run(rs.Request("a", prompt[:16], 1))
    again = np.concatenate([prompt[:16], prompt[:10]])
    assert cached.run(rs.Request("b", again, 1)) == [(start, 16), (16, 24), (24, 26)]
    replay, after, _ = cached.batches[-3:]
    assert replay[0].swa_valid_start.tolist() == [start]
    assert replay[0].first_outputs.tolist() == [16]
    assert len(replay[1]) == 1  # the restore at the boundary
    assert (replay[2], len(after[2])) == ([], 1)
    assert cached.planner.counters.replayed_tokens == 16 - start


def test_swa_valid_start_goes_back_to_0_on_a_recompute():
    """Preempted in its replay, with the cache emptied meanwhile: the request starts at 0, and no
    ring position is missing."""
    cached = Cached(EXACT, token_budget=4)
    prompt = np.arange(20, dtype=np.int32)
    cached.run(rs.Request("a", prompt[:16], 1))
    cached.submit(rs.Request("b", prompt, 1))
    cached.step()
    assert cached.batches[-1][0].swa_valid_start.tolist() == [7]
    cached.scheduler.preempt("b")
    cached.index.clear()
    while cached.step():
        batch = cached.batches[-1][0]
        assert batch.swa_valid_start.tolist() == batch.start_positions.tolist() == [0]
    assert cached.scheduler.state("b") == "finished"


def test_a_preempted_request_finds_its_own_snapshots():
    """Blocks of 8, 20 prompt tokens and one generated, preempted: it goes on at 16, to 21."""
    cached = Cached(FULL, token_budget=19)
    cached.submit(rs.Request("a", np.arange(20, dtype=np.int32), 4))
    for _ in range(3):
        cached.step()
    cached.scheduler.preempt("a")
    assert cached.run()[0] == (16, 21)


def test_decode_passes_a_boundary_with_its_drafts():
    """Steps of 3 tokens, all kept, from 15 on: position 16 is passed in the middle of a step, and
    its prefix is stored, under the key of prompt and generated tokens."""
    cached = Cached(FULL)
    prompt = np.array([7] * 14, np.int32)
    steps = cached.run(rs.Request("a", prompt, 12), drafts=2, accepted=2)
    assert (14, 17) in steps
    assert sorted(cached.stored.values()) == [1, 2, 3]
    assert cached.run(rs.Request("b", np.array([7] * 20, np.int32), 1)) == [(16, 20)]


def test_what_the_store_lost_is_a_miss():
    """The snapshot at 16 cannot be read: the request falls back to that at 8, the slot is whole,
    and the entry is gone from the index."""
    cached = Cached(FULL)
    prompt = np.arange(20, dtype=np.int32)
    cached.run(rs.Request("a", prompt, 1))
    key = next(key for key, blocks in cached.stored.items() if blocks == 2)
    del cached.stored[key]
    assert cached.run(rs.Request("b", prompt, 1)) == [(8, 16), (16, 20)]
    assert cached.planner.counters.failed_reads == 1
    assert cached.index.stats["rings"].dropped == 1
    assert cached.scheduler.free_slots == 2


def test_retention_interval_and_budget():
    """Every 3rd block of 8 tokens is kept; a budget of one snapshot keeps the last."""
    cached = Cached(FULL, interval=3, budget_bytes=1)
    prompt = np.arange(50, dtype=np.int32)
    assert cached.run(rs.Request("a", prompt, 1)) == [(0, 24), (24, 48), (48, 50)]
    assert list(cached.stored.values()) == [6]
    assert cached.run(rs.Request("b", prompt, 1)) == [(48, 50)]


def test_hash_ids_are_used_as_they_are():
    """Equal ids hit although the tokens differ; ids that do not cover the prompt are refused and
    nothing changes."""
    cached = Cached(FULL)
    a, b = np.arange(20, dtype=np.int32), np.arange(100, 120, dtype=np.int32)
    cached.run(rs.Request("a", a, 1, hash_ids=(5, 6, 9)))
    assert cached.run(rs.Request("b", b, 1, hash_ids=(5, 6, 8))) == [(16, 20)]
    with pytest.raises(RequestError, match="1 hash_ids for 2 whole blocks"):
        cached.submit(rs.Request("c", a, 1, hash_ids=(5,)))
    for id in (-1, 2**64, 1.5, "5"):
        with pytest.raises(RequestError, match=r"hash id .* must be an integer"):
            cached.submit(rs.Request("c", a, 1, hash_ids=(5, id)))
    with pytest.raises(RequestError, match="must be a sequence"):
        cached.submit(rs.Request("c", a, 1, hash_ids=5))
    assert cached.run(rs.Request("d", b, 1, hash_ids=np.array([5, 6, 2**40]))) == [(16, 20)]
    assert cached.scheduler.done
    assert cached.planner.counters.best_blocks == 4


SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "traces"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside the repository")
def test_a_trace_one_request_after_another():
    """The scheduler with an endless cache and a snapshot at every block, ids of 4 tokens: all 322
    blocks that the first 200 requests of the conversation trace can have."""
    path = SHARED / "mooncake_conversation_first2000.jsonl"
    cached = Cached(FULL, block_size=4, token_budget=1 << 16, num_state_slots=1)
    for entry in read_trace(path, num_requests=200, block_tokens=4):
        prompt = entry.prompt(seed=1, vocab_size=1000)
        cached.run(rs.Request(entry.id, prompt, entry.max_new_tokens, 0.0, entry.hash_ids))
    counters = cached.planner.counters
    assert (counters.hit_blocks, counters.best_blocks) == (322, 322)
    entries = read_trace(path, num_requests=200, block_tokens=4)
    prompts = sum(entry.prompt_len for entry in entries)
    assert cached.scheduler.counters.prefill_tokens == prompts - 4 * 322
