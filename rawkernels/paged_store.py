"""paged_store: encode vectors of K and V and store them in the blocks of a paged pool."""

from typing import Any

from ..layouts.paged import PagedLayout
from ..layouts.rope import Rope
from .arrays import as_array, as_kv, backend_of
from .operations import operation
from .record_checks import kv_places


def paged_store(
    pool: Any,
    layout: PagedLayout,
    layer: int,
    kv: Any,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    *,
    rope: Rope | None = None,
    stream: Any = None,
) -> None:
    """Write each token's record, as `encode_records` makes it, where its block table says.

    pool: flat uint8 [num_blocks * block_bytes]; kv: (k, v), each [T, num_kv_heads, head_dim], bf16
    (bfloat16 or uint16 bits), or float16 for an fp16 format, not rotated; `rope` rotates K.
    block_tables: int32 [num_seqs, max_blocks], -1 beyond a sequence's last block; seq_ids: int32
    [T], the row of block_tables of each token, -1 for padding, which is not stored; positions:
    int32 [T]. Position p lies in block `block_tables[seq, p / block_size]` at index p % block_size.
    Two tokens of one place in one call are the caller's mistake.

    Raises ArgumentError for other shapes or dtypes and, on the host, for an id, a position or a
    block out of range (a GPU skips those tokens).
    """
    pool, kv = as_array(pool, "pool"), as_kv(kv)
    arrays = {
        "block_tables": as_array(block_tables, "block_tables"),
        "seq_ids": as_array(seq_ids, "seq_ids"),
        "positions": as_array(positions, "positions"),
    }
    backend = backend_of(pool=pool, **kv_places(kv), **arrays)
    operation(backend, "paged_store")(
        pool, layout, layer, kv, *arrays.values(), rope=rope, stream=stream
    )
