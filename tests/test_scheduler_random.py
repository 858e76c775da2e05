"""The scheduler under random calls: submit, abort, preempt, right, wrong and missing drafts, ends
of sequences, calls out of order. scheduler_model.py checks every batch and every key read."""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_model import VOCAB, Watched

import ringslab as rs
from ringslab.schedules.scheduler import SchedulerLimits

IDS = st.sampled_from("abcdefgh")


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of calls keeps the slots, the order and the tokens that the model expects."""

    @initialize(
        slots=st.integers(1, 4),
        budget=st.integers(1, 12),
        prefill_seqs=st.integers(1, 3),
        decode_seqs=st.integers(1, 3),
        tokens_per_step=st.integers(1, 4),
        max_seq_len=st.integers(12, 40),
        chunked=st.booleans(),
        window=st.sampled_from([1, 2, 3, 5, 8]),
        block_size=st.sampled_from([None, None, 1, 3, 4]),
        spare_blocks=st.integers(0, 12),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(
        self,
        slots,
        budget,
        prefill_seqs,
        decode_seqs,
        tokens_per_step,
        max_seq_len,
        chunked,
        window,
        block_size,
        spare_blocks,
        seed,
    ):
        pool = {}
        if block_size is not None:  # the longest request fits, and not much more
            num_blocks = -(-max_seq_len // block_size) + spare_blocks
            pool = {"num_blocks": num_blocks, "block_size": block_size}
        limits = SchedulerLimits(
            slots, budget, prefill_seqs, decode_seqs, tokens_per_step, max_seq_len, chunked, **pool
        )
        self.w = Watched(limits, window)
        self.rng = np.random.default_rng(seed)
        self.out = None

    def draw_drafts(self, right):
        """None, some, or all drafts, each right with a chance of 3 in 4."""
        count = int(self.rng.integers(0, len(right) + 1))
        wrong = self.rng.random(count) < 0.25
        return [int((t + bad) % VOCAB) for t, bad in zip(right, wrong, strict=False)]

    @rule(id=IDS, count=st.integers(1, 30), new=st.integers(0, 12))
    def submit(self, id, count, new):
        prompt = self.rng.integers(0, VOCAB, count).tolist()
        if id in self.w.live or count + new > self.w.limits.max_seq_len:
            with pytest.raises(rs.errors.RequestError):
                self.w.scheduler.submit(rs.Request(id, prompt, new))
        else:
            self.w.submit(id, prompt, new)

    @rule(id=IDS)
    def abort(self, id):
        if id in self.w.numbers:
            self.w.abort(id)
        else:
            with pytest.raises(rs.errors.RequestError):
                self.w.scheduler.abort(id)

    @rule(id=IDS)
    def preempt(self, id):
        if id in self.w.live and self.w.live[id].slot >= 0:
            self.w.preempt(id)
        else:
            with pytest.raises(rs.errors.RequestError):
                self.w.scheduler.preempt(id)

    @precondition(lambda self: self.w.open is None)
    @rule()
    def open_batch(self):
        batch = self.w.next_batch()
        self.out = None if batch is None else self.w.compute(batch)

    @precondition(lambda self: self.w.open is not None)
    @rule()
    def close_batch(self):
        self.w.commit(self.w.open, self.out, self.draw_drafts)

    @precondition(lambda self: self.w.open is not None)
    @rule()
    def take_back(self):
        self.w.take_back()

    @precondition(lambda self: self.w.open is not None)
    @rule()
    def wrong_calls(self):
        batch = self.w.open
        with pytest.raises(rs.errors.BatchError):
            self.w.scheduler.take_back(object())
        with pytest.raises(rs.errors.BatchError):
            self.w.scheduler.next_batch()
        with pytest.raises(rs.errors.BatchError):
            self.w.scheduler.commit(object(), batch.num_drafts)
        with pytest.raises(rs.errors.ArgumentError):
            self.w.scheduler.commit(batch, batch.num_drafts + 1, np.zeros(batch.num_seqs, int))

    @rule(steps=st.integers(1, 12))
    def run_steps(self, steps):
        if self.w.open is not None:
            self.close_batch()
        for _ in range(steps):
            self.w.step(self.draw_drafts)

    @invariant()
    def holds(self):
        if hasattr(self, "w"):
            self.w.check()

    def teardown(self):
        if hasattr(self, "w"):
            if self.w.open is not None:
                self.close_batch()
            self.w.run(self.draw_drafts)


SchedulerMachine.TestCase.settings = settings(
    max_examples=max(300, settings().max_examples),  # 20,000 with --fuzz=full
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # a failure says its calls; shrinking them takes minutes
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_gives_the_oracle_tokens(seed):
    """40 requests through 1 to 5 slots with drafts, preemptions at random steps and every chunk
    size: the tokens of each are those of a run alone."""
    rng = np.random.default_rng(seed)
    limits = SchedulerLimits(
        num_state_slots=int(rng.integers(1, 6)),
        token_budget=int(rng.choice([1, 3, 7, 16, 64])),
        max_prefill_seqs=int(rng.integers(1, 5)),
        max_decode_seqs=int(rng.integers(1, 5)),
        tokens_per_step=int(rng.integers(1, 7)),
        max_seq_len=90,
        chunked_prefill=bool(rng.integers(0, 2)),
    )
    w = Watched(limits, window=int(rng.choice([1, 4, 9])), ends=False)
    for i in range(40):
        count = int(rng.integers(1, 60))
        w.submit(str(i), rng.integers(0, VOCAB, count).tolist(), int(rng.integers(0, 30)))
    steps = 0
    while w.step(lambda right: [int(t + (rng.random() < 0.3)) % VOCAB for t in right]):
        steps += 1
        assert steps < 20_000
        running = [id for id, seq in w.live.items() if seq.slot >= 0]
        if running and rng.random() < 0.05:
            w.preempt(str(rng.choice(running)))
    assert w.scheduler.done
    assert w.scheduler.counters.finished == 40
    w.check_outputs()
