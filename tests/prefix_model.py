"""A scheduler with a prefix cache and no engine: snapshots are numbers of blocks."""

from ringslab.schedules.prefix_index import Entry, LayerKind, PrefixIndex
from ringslab.schedules.prefix_keys import root_key
from ringslab.schedules.prefix_orders import RINGS
from ringslab.schedules.prefix_planner import PrefixPlanner
from ringslab.schedules.prefix_rules import ResumeRule
from ringslab.schedules.scheduler import Scheduler, SchedulerLimits

FULL = ResumeRule("full", ratio=1, window=4, reach=9, back=1)
EXACT = ResumeRule("exact", ratio=1, window=4, reach=9, back=1)
BOUNDED = ResumeRule("bounded", ratio=1, window=4, reach=9, back=1)


class Cached:
    """Requests through a scheduler; every key that is told to be stored can be fetched."""

    def __init__(
        self, rule=FULL, block_size=8, interval=1, budget_bytes=None, stage=None, **change
    ):
        self.index = PrefixIndex((LayerKind(RINGS, "boundary", 1),), budget_bytes)
        self.stored = {}
        self.planner = PrefixPlanner(
            rule,
            self.index,
            block_size=block_size,
            interval=interval,
            root=root_key("test"),
            fetch=self.fetch,
            stage=stage,
        )
        self.planner.seen = set()
        base = {
            "num_state_slots": 2,
            "token_budget": 64,
            "max_prefill_seqs": 2,
            "max_decode_seqs": 2,
            "tokens_per_step": 3,
            "max_seq_len": 1 << 20,
        }
        self.scheduler = Scheduler(SchedulerLimits(**base | change), self.planner)
        self.batches = []

    def fetch(self, keys, blocks):
        key = keys[blocks - 1]
        if key not in self.stored:
            self.index.drop(Entry(RINGS, key))
        return self.stored.get(key)

    def submit(self, request):
        self.scheduler.submit(request)

    def take_restores(self):
        orders, self.planner.restores = self.planner.restores, []
        return orders

    def step(self, drafts=None, accepted=0):
        """One batch; False where there is none. All drafts say 7, and so does every next token."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return False
        restores = self.take_restores()
        self.scheduler.commit(
            batch,
            [min(accepted, n) for n in batch.num_drafts],
            [7] * batch.num_seqs,
            None if drafts is None else [[7] * drafts] * batch.num_seqs,
        )
        snapshots = self.planner.take_snapshots()
        for order in snapshots:
            gone = self.index.insert(RINGS, order.keys, order.blocks)
            self.stored[order.keys[order.blocks - 1]] = order.blocks
            for entry in gone:
                del self.stored[entry.key]
        self.batches.append((batch, restores + self.take_restores(), snapshots))
        return True

    def run(self, *requests, **how):
        """(first position, end) of every chunk and step of these requests, run to their end."""
        first = len(self.batches)
        for request in requests:
            self.submit(request)
        while self.step(**how):
            pass
        return [
            (int(k - q), int(k))
            for batch, _, _ in self.batches[first:]
            for q, k in zip(batch.seqlens_q, batch.seqlens_k, strict=True)
        ]
