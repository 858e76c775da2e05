"""What every backend checks first in the operations on the paged pool of global layers, and what
the host backends check of block tables' numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.formats import RecordFormat
from ..layouts.paged import PagedLayout
from .checks import (
    I32,
    check_array,
    check_heads,
    check_place,
    check_units,
)
from .record_checks import check_key_buffers, check_kv, kv_places
from .value_checks import refuse


@dataclass(frozen=True)
class PagedAccess:
    """Byte addresses of a layer's records in a pool: token i of block b begins at
    b * block_bytes + offset + i * format.record_bytes."""

    format: RecordFormat
    block_size: int
    block_bytes: int
    offset: int
    num_blocks: int


def check_pool(op: str, pool: Any, layout: Any, layer: int, *, written: bool) -> PagedAccess:
    """The addresses of a layer. Raises LayoutError where the layer is not in the pool."""
    if not isinstance(layout, PagedLayout):
        raise ArgumentError(f"{op}: layout is {type(layout).__name__}, not a PagedLayout")
    part = layout.layer(layer)
    if part.record_format.latent:
        raise ArgumentError(
            f"{op}: record format {part.record_format.id!r} is latent, but records of the paged "
            "pool hold K and V apart"
        )
    num_blocks = check_units(op, "pool", pool, "block_bytes", layout.block_bytes, written=written)
    return PagedAccess(
        part.record_format, layout.block_size, layout.block_bytes, part.offset, num_blocks
    )


def check_paged_store(
    pool: Any,
    layout: Any,
    layer: int,
    kv: Any,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    rope: Any,
) -> PagedAccess:
    op = "paged_store"
    access = check_pool(op, pool, layout, layer, written=True)
    if positions is None:
        raise ArgumentError(f"{op}: positions=None but each token needs one to find its block")
    tokens = check_kv(op, kv, positions, rope, access.format)
    check_array(op, "block_tables", block_tables, I32, ((None, ""), (None, "")))
    check_array(op, "seq_ids", seq_ids, I32, ((tokens, "the number of vectors"),))
    arrays = {"block_tables": block_tables, "seq_ids": seq_ids, "positions": positions}
    check_place(op, pool=pool, **kv_places(kv), **arrays)
    return access


def check_paged_load(
    pool: Any, layout: Any, layer: int, block_tables: Any, cu_seqlens_k: Any, k: Any, v: Any
) -> PagedAccess:
    op = "paged_load"
    access = check_pool(op, pool, layout, layer, written=False)
    check_array(op, "block_tables", block_tables, I32, ((None, ""), (None, "")))
    check_array(op, "cu_seqlens_k", cu_seqlens_k, I32, ((None, ""),))
    ends = cu_seqlens_k.shape[0]
    if not 1 <= ends <= block_tables.shape[0] + 1:
        raise ArgumentError(
            f"{op}: cu_seqlens_k.shape[0]={ends} but must be num_seqs + 1, with a row of "
            f"block_tables, which has {block_tables.shape[0]}, for each sequence"
        )
    check_key_buffers(op, access.format, k, v)
    arrays = {"block_tables": block_tables, "cu_seqlens_k": cu_seqlens_k}
    check_place(op, pool=pool, **arrays, k=k, v=v)
    return access


def check_paged_decode(
    q: Any,
    pool: Any,
    layout: Any,
    layer: int,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    out: Any,
    lse: Any,
    **options: Any,
) -> PagedAccess:
    """`options`: softmax_scale, sink, softcap."""
    op = "paged_decode"
    access = check_pool(op, pool, layout, layer, written=False)
    check_array(op, "block_tables", block_tables, I32, ((None, ""), (None, "")))
    check_array(op, "seq_ids", seq_ids, I32, ((None, ""),))
    tokens = (seq_ids.shape[0], "seq_ids.shape[0]")
    check_array(op, "positions", positions, I32, (tokens,))
    check_heads(op, q, access.format, tokens, out, lse, options)
    arrays = {"block_tables": block_tables, "seq_ids": seq_ids, "positions": positions}
    check_place(op, q=q, pool=pool, **arrays, out=out, lse=lse, sink=options["sink"])
    return access


def record_starts(
    op: str,
    access: PagedAccess,
    block_tables: np.ndarray,
    seq_ids: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Byte of the pool where the record of each (sequence, position) begins, int64 [n]; -1 for
    padding (seq id -1). Host arrays; ArgumentError for an id of no row of the table, a negative
    position, one past the table's last block, and a block that is not in the pool."""
    num_seqs, max_blocks = block_tables.shape
    seqs, places = seq_ids.astype(np.int64), positions.astype(np.int64)
    bad = (seqs < -1) | (seqs >= num_seqs)
    refuse(op, "seq_ids", seqs, bad, f"must be -1 (padding) .. {num_seqs - 1}")
    real = seqs >= 0
    last = max_blocks * access.block_size - 1
    bad = real & ((places < 0) | (places > last))
    rule = f"must be 0 .. {last}, the last that block_tables has room for"
    refuse(op, "positions", places, bad, rule)
    if not real.any():
        return np.full(seqs.shape, -1)
    column = np.where(real, places, 0) // access.block_size  # rounded down: the block it lies in
    blocks = block_tables[np.where(real, seqs, 0), column].astype(np.int64)
    bad = real & ((blocks < 0) | (blocks >= access.num_blocks))
    rule = f"must be 0 .. {access.num_blocks - 1}, a block of the pool"
    refuse(op, "block of token", blocks, bad, rule)
    inside = places % access.block_size * access.format.record_bytes
    return np.where(real, blocks * access.block_bytes + access.offset + inside, -1)


def check_key_ends(op: str, cu_seqlens_k: np.ndarray, rows: int) -> None:
    """Host values: ends run from 0, never falling, to at most `rows`."""
    ends = cu_seqlens_k.astype(np.int64)
    if ends[0] != 0 or ends[-1] > rows or np.any(np.diff(ends) < 0):
        raise ArgumentError(
            f"{op}: cu_seqlens_k runs {ends[0]} .. {ends[-1]} but must start at 0, never fall and "
            f"end at k.shape[0]={rows} or before"
        )
