"""The paged pool of an engine: records of global layers, block tables, and K and V of a prefill.

The block tables lie on the device as one array with a row a state slot, so a token finds its blocks
by its state id, in a captured decode step too. A step uploads what its sequences have gained since
their last one: at most a few ints each time a sequence begins a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.paged import PagedLayout
from ..layouts.sizes import align_up, div_ceil
from ..rawkernels.memory import Memory, refuse_too_large
from ..rawkernels.operations import Backend, operation
from ..schedules.batch import BatchArrays, HostBatch
from ..schedules.blocks import BlockTables

# Operations of global layers.
PAGED_OPS = ("paged_store", "paged_load", "paged_decode", "window_attention")
WORK_ALIGN = 256  # bytes between the arrays of the workspace


@dataclass(frozen=True)
class PagedSizes:
    """Bytes of an engine's paged pool and of what works on it; all 0 without global layers.

    pool_bytes    num_blocks * block_bytes
    table_width   most blocks of a sequence
    table_bytes   int32 [num_state_slots, table_width]
    load_tokens   most keys that the sequences of a prefill batch have together
    load_bytes    K and V of so many tokens of one layer, bf16
    """

    pool_bytes: int = 0
    table_width: int = 0
    table_bytes: int = 0
    load_tokens: int = 0
    load_bytes: int = 0

    @property
    def work_bytes(self) -> int:
        return self.table_bytes + self.load_bytes


def paged_sizes(cfg: Config, num_state_slots: int) -> PagedSizes:
    """Sizes of the paged pool of `cfg` for so many state slots."""
    layout, num_blocks = cfg.paged_layout, cfg.engine.num_blocks
    if layout is None:
        return PagedSizes()
    width = min(div_ceil(cfg.max_seq_len, layout.block_size), num_blocks)
    prefill_seqs = min(cfg.engine.max_prefill_seqs, num_state_slots)
    tokens = min(prefill_seqs * cfg.max_seq_len, num_blocks * layout.block_size)
    one = align_up(tokens * cfg.num_kv_heads * cfg.head_dim * 2, WORK_ALIGN)  # bf16
    return PagedSizes(
        pool_bytes=num_blocks * layout.block_bytes,
        table_width=width,
        table_bytes=align_up(4 * num_state_slots * width, WORK_ALIGN),
        load_tokens=tokens,
        load_bytes=2 * one,
    )


@dataclass(frozen=True)
class PagedPool:
    """pool    uint8 [num_blocks * block_bytes]
    tables  int32 [num_state_slots, table_width]  blocks of the sequence in each state slot, -1
            beyond them
    sent    int64 [num_state_slots], host         how many of its blocks are in `tables`
    k, v    uint16 [load_tokens, num_kv_heads, head_dim]  bf16 bits
    ops     the PAGED_OPS by name
    """

    ops: dict[str, Callable[..., None]]
    layout: PagedLayout
    memory: Memory
    pool: Any
    tables: Any
    sent: np.ndarray
    k: Any
    v: Any

    def name_states(self, arrays: BatchArrays) -> BatchArrays:
        """Arrays of a decode batch, with block tables whose rows are state slots."""
        return replace(arrays, token_seq_ids=arrays.token_state_ids, block_tables=self.tables)

    def sync(self, blocks: BlockTables, batch: HostBatch) -> None:
        """Uploads the blocks that the batch's sequences hold and the device does not know yet."""
        self.sent[batch.state_ids[batch.is_first_chunk]] = 0
        for state_id in batch.state_ids.tolist():
            first, end = int(self.sent[state_id]), int(blocks.counts[state_id])
            if first < end:
                source = blocks.tables[state_id, first:end]
                self.memory.upload(self.tables[state_id, first:end], source)
                self.sent[state_id] = end


def take_paged(
    cfg: Config, sizes: PagedSizes, num_state_slots: int, memory: Memory, backend: Backend
) -> PagedPool | None:
    """The paged pool of an engine, or None without global layers; raises DeviceMemoryError where
    it does not fit."""
    layout = cfg.paged_layout
    if layout is None:
        return None
    what = f"paged pool of {cfg.engine.num_blocks:,} blocks of {layout.block_bytes:,} bytes"
    asked = sizes.pool_bytes + sizes.work_bytes
    refuse_too_large(what, asked, memory.free_bytes()[0], memory.place)
    shape = (sizes.load_tokens, cfg.num_kv_heads, cfg.head_dim)
    tables = memory.empty((num_state_slots, sizes.table_width), np.int32)
    # No step reads what no sync wrote, but a table that is printed should not hold noise.
    memory.upload(tables, np.full(tables.shape, -1, np.int32))
    return PagedPool(
        ops={name: operation(backend, name) for name in PAGED_OPS},
        layout=layout,
        memory=memory,
        pool=memory.empty((sizes.pool_bytes,), np.uint8),
        tables=tables,
        sent=np.zeros(num_state_slots, np.int64),
        k=memory.empty(shape, np.uint16),
        v=memory.empty(shape, np.uint16),
    )
