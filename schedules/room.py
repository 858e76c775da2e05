"""Room for sequences: who has a state slot and blocks of the paged pool, who waits for them, and
who gives way."""

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from .blocks import BlockTables
from .limits import SchedulerLimits
from .table import PREFILL, WAITING, SequenceTable


class Room:
    """The state slots and blocks of a scheduler, and its queue. Rows are those of its table.

    Admission is first come, first served. With a paged pool a request is admitted when there are
    blocks for its known tokens, and one more for each running sequence; it holds them until it
    ends. A decode step takes the blocks it grows into. Where too few are free, the sequence that
    was admitted last is preempted, until they suffice; it goes to the head of the queue and is
    computed again. A sequence gives way only to older ones, and the oldest can have the whole pool,
    which holds any request that `submit` took: so the oldest always moves on, and all come to an
    end.
    """

    def __init__(self, limits: SchedulerLimits, table: SequenceTable) -> None:
        self.limits = limits
        self._table = table
        self.queue: deque[int] = deque()  # rows without a slot, the next one first
        self._free_slots = list(range(limits.num_state_slots))  # a heap: the lowest goes first
        self._admissions = 0
        self.blocks: BlockTables | None = None
        if limits.num_blocks is not None:
            self.blocks = BlockTables(
                limits.num_blocks, limits.block_size, limits.num_state_slots, limits.max_seq_len
            )

    @property
    def free_slots(self) -> int:
        """State slots that no sequence holds."""
        return len(self._free_slots)

    def admissible(self) -> list[int]:
        """Waiting rows that could be admitted now, the first of them first."""
        most = min(len(self.queue), len(self._free_slots), self.limits.max_prefill_seqs)
        rows = [self.queue[i] for i in range(most)]
        if self.blocks is None:
            return rows
        # A block for each running sequence is kept back: without, what is admitted now would soon
        # be preempted again.
        kept_back = self.limits.num_state_slots - len(self._free_slots)
        free = self.blocks.num_free
        for i, row in enumerate(rows):
            free -= self.blocks.blocks_of(int(self._table.num_tokens[row]))
            if free < kept_back + i:
                return rows[:i]
        return rows

    def admit(self, row: int) -> None:
        """Gives the head of the queue a slot, and blocks for its known tokens."""
        table = self._table
        head = self.queue.popleft()
        assert head == row  # first come, first served
        assert table.phase[row] == WAITING
        table.phase[row] = PREFILL
        table.state_id[row] = heapq.heappop(self._free_slots)
        table.order[row] = self._admissions
        self._admissions += 1
        if self.blocks is not None:
            self.blocks.grow(int(table.state_id[row]), int(table.num_tokens[row]))

    def release(self, row: int) -> None:
        """Takes back the slot and the blocks of a row."""
        slot = int(self._table.state_id[row])
        assert slot >= 0
        assert slot not in self._free_slots
        heapq.heappush(self._free_slots, slot)
        if self.blocks is not None:
            self.blocks.release(slot)
        self._table.state_id[row] = -1

    def grow(
        self, rows: np.ndarray, seqlens: np.ndarray, preempt: Callable[[int], None]
    ) -> np.ndarray:
        """Gives rows, oldest first, the blocks for so many tokens each; there is a paged pool.

        Where too few are free, `preempt` is called with the row that was admitted last and must
        release it. Returns the rows that have their blocks; the others were preempted.
        """
        table, blocks, ready = self._table, self.blocks, []
        for row, seqlen in zip(rows.tolist(), seqlens.tolist(), strict=True):
            while table.state_id[row] >= 0:
                state_id = int(table.state_id[row])
                if blocks.missing(state_id, seqlen) <= blocks.num_free:
                    blocks.grow(state_id, seqlen)
                    ready.append(row)
                    break
                running = np.flatnonzero(table.state_id >= 0)
                preempt(int(running[np.argmax(table.order[running])]))
        return np.array(ready, np.int64)
