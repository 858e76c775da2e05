"""Blocks of the paged pool: which are free, and which a running sequence holds.

Pure host logic. Sequences are named by their state slot, so the tables have a fixed size.
"""

import numpy as np

from ..layouts.paged import NO_BLOCK
from ..layouts.sizes import div_ceil


class BlockTables:
    """The block table of every state slot, and the stack of free blocks.

    tables  int32 [num_state_slots, max_blocks]  blocks of each sequence in order, then -1
    counts  int64 [num_state_slots]              how many of them there are
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_state_slots: int, max_seq_len: int
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        width = min(div_ceil(max_seq_len, block_size), num_blocks)
        self.tables = np.full((num_state_slots, width), NO_BLOCK, np.int32)
        self.counts = np.zeros(num_state_slots, np.int64)
        # The free ones are free[:num_free]; the last of them goes first, at the start block 0.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def blocks_of(self, seqlen: int) -> int:
        """Blocks that hold `seqlen` tokens."""
        return div_ceil(seqlen, self.block_size)

    def missing(self, state_id: int, seqlen: int) -> int:
        """Blocks that a sequence lacks for its first `seqlen` tokens; 0 where it has enough."""
        return max(self.blocks_of(seqlen) - int(self.counts[state_id]), 0)

    def grow(self, state_id: int, seqlen: int) -> None:
        """Gives a sequence the blocks that it lacks; they must be free."""
        more, have = self.missing(state_id, seqlen), int(self.counts[state_id])
        assert more <= self.num_free, f"{more} blocks wanted, {self.num_free} free"
        left = self.num_free - more
        self.tables[state_id, have : have + more] = self._free[left : self.num_free][::-1]
        self.counts[state_id] += more
        self.num_free = left

    def release(self, state_id: int) -> None:
        """Takes back all blocks of a sequence."""
        have = int(self.counts[state_id])
        row = self.tables[state_id, :have]
        self._free[self.num_free : self.num_free + have] = row[::-1]
        self.num_free += have
        row[...] = NO_BLOCK
        self.counts[state_id] = 0

    def rows(self, state_ids: np.ndarray) -> np.ndarray:
        """Block tables of some sequences, int32 [num_seqs, most blocks among them]; a copy."""
        width = int(self.counts[state_ids].max(initial=0))
        return self.tables[state_ids, :width]
