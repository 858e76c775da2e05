"""A scheduler, watched: every batch is checked against a simple model of what may run, and carried
out with plans on a ring of tokens, so that a wrong key anywhere changes what comes out."""

from dataclasses import dataclass, field

import numpy as np
from paged_model import Pages

import ringslab as rs
from ringslab.schedules.scheduler import Scheduler, SchedulerLimits

VOCAB = 23
END_TOKEN = 0  # a sequence that generates it has finished


def next_token(seen, position):
    """The toy model: a function of the tokens in the window, their order, and the position."""
    mixed = position
    for token in seen:
        mixed = (mixed * 31 + int(token) + 1) % 1_000_003
    return mixed % VOCAB


def oracle(prompt, max_new_tokens, window, ends=True):
    """Generated tokens of one request alone, without batches, chunks, drafts or rings."""
    known = [int(token) for token in prompt]
    while len(known) < len(prompt) + max_new_tokens:
        known.append(next_token(known[-window:], len(known) - 1))
        if ends and known[-1] == END_TOKEN:
            break
    return known[len(prompt) :]


@dataclass
class Seen:
    """What the model knows of a live request."""

    prompt: list
    max_new_tokens: int
    known: list
    computed: int = 0
    slot: int = -1
    drafts: list = field(default_factory=list)
    decodes: bool = False  # all known tokens but the last are computed, in this slot
    order: int = -1  # counts admissions

    @property
    def generated(self):
        return len(self.known) - len(self.prompt)


