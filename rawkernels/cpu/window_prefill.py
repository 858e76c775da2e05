"""window_prefill on the CPU: decode each visible row of the joint buffer once, then attend."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan, prefill_ranges
from ...layouts.rope import Rope
from ..checks import check_window_prefill
from ..value_checks import check_pivot_values
from .attention_kernel import attend
from .record_kernels import buffer_addresses, decode_keys


def window_prefill(
    q: Any,
    records: Any,
    plan: PrefillPlan,
    record_format: RecordFormat,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], records uint8 [num_seqs * (W + S) + T, record_bytes] -> out like
    q, lse float32 [T, H]."""
    check_window_prefill(
        q,
        records,
        plan,
        record_format,
        out,
        lse,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        softcap=softcap,
    )
    check_pivot_values("window_prefill", plan, records.shape[0])
    if q.size == 0:
        return
    ranges = prefill_ranges(plan).astype(np.int64)
    rows = visible_rows(ranges, plan.history_rows + q.shape[0])
    addresses = buffer_addresses(rows, record_format)
    attend(
        q,
        *decode_keys(records.reshape(-1), addresses, record_format),
        ranges,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        rope_out=rope_out,
        positions=plan.positions,
    )


def visible_rows(ranges: np.ndarray, num_rows: int) -> np.ndarray:
    """int64 [num_rows]: the row number where any token sees the row, else -1."""
    edges = np.zeros(num_rows + 1, np.int64)  # +1 where a range starts, -1 behind its end
    for column in range(0, ranges.shape[1], 2):
        starts, lengths = ranges[:, column], ranges[:, column + 1]
        seen = lengths > 0
        np.add.at(edges, starts[seen], 1)
        np.add.at(edges, starts[seen] + lengths[seen], -1)
    return np.where(np.cumsum(edges)[:num_rows] > 0, np.arange(num_rows), -1)
