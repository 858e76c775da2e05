"""The scheduler: public bug cases, drafts, fairness, preemption, abort, reuse of slots."""

import numpy as np
import pytest
from scheduler_model import END_TOKEN, limits, oracle, prompt, watched

import ringslab as rs
from ringslab.errors import RequestError
from ringslab.schedules.scheduler import Scheduler


def run_until(w, id, state):
    """Steps until a request is in a state; returns the number of steps."""
    for steps in range(1000):
        if w.scheduler.state(id) == state:
            return steps
        assert w.step()
    raise AssertionError(f"{id} never {state}")


def test_c01_same_id_twice():
    """Refused while it lives, the first unaffected; accepted after it ended; no slot lost."""
    w = watched()
    w.submit("a", prompt(5), 6)
    w.step()
    with pytest.raises(RequestError, match="'a' is decode"):
        w.scheduler.submit(rs.Request("a", prompt(3), 2))
    w.run()
    first = w.scheduler.outputs("a").tolist()
    assert first == oracle(prompt(5), 6, 4, ends=False)
    w.submit("a", prompt(3, first=2), 2)
    w.run()
    assert w.scheduler.outputs("a").tolist() == oracle(prompt(3, first=2), 2, 4, ends=False)
    assert w.scheduler.free_slots == 2


def test_c02_request_that_can_never_fit():
    """Capacity 100: 101 tokens are refused at submit with both numbers, 10 run; exactly 100 fit."""
    w = watched()
    for count, new in ((101, 0), (60, 41), (1, 100)):
        with pytest.raises(RequestError, match=f"{count} prompt tokens .* 101, .*max_seq_len=100"):
            w.scheduler.submit(rs.Request("big", prompt(count), new))
    w.submit("small", prompt(10), 3)
    w.submit("full", prompt(60), 40)
    w.run()
    assert w.scheduler.state("small") == w.scheduler.state("full") == "finished"
    assert w.scheduler.counters.refused == 3


def test_c03_admission_holds_to_the_end():
    """One slot: A 60 + 30 runs to its end while B 40 + 30 waits; neither dies in decode."""
    w = watched(num_state_slots=1)
    w.submit("A", prompt(60), 30)
    w.submit("B", prompt(40), 30)
    while w.scheduler.state("A") != "finished":
        assert w.scheduler.state("B") == "waiting"
        assert w.step()
    w.run()
    assert w.scheduler.outputs("B").shape == (30,)


def test_c05_long_prefill_against_running_decodes():
    """One sequence decodes while a prompt of 64 comes in chunks of 8: at most one prefill batch
    between two decodes, and a short prompt behind it starts within 2 * (64 / 8) + 2 steps."""
    w = watched(num_state_slots=3, tokens_per_step=1)
    w.submit("runs", prompt(3), 60)
    w.step()
    w.submit("long", prompt(64), 2)
    w.submit("short", prompt(2), 2)
    kinds = []
    while w.scheduler.state("short") == "waiting":
        batch = w.next_batch()
        kinds.append("runs" in batch.request_ids)
        w.commit(batch, w.compute(batch), lambda right: [])
    assert len(kinds) <= 2 * 8 + 2
    gaps = "".join("d" if decode else "p" for decode in kinds)
    assert "pp" not in gaps
    w.run()


def test_c06_back_after_preemption():
    """5 prompt + 3 generated tokens, preempted: 8 tokens are computed again, the next position is
    8, and the tokens are those of a run without preemption."""
    w = watched(tokens_per_step=1)
    w.submit("a", prompt(5), 9)
    w.step()
    w.step()
    w.step()
    assert len(w.scheduler.outputs("a")) == 3
    w.preempt("a")
    assert w.scheduler.free_slots == 2
    batch = w.next_batch()
    assert batch.kind == "prefill"
    assert batch.positions.tolist() == list(range(8))
    assert batch.is_first_chunk.tolist() == [True]
    w.commit(batch, w.compute(batch), lambda right: [])
    batch = w.next_batch()
    assert (batch.kind, batch.positions.tolist()) == ("decode", [8])
    w.commit(batch, w.compute(batch), lambda right: [])
    w.run()
    assert w.scheduler.outputs("a").tolist() == oracle(prompt(5), 9, 4, ends=False)
    assert w.scheduler.counters.recomputed_tokens == 7  # the eighth had not been computed yet


def test_c06_preempted_goes_to_the_head_of_the_queue():
    """One slot, "b" waits, "a" is preempted: "a" goes on first, then "b"."""
    w = watched(num_state_slots=1)
    w.submit("a", prompt(5), 9)
    w.submit("b", prompt(5), 9)
    w.step()
    w.preempt("a")
    assert w.next_batch().request_ids == ("a",)