class Watched:
    """A scheduler with its model, its ring of tokens, and the toy model that generates."""

    def __init__(self, limits: SchedulerLimits, window: int, ends: bool = True):
        self.limits, self.window, self.ends = limits, window, ends
        self.ring_len = rs.required_ring_len(window, limits.tokens_per_step)
        # A row holds (request number, position, token); -1 is poison.
        self.ring = np.full((limits.num_state_slots * self.ring_len, 3), -1, np.int64)
        self.scheduler = Scheduler(limits)
        self.live: dict[str, Seen] = {}
        self.queue: list[str] = []
        self.ended: dict[str, tuple[str, Seen]] = {}
        self.submitted = self.admissions = 0
        self.numbers: dict[str, int] = {}  # tells two requests of one id apart
        self.last_kind = "decode"
        self.open = None
        self.pages = None if limits.num_blocks is None else Pages(self)

    def submit(self, id, prompt, max_new_tokens):
        self.scheduler.submit(rs.Request(id, np.asarray(prompt, np.int32), max_new_tokens))
        self.live[id] = Seen(list(prompt), max_new_tokens, list(prompt))
        self.submitted += 1
        self.numbers[id] = self.submitted
        self.queue.append(id)
        self.check()

    def abort(self, id):
        self.scheduler.abort(id)
        if id in self.live:
            self._end(id, "aborted")
        self.check()

    def preempt(self, id):
        self.scheduler.preempt(id)
        self.send_back(id)
        self.check()

    def take_back(self):
        """Nothing of the open batch was computed: its requests wait again, in their order."""
        batch, self.open = self.open, None
        self.scheduler.take_back(batch)
        for id in reversed(batch.request_ids):
            if id in self.live and self.live[id].slot >= 0:
                self.send_back(id)
        self.check()

    def send_back(self, id):
        seq = self.live[id]
        seq.slot, seq.computed, seq.drafts, seq.decodes = -1, 0, [], False
        self.queue.insert(0, id)
        if self.pages is not None:
            self.pages.held.pop(id, None)

    def _end(self, id, state):
        seq = self.live.pop(id)
        if self.pages is not None:
            self.pages.held.pop(id, None)
        if id in self.queue:
            self.queue.remove(id)
        self.ended[id] = (state, seq)

    def check(self):
        """No slot is lost or held twice; states and tokens are those of the model."""
        held = [seq.slot for seq in self.live.values() if seq.slot >= 0]
        assert len(set(held)) == len(held)
        assert self.scheduler.free_slots == self.limits.num_state_slots - len(held)
        assert self.scheduler.num_waiting == len(self.queue)
        if self.pages is not None:
            self.pages.check()
        assert self.scheduler.done == (not self.live and self.open is None)
        for id, seq in self.live.items():
            state = self.scheduler.state(id)
            if seq.slot < 0:
                assert state == "waiting"
            elif id not in (self.open.request_ids if self.open else ()):
                assert state == ("decode" if seq.decodes else "prefill")
            assert self.scheduler.tokens(id).tolist() == seq.known
        for id, (state, seq) in self.ended.items():
            if id not in self.live:
                assert self.scheduler.state(id) == state
                assert self.scheduler.tokens(id).tolist() == seq.known
                assert self.scheduler.outputs(id).tolist() == seq.known[len(seq.prompt) :]

    def next_batch(self):
        """The next batch, checked; None where the model has nothing to run either."""
        decodes = [id for id, seq in self.live.items() if seq.decodes]
        prefills = [id for id, seq in self.live.items() if seq.slot >= 0 and not seq.decodes]
        can_prefill = bool(prefills) or bool(self.queue and self.scheduler.free_slots)
        if self.pages is not None:
            self.pages.may_admit = self.pages.admissible()
            can_prefill = bool(prefills or self.pages.may_admit)
        batch = self.scheduler.next_batch()
        if self.pages is not None:
            gone = self.pages.check_preemptions(batch)
            decodes = [id for id in decodes if id not in gone]
            prefills = [id for id in prefills if id not in gone]
        if batch is None:
            assert not can_prefill
            assert not decodes
            assert not self.queue
            return None
        if can_prefill and decodes:
            assert batch.kind != self.last_kind, "prefill and decode alternate when both wait"
        self.last_kind, self.open = batch.kind, batch
        assert batch.num_seqs > 0
        assert len(set(batch.request_ids)) == batch.num_seqs
        assert batch.cu_seqlens_q[0] == 0
        assert batch.cu_seqlens_q[-1] == batch.num_tokens
        assert (batch.seqlens_q >= 1).all()
        if batch.kind == "prefill":
            self._check_prefill(batch, prefills)
        else:
            self._check_decode(batch)
        for i, id in enumerate(batch.request_ids):
            seq = self.live[id]
            assert batch.state_ids[i] == seq.slot
            tokens = slice(batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1])
            first = batch.positions[tokens][0]
            assert first == seq.computed == batch.seqlens_k[i] - batch.seqlens_q[i]
            assert batch.positions[tokens].tolist() == list(range(first, batch.seqlens_k[i]))
            assert set(batch.token_state_ids[tokens]) == {seq.slot}
            assert batch.seqlens_k[i] <= self.limits.max_seq_len
            wanted = (seq.known + seq.drafts)[first : batch.seqlens_k[i]]
            assert batch.token_ids[tokens].tolist() == wanted
            assert batch.is_last_chunk[i] == (batch.seqlens_k[i] >= len(seq.known))
        assert batch.is_first_chunk.tolist() == [
            self.live[id].computed == 0 for id in batch.request_ids
        ]
        return batch

    def _check_prefill(self, batch, prefills):
        limits = self.limits
        assert batch.num_seqs <= limits.max_prefill_seqs
        assert (batch.num_drafts == 0).all()
        whole = batch.seqlens_k == [len(self.live[id].known) for id in batch.request_ids]
        if limits.chunked_prefill:
            assert batch.num_tokens <= limits.token_budget
            assert whole[:-1].all(), "only the last chunk of a batch is cut by the budget"
            if not whole[-1]:
                assert batch.num_tokens == limits.token_budget
        else:
            assert whole.all()
            assert batch.num_tokens <= limits.token_budget or batch.num_seqs == 1
        new = [id for id in batch.request_ids if self.live[id].slot < 0]
        assert new == self.queue[: len(new)], "first come, first served"
        if new:
            assert set(prefills) <= set(batch.request_ids), "running prompts go before new ones"
        elif prefills:
            assert set(batch.request_ids) <= set(prefills)
        if self.pages is not None:
            assert len(new) <= len(self.pages.may_admit), "no blocks for all of them"
        for id in new:
            self.queue.remove(id)
            self.live[id].slot = int(batch.state_ids[batch.request_ids.index(id)])
            self.admissions += 1
            self.live[id].order = self.admissions

    def _check_decode(self, batch):
        assert batch.num_seqs <= self.limits.max_decode_seqs
        assert batch.is_last_chunk.all()
        for i, id in enumerate(batch.request_ids):
            seq = self.live[id]
            assert seq.decodes
            room = seq.max_new_tokens - seq.generated
            last = self.limits.max_seq_len - len(seq.known)
            assert batch.num_drafts[i] == min(len(seq.drafts), room, last)
            assert batch.seqlens_q[i] == batch.num_drafts[i] + 1

    def compute(self, batch):
        """What the toy model gives after each token of the batch, int [T], from the ring."""
        sizes = {"window": self.window, "ring_len": self.ring_len}
        number = np.repeat([self.numbers[id] for id in batch.request_ids], batch.seqlens_q)
        records = np.stack([number, batch.positions, batch.token_ids], axis=1)
        rows = batch.token_state_ids * self.ring_len + batch.positions % self.ring_len
        out = np.empty(batch.num_tokens, np.int64)
        if self.pages is not None:
            self.pages.write_and_read(batch, records)
        if batch.kind == "decode":
            plan = rs.plan_decode(
                batch.token_state_ids, batch.positions, cu_seqlens_q=batch.cu_seqlens_q, **sizes
            )
            self.ring[rows] = records
            for t in range(batch.num_tokens):
                seen = self.ring[plan.index[t][plan.index[t] >= 0]]
                out[t] = self._read(seen, number[t], int(batch.positions[t]))
            return out
        plan = rs.plan_prefill(batch.state_ids, batch.seqlens_q, batch.seqlens_k, **sizes)
        joint = np.full((plan.history_rows + batch.num_tokens, 3), -2, np.int64)
        for source, destination, count in plan.segments:
            if source >= 0:
                joint[destination : destination + count] = self.ring[source : source + count]
        joint[plan.history_rows :] = records
        for t, (a, a_len, b, b_len) in enumerate(plan.pivots):
            seen = np.concatenate([joint[a : a + a_len], joint[b : b + b_len]])
            out[t] = self._read(seen, number[t], int(batch.positions[t]))
        self.ring[rows] = records  # in order: of two tokens for one row, the later stays
        return out

    def _read(self, seen, number, position):
        keys = range(max(0, position - self.window + 1), position + 1)
        assert seen[:, 0].tolist() == [number] * len(keys), "keys of another sequence"
        assert seen[:, 1].tolist() == list(keys)
        return next_token(seen[:, 2], position)

    def commit(self, batch, out, draw_drafts):
        """Keep the drafts that the toy model agrees with; `draw_drafts(right)` proposes the next
        ones, given the right continuation."""
        columns = self.limits.tokens_per_step - 1
        accepted = np.zeros(batch.num_seqs, np.int32)
        following = np.full(batch.num_seqs, -1, np.int32)
        drafts = np.full((batch.num_seqs, columns), -1, np.int32)
        finished = np.zeros(batch.num_seqs, bool)
        news = {}
        for i, id in enumerate(batch.request_ids):
            begin, end = batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1]
            at = end - 1 - batch.num_drafts[i]  # the token before the first draft
            while at < end - 1 and out[at] == batch.token_ids[at + 1] and not self._is_end(out[at]):
                at += 1
            accepted[i] = at - (end - 1 - batch.num_drafts[i])
            if not batch.is_last_chunk[i]:
                continue
            following[i] = out[at]
            finished[i] = self._is_end(out[at])
            new = [*batch.token_ids[begin + 1 : begin + 1 + accepted[i]].tolist(), int(out[at])]
            new = new if batch.kind == "decode" else new[-1:]
            news[id] = new
            alive = self.live.get(id)
            if alive is not None:
                right = oracle([*alive.known, *new], columns, self.window, ends=False)
                drawn = draw_drafts(right)
                drafts[i, : len(drawn)] = drawn
        kept = {
            id: seq.slot
            for id, seq in self.live.items()
            if id in batch.request_ids and seq.slot >= 0
        }
        self.scheduler.commit(batch, accepted, following, drafts, finished)
        self.open = None
        for i, id in enumerate(batch.request_ids):
            if id in kept and kept[id] == batch.state_ids[i]:
                self._advance(batch, i, id, int(accepted[i]), news.get(id), drafts[i], finished[i])
        self.check()

    def _is_end(self, token):
        return self.ends and token == END_TOKEN

    def _advance(self, batch, i, id, accepted, new, drafts, finished):
        seq = self.live[id]
        seq.computed += int(batch.seqlens_q[i] - batch.num_drafts[i] + accepted)
        if new is None:
            return
        seq.known += new[: seq.max_new_tokens - seq.generated]
        seq.decodes = True
        seq.drafts = [int(token) for token in drafts if token >= 0]
        if finished or seq.generated == seq.max_new_tokens:
            self._end(id, "finished")

    def step(self, draw_drafts=lambda right: right):
        """One batch, start to end. False where nothing can run."""
        batch = self.next_batch()
        if batch is None:
            return False
        self.commit(batch, self.compute(batch), draw_drafts)
        return True

    def run(self, draw_drafts=lambda right: right, most_steps=10_000):
        """Steps until everything has ended; every finished request has the oracle's tokens."""
        steps = 0
        while self.step(draw_drafts):
            steps += 1
            assert steps < most_steps, "no end in sight"
        assert self.scheduler.done
        assert self.scheduler.free_slots == self.limits.num_state_slots
        assert self.scheduler.free_blocks == self.limits.num_blocks
        self.check_outputs()
        return steps

    def check_outputs(self):
        """What finished is the oracle's, what was aborted is the start of it."""
        for id, (state, seq) in self.ended.items():
            want = oracle(seq.prompt, seq.max_new_tokens, self.window, self.ends)
            got = seq.known[len(seq.prompt) :]
            assert got == (want if state == "finished" else want[: len(got)]), id


def limits(**change):
    base = {
        "num_state_slots": 2,
        "token_budget": 8,
        "max_prefill_seqs": 4,
        "max_decode_seqs": 4,
        "tokens_per_step": 4,
        "max_seq_len": 100,
        "chunked_prefill": True,
    }
    return SchedulerLimits(**base | change)


def watched(window=4, ends=False, **change):
    return Watched(limits(**change), window, ends)


def prompt(count, first=1):
    return [(first * 7 + i * 5) % 23 for i in range(count)]
