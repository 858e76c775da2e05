"""paged_decode on the CPU: the keys of one sequence after the other are decoded once, then its
tokens attend."""

from typing import Any

import numpy as np

from ...layouts.paged import PagedLayout
from ..paged_checks import check_paged_decode, record_starts
from .attention_kernel import attend
from .record_kernels import decode_keys, whole_addresses


def paged_decode(
    q: Any,
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    seq_ids: Any,
    positions: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: Any = None,
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], pool flat uint8 -> out like q, lse float32 [T, H]. Token t sees
    positions 0 .. positions[t] of sequence seq_ids[t], and nothing where that is -1."""
    op = "paged_decode"
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "sink": sink}
    access = check_paged_decode(
        q, pool, layout, layer, block_tables, seq_ids, positions, out, lse, **options
    )
    record_starts(op, access, block_tables, seq_ids, positions)
    out[seq_ids < 0], lse[seq_ids < 0] = 0, -np.inf
    for seq_id in np.unique(seq_ids[seq_ids >= 0]).tolist():
        tokens = np.flatnonzero(seq_ids == seq_id)
        length = int(positions[tokens].max()) + 1
        places = np.arange(length)
        starts = record_starts(op, access, block_tables, np.full(length, seq_id), places)
        keys, values = decode_keys(pool, whole_addresses(starts, access.format), access.format)
        ranges = np.zeros((len(tokens), 4), np.int64)
        ranges[:, 1] = positions[tokens] + 1
        some, some_lse = np.empty_like(out[tokens]), np.empty_like(lse[tokens])
        attend(
            np.ascontiguousarray(q[tokens]),
            keys,
            values,
            ranges,
            some,
            some_lse,
            **options,
            rope_out=None,
            positions=positions[tokens],
        )
        out[tokens], lse[tokens] = some, some_lse
