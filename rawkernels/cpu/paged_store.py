"""paged_store on the CPU: records are encoded where they lie in the pool."""

from typing import Any

from ...layouts.paged import PagedLayout
from ...layouts.rope import Rope
from ..paged_checks import check_paged_store, record_starts
from .record_kernels import encode_rows, whole_addresses


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
    """kv (k, v) of bf16 or float16 [T, H, D] each into the pool, flat uint8; block_tables int32
    [num_seqs, max_blocks], seq_ids (-1: not stored) and positions int32 [T]."""
    access = check_paged_store(pool, layout, layer, kv, block_tables, seq_ids, positions, rope)
    starts = record_starts("paged_store", access, block_tables, seq_ids, positions)
    if starts.shape[0] == 0:
        return
    addresses = whole_addresses(starts, access.format)
    encode_rows(kv, positions, rope, access.format, pool, addresses)
