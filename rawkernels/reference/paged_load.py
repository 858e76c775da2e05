"""paged_load: each sequence's records from its first position on, decoded."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.paged import PagedLayout
from ..arrays import value_bits
from ..paged_checks import check_key_ends, check_paged_load, record_starts
from .attention import decode_part, write_output


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
    for i, first in enumerate(cu_seqlens_k[:-1].tolist()):
        positions = np.arange(cu_seqlens_k[i + 1] - first)
        seq_ids = np.full(positions.shape, i)
        starts = record_starts(op, access, block_tables, seq_ids, positions)
        records = pool[starts[:, None] + np.arange(access.format.record_bytes)]
        rows = slice(first, first + len(positions))
        decode_into(records, access.format, k[rows], v[rows])


def decode_into(records: np.ndarray, fmt: RecordFormat, k: np.ndarray, v: np.ndarray) -> None:
    """Fill k and v, bf16 or float16 [n, H, D], from records uint8 [n, record_bytes]. Values that
    are 16 bits wide already are copied bit for bit, NaN payloads and all."""
    for i, target in enumerate((k, v)):
        part = records[:, i * fmt.part_bytes : (i + 1) * fmt.part_bytes]
        if fmt.type == "mxfp8":
            write_output(decode_part(part, fmt), target)
        else:
            words = np.ascontiguousarray(part).view(np.uint16)
            value_bits(target, "k")[...] = words.reshape(target.shape)
