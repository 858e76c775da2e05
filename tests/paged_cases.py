"""Paged pools for tests: sequences whose blocks lie anywhere, and what they hold."""

from dataclasses import dataclass

import numpy as np
from helpers import i32, operations, random_kv, record_format

from ringslab.layouts.paged import build_paged_layout
from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.bound import Expected

LAYER = 7  # of the layouts here, the second of three in a block


@dataclass(frozen=True)
class Case:
    """`lengths`: tokens of each sequence. The pool has three blocks more than they need."""

    name: str
    lengths: tuple[int, ...]
    block_size: int = 16
    record_type: str = "mxfp8"
    head_dim: int = 64
    kv_heads: int = 2

    def __str__(self):
        return self.name


CASES = (
    Case("mixed", (37, 1, 16, 0, 90)),
    Case("block_1", (5, 0, 3), block_size=1),
    Case("block_5", (11, 4, 5, 6), block_size=5, head_dim=32, kv_heads=3),
    Case("bf16", (37, 16), record_type="bf16"),
    Case("fp16", (20, 33), record_type="fp16", head_dim=40, kv_heads=3),
    Case("odd_bytes", (19, 2), head_dim=32, kv_heads=1),
    Case("wide", (70, 9), head_dim=128, kv_heads=8),
    Case("bf16_odd", (19, 3), record_type="bf16", head_dim=6, kv_heads=3),
    Case("nothing", ()),
)


@dataclass(frozen=True)
class Pages:
    """A layout, block tables as a permutation of the pool's blocks, and each sequence's tokens in
    order: seq_ids and positions int32 [T], kv."""

    layout: object
    num_blocks: int
    tables: np.ndarray
    seq_ids: np.ndarray
    positions: np.ndarray
    kv: tuple

    @property
    def fmt(self):
        return self.layout.layer(LAYER).record_format

    @property
    def cu_seqlens(self):
        counts = np.bincount(self.seq_ids, minlength=len(self.tables))
        return i32(np.concatenate([[0], np.cumsum(counts)]))

    def pool(self):
        """A pool of poison."""
        return np.full(self.num_blocks * self.layout.block_bytes, 0xFF, np.uint8)

    def stored(self, rope=None):
        """A pool with all tokens stored by the reference."""
        pool = self.pool()
        arguments = (pool, self.layout, LAYER, self.kv, self.tables, self.seq_ids, self.positions)
        operations("reference").paged_store(*arguments, rope=rope)
        return pool


def make_pages(case, seed=0):
    rng = np.random.default_rng(seed)
    fmt = record_format(case.head_dim, case.record_type, kv_heads=case.kv_heads)
    other = record_format(32, "bf16", kv_heads=1)
    layout = build_paged_layout([(3, other), (LAYER, fmt), (8, other)], case.block_size, 32)
    needed = [layout.blocks_of(length) for length in case.lengths]
    num_blocks = sum(needed) + 3
    blocks = iter(rng.permutation(num_blocks).tolist())
    tables = np.full((len(needed), max(needed, default=0) + 1), -1, np.int32)
    for row, count in zip(tables, needed, strict=True):
        row[:count] = [next(blocks) for _ in range(count)]
    seq_ids = np.repeat(np.arange(len(needed)), np.asarray(case.lengths, np.int64))
    positions = np.concatenate([[], *(np.arange(n) for n in case.lengths)])
    kv = random_kv(rng, len(seq_ids), fmt)
    return Pages(layout, num_blocks, tables, i32(seq_ids), i32(positions), kv)


def expected_decode(q, *arguments, **options):
    """What the reference says of paged_decode, for `assert_within_bound`; host arrays."""
    exact, rounded = np.empty(q.shape), np.empty(q.shape)
    lse = np.empty(q.shape[:2], np.float32)
    run = operation("reference", "paged_decode")
    run(q, *arguments, rounded, lse, round_weights=True, **options)
    run(q, *arguments, exact, lse, **options)
    return Expected(exact, rounded, lse)
