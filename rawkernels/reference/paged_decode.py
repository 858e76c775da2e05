"""paged_decode: query tokens against all keys of their sequences, in float64."""

from typing import Any

import numpy as np

from ...layouts.paged import PagedLayout
from ..paged_checks import check_paged_decode, record_starts
from .attention import attend_token, decode_records, wide, write_output


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
    round_weights: bool = False,
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], pool flat uint8 -> out like q or float64 [T, H, D], lse float32
    [T, H]. Token t sees positions 0 .. positions[t] of sequence seq_ids[t], and nothing where that
    is -1. `round_weights`: see `rounded_to` of `attend_token`."""
    op = "paged_decode"
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "sink": sink}
    access = check_paged_decode(
        q, pool, layout, layer, block_tables, seq_ids, positions, out, lse, **options
    )
    record_starts(op, access, block_tables, seq_ids, positions)
    queries = wide(q)
    exact = np.zeros(q.shape, np.float64)
    for t, (seq_id, position) in enumerate(zip(seq_ids.tolist(), positions.tolist(), strict=True)):
        visible = np.arange(position + 1 if seq_id >= 0 else 0)
        ids = np.full(visible.shape, seq_id)
        starts = record_starts(op, access, block_tables, ids, visible)
        records = pool[starts[:, None] + np.arange(access.format.record_bytes)]
        exact[t], lse[t] = attend_token(
            queries[t],
            *decode_records(records, access.format),
            **options,
            rounded_to=q.dtype if round_weights else None,
        )
    write_output(exact, out)
