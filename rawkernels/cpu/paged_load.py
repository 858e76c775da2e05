"""paged_load on the CPU."""

from typing import Any

import numpy as np

from ...layouts.paged import PagedLayout
from ..paged_checks import check_key_ends, check_paged_load, record_starts
from .record_kernels import unpack_rows, whole_addresses


def paged_load(
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    stream: Any = None,
) -> None:
    """pool flat uint8 -> k, v bf16 or float16 [rows, H, D]: row cu_seqlens_k[i] + j is position j
    of sequence i. Rows past cu_seqlens_k[-1] are untouched."""
    op = "paged_load"
    access = check_paged_load(pool, layout, layer, block_tables, cu_seqlens_k, k, v)
    check_key_ends(op, cu_seqlens_k, k.shape[0])
    lengths = np.diff(cu_seqlens_k)
    seq_ids = np.repeat(np.arange(lengths.shape[0]), lengths)
    if seq_ids.shape[0] == 0:
        return
    positions = np.arange(seq_ids.shape[0]) - cu_seqlens_k[:-1][seq_ids]
    starts = record_starts(op, access, block_tables, seq_ids, positions)
    unpack_rows(pool, whole_addresses(starts, access.format), access.format, k, v)
