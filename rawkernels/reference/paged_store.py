"""paged_store is encode_records, and each record where its block table says."""

from typing import Any

import numpy as np

from ...layouts.paged import PagedLayout
from ...layouts.rope import Rope
from ..paged_checks import check_paged_store, record_starts
from .encode_records import encode_records


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
    record_bytes = access.format.record_bytes
    records = np.empty((seq_ids.shape[0], record_bytes), np.uint8)
    encode_records(kv, positions, records, record_format=access.format, rope=rope)
    for record, start in zip(records, starts.tolist(), strict=True):
        if start >= 0:
            pool[start : start + record_bytes] = record
