"""The model of the paged pool that scheduler_model.py holds a scheduler to."""

import numpy as np


class Pages:
    """The model of the paged pool: who may hold which block, and a pool of tokens that is written
    and read through the block tables, so that a wrong block anywhere shows."""

    def __init__(self, watched):
        self.w, self.limits = watched, watched.limits
        size = self.limits.num_blocks * self.limits.block_size
        self.pool = np.full((size, 3), -1, np.int64)
        self.held = {}  # id: blocks of a running request
        self.may_admit = []  # before the batch that is open was made

    def blocks_of(self, tokens):
        return -(-tokens // self.limits.block_size)

    def running(self):
        """Running requests, the one that was admitted first in front."""
        ids = [id for id, seq in self.w.live.items() if seq.slot >= 0]
        return sorted(ids, key=lambda id: self.w.live[id].order)

    def check(self):
        """Every block is free or in one table, and the tables hold what the model counts."""
        tables = self.w.scheduler.blocks
        used = tables.tables[tables.tables >= 0].tolist()
        assert len(set(used)) == len(used)
        assert len(used) == self.limits.num_blocks - self.w.scheduler.free_blocks
        free = tables._free[: tables.num_free].tolist()
        assert sorted(used + free) == list(range(self.limits.num_blocks))
        running = {self.w.live[id].slot: id for id in self.running()}
        for slot, count in enumerate(tables.counts.tolist()):
            assert (tables.tables[slot, :count] >= 0).all()
            assert (tables.tables[slot, count:] == -1).all()
            assert (count > 0) == (slot in running)
            if slot in running:
                assert count == self.held[running[slot]]

    def admissible(self):
        """Waiting requests that may be admitted now: each has blocks for all it knows, and one is
        left for every request that runs."""
        most = min(self.w.scheduler.free_slots, self.limits.max_prefill_seqs)
        free, running, ids = self.w.scheduler.free_blocks, len(self.running()), []
        for id in self.w.queue[:most]:
            free -= self.blocks_of(len(self.w.live[id].known))
            if free < running + len(ids):
                break
            ids.append(id)
        return ids

    def check_preemptions(self, batch):
        """Notes whom next_batch preempted: the youngest, in a decode step, and none in vain."""
        w = self.w
        before = self.running()
        gone = [id for id in before if w.scheduler.state(id) == "waiting"]
        stay = [id for id in before if id not in gone]
        assert before == stay + gone, "an older request gave way to a younger one"
        if gone:
            assert stay, "the oldest request was preempted"
            needs = {id: self.held[id] for id in before}
            for id in before:
                seq = w.live[id]
                if seq.decodes:
                    room = seq.max_new_tokens - seq.generated
                    last = self.limits.max_seq_len - len(seq.known)
                    tokens = len(seq.known) + min(len(seq.drafts), room, last)
                    needs[id] = max(needs[id], self.blocks_of(tokens))
            assert sum(needs.values()) > self.limits.num_blocks, "preempted with room to spare"
        for id in reversed(gone):
            w.send_back(id)
        if batch is not None:
            self._note(batch)
        return gone

    def _note(self, batch):
        """What each sequence of a batch holds from now on: the blocks of all it knew when it was
        admitted, or of its longest step since."""
        for i, id in enumerate(batch.request_ids):
            known = len(self.w.live[id].known) if id not in self.held else 0
            tokens = max(known, int(batch.seqlens_k[i]))
            self.held[id] = max(self.held.get(id, 0), self.blocks_of(tokens))
            table = batch.block_tables[i]
            assert (table[: self.held[id]] >= 0).all()
            assert (table[self.held[id] :] == -1).all()

    def write_and_read(self, batch, records):
        """Puts the batch's tokens into their blocks and reads each query's whole history back."""
        size = self.limits.block_size
        seq_ids = np.repeat(np.arange(batch.num_seqs), batch.seqlens_q)
        blocks = batch.block_tables[seq_ids, batch.positions // size]
        assert (blocks >= 0).all()
        self.pool[blocks * size + batch.positions % size] = records
        for i, id in enumerate(batch.request_ids):
            count = int(batch.seqlens_k[i])
            seq, positions = self.w.live[id], np.arange(count)
            rows = batch.block_tables[i, positions // size] * size + positions % size
            assert (self.pool[rows, 0] == self.w.numbers[id]).all(), "tokens of another sequence"
            assert self.pool[rows, 1].tolist() == positions.tolist()
            assert self.pool[rows, 2].tolist() == (seq.known + seq.drafts)[:count]