def test_c07_nothing_to_do():
    """No request: None, and done. max_new_tokens 0: the prompt is computed, no token comes out, and
    commit needs no next_tokens."""
    w = watched()
    assert w.next_batch() is None
    assert w.scheduler.done
    w.submit("a", prompt(5), 0)
    batch = w.scheduler.next_batch()
    assert batch.is_last_chunk.tolist() == [True]
    w.scheduler.commit(batch, [0])
    assert w.scheduler.state("a") == "finished"
    assert w.scheduler.outputs("a").tolist() == []
    assert w.scheduler.done
    assert w.scheduler.next_batch() is None


def test_c09_abort_in_every_state():
    """Waiting, in mid prefill, decoding, preempted, in flight, and twice: all slots are free after
    each, and the next request gets its own tokens."""
    w = watched(num_state_slots=1)
    for case in ("waiting", "mid prefill", "decoding", "preempted", "in flight"):
        w.submit(case, prompt(20), 9)
        if case == "mid prefill":
            w.step()
            assert 0 < w.live[case].computed < 20
        elif case in ("decoding", "preempted"):
            run_until(w, case, "decode")
        if case == "preempted":
            w.preempt(case)
        if case == "in flight":
            batch = w.next_batch()
            out = w.compute(batch)
        w.abort(case)
        assert w.scheduler.free_slots == 1
        assert w.scheduler.state(case) == "aborted"
        w.abort(case)
        assert w.scheduler.free_slots == 1
        if case == "in flight":
            w.commit(batch, out, lambda right: right)
            assert w.scheduler.free_slots == 1
        assert w.scheduler.done
    w.submit("after", prompt(6), 5)
    w.run()
    assert w.scheduler.counters.aborted == 5
    with pytest.raises(RequestError, match="no request 'never'"):
        w.scheduler.abort("never")


def test_c10_one_prompt_larger_than_the_budget():
    """Budget 64, prompt 100: chunks of 64 and 36, or the prompt alone; never an empty batch, and
    the next prompt is not put in front of it."""
    w = watched(token_budget=64, max_seq_len=200)
    w.submit("a", prompt(100), 1)
    w.submit("b", prompt(5), 1)
    batches = [w.next_batch()]
    w.commit(batches[0], w.compute(batches[0]), lambda right: [])
    batches.append(w.next_batch())
    assert [batch.seqlens_q.tolist() for batch in batches] == [[64], [36, 5]]
    assert [batch.is_last_chunk.tolist() for batch in batches] == [[False], [True, True]]
    w = watched(token_budget=64, max_seq_len=200, chunked_prefill=False)
    for id, count in (("small", 30), ("a", 100), ("b", 5)):
        w.submit(id, prompt(count), 1)
    sizes = []
    while (batch := w.next_batch()) is not None:
        sizes.append(batch.seqlens_q.tolist())
        w.commit(batch, w.compute(batch), lambda right: [])
    assert sizes == [[30], [100], [5]]


def test_s05_drafts_stop_at_the_end_of_the_context():
    """max_seq_len 4,096, p = 4,092, 5 drafts proposed: 3 run, the last position is 4,095."""
    s = Scheduler(limits(max_seq_len=4096, tokens_per_step=6, token_budget=4096))
    s.submit(rs.Request("a", np.ones(4092, np.int32), 4))
    s.commit(s.next_batch(), [0], [7], [[1, 2, 3, 4, 5]])
    batch = s.next_batch()
    assert batch.num_drafts.tolist() == [3]
    assert batch.positions.tolist() == [4092, 4093, 4094, 4095]
    s.commit(batch, [3], [9])
    assert s.outputs("a").tolist() == [7, 1, 2, 3]
    assert s.state("a") == "finished"


def test_s07_different_numbers_of_drafts():
    """Three sequences that verify 3, 1 and 2 tokens: offsets 0, 3, 4, 6."""
    s = Scheduler(limits(num_state_slots=3))
    for i in range(3):
        s.submit(rs.Request(str(i), [1, 2], 10))
    s.commit(s.next_batch(), [0] * 3, [5, 6, 7], [[8, 9, -1], [-1] * 3, [10, -1, -1]])
    batch = s.next_batch()
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert batch.token_ids.tolist() == [5, 8, 9, 6, 7, 10]
    assert batch.positions.tolist() == [2, 3, 4, 2, 2, 3]
    assert batch.token_state_ids.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.seqlens_k.tolist() == [5, 3, 4]
    assert batch.state_ids.dtype == batch.positions.dtype == batch.token_ids.dtype == np.int32


def test_next_step_starts_after_the_accepted_drafts():
    """Drafts 8, 9, 10 at positions 3..5: with 1 accepted the tokens are 8 and the next one, 4, and
    the next step starts at 2 + 1 + 1."""
    s = Scheduler(limits())
    s.submit(rs.Request("a", [1, 2], 10))
    s.commit(s.next_batch(), [0], [5], [[8, 9, 10]])
    s.commit(s.next_batch(), [1], [4], [[11, -1, -1]])
    assert s.outputs("a").tolist() == [5, 8, 4]
    batch = s.next_batch()
    assert batch.positions.tolist() == [4, 5]
    assert batch.token_ids.tolist() == [4, 11]
    s.preempt("a")
    assert s.counters.recomputed_tokens == 4  # 2 of the prompt, 5 and 8; neither 9 nor 10


@pytest.mark.parametrize("offset", range(8))
def test_drafts_that_are_all_rejected_change_nothing(offset):
    """Five and more steps whose drafts are all wrong, at every place of the ring's wrap: the same
    tokens as without drafts, one a step."""
    w = watched(max_seq_len=200, token_budget=200)
    w.submit("a", prompt(20 + offset), 30)
    steps = w.run(lambda right: [(token + 1) % 23 for token in right])
    assert steps == 30
    assert w.scheduler.counters.drafts_accepted == 0
    assert w.scheduler.outputs("a").tolist() == oracle(prompt(20 + offset), 30, 4, ends=False)


def test_right_drafts_save_steps():
    """Three right drafts a step: 4 tokens a step, so 1 + 29 / 4 rounded up = 9 steps for 30."""
    w = watched(token_budget=100)
    w.submit("a", prompt(20), 30)
    assert w.run() == 9


def test_more_sequences_than_a_decode_batch():
    """Five sequences decode, two a batch: each waits for three batches at most."""
    w = watched(
        num_state_slots=5,
        max_prefill_seqs=5,
        max_decode_seqs=2,
        tokens_per_step=1,
        token_budget=100,
    )
    for i in range(5):
        w.submit(str(i), prompt(3, i), 12)
    last, steps = {}, 0
    while (batch := w.next_batch()) is not None:
        if batch.kind == "decode":
            for id in batch.request_ids:
                assert steps - last.get(id, -1) <= 3  # all five were ready before step 0
                last[id] = steps
            steps += 1
        w.commit(batch, w.compute(batch), lambda right: [])
    w.check_outputs()


def test_preempt_and_abort_in_flight_drop_the_result():
    """Of three sequences in flight one is aborted, its id submitted again, and one preempted: only
    the third moves on; all end with the right tokens."""
    w = watched(num_state_slots=3, token_budget=100)
    for id in "abc":
        w.submit(id, prompt(6), 8)
    w.step()
    batch = w.next_batch()
    out = w.compute(batch)
    w.abort("a")
    w.submit("a", prompt(9, 3), 4)
    w.preempt("b")
    w.commit(batch, out, lambda right: right)
    assert len(w.scheduler.outputs("a")) == 0
    assert len(w.scheduler.outputs("b")) == 1
    assert len(w.scheduler.outputs("c")) == 5
    w.run()


def test_a_batch_that_failed_can_be_closed():
    """Preempt everything in it and commit zeros, without next tokens; then all goes on."""
    w = watched(token_budget=100)
    w.submit("a", prompt(6), 5)
    w.submit("b", prompt(7), 5)
    w.step()
    batch = w.next_batch()
    for id in batch.request_ids:
        w.preempt(id)
    w.scheduler.commit(batch, np.zeros(2, np.int32))
    w.open = None
    w.run()


def test_finished_ends_a_sequence():
    """The caller's end of sequence: the token is kept, the slot is free, in prefill and decode."""
    w = watched(ends=True, token_budget=100, max_seq_len=300, num_state_slots=4)
    for i in range(8):
        w.submit(str(i), prompt(5, i), 200)
    w.run()
    outputs = [w.scheduler.outputs(str(i)).tolist() for i in range(8)]
    assert all(out[-1] == END_TOKEN for out in outputs if len(out) < 200)
    assert any(len(out) < 200 for out in outputs)
    s = Scheduler(limits())
    s.submit(rs.Request("a", prompt(20), 5))
    s.commit(s.next_batch(), [0], finished=[True])  # in mid prefill
    assert s.state("a") == "finished"
    assert s.free_slots == 2


def test_a_prompt_is_copied():
    """The caller's array may be reused after submit."""
    s = Scheduler(limits())
    mine = np.array([1, 2, 3], np.int32)
    s.submit(rs.Request("a", mine, 1))
    mine[:] = 9
    assert s.next_batch().token_ids.tolist() == [1, 2, 3]


def test_many_requests_grow_the_table():
    """500 requests wait at once for 3 slots; all end with their own tokens, in order of arrival."""
    w = watched(num_state_slots=3, token_budget=64, tokens_per_step=3)
    rng = np.random.default_rng(0)
    for i in range(500):
        w.scheduler.submit(rs.Request(str(i), prompt(1 + i % 9, i), int(rng.integers(0, 4))))
    started = []
    while (batch := w.scheduler.next_batch()) is not None:
        started += [batch.request_ids[i] for i in np.flatnonzero(batch.is_first_chunk)]
        n = batch.num_seqs
        w.scheduler.commit(batch, batch.num_drafts, np.ones(n, int), np.full((n, 2), 2))
    assert started == [str(i) for i in range(500)]
    assert w.scheduler.free_slots == 3
    assert w.scheduler.counters.finished == 500
