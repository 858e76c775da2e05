"""window_prefill on the CPU: decode each visible row of the joint buffer once, then attend."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.rope import Rope
from ..checks import check_window_prefill
from ..value_checks import check_pivot_values
from .attention_kernel import attend
from .record_kernels import buffer_addresses, decode_rows


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
    stream: Any = None,
) -> None:
    """q bf16 [T, H, D], records uint8 [num_seqs * W + T, record_bytes] -> out bf16 [T, H, D],
    lse float32 [T, H]."""
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
    )
    check_pivot_values("window_prefill", plan, records.shape[0])
    if q.size == 0:
        return
    rows = visible_rows(plan.pivots, plan.history_rows + q.shape[0])
    addresses = buffer_addresses(rows, record_format)
    keys = decode_rows(records.reshape(-1), addresses, record_format)[:, 0]
    attend(
        q,
        keys,
        plan.pivots.astype(np.int64),
        out,
        lse,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        positions=plan.positions,
    )


def visible_rows(pivots: np.ndarray, num_rows: int) -> np.ndarray:
    """int64 [num_rows]: the row number where any token sees the row, else -1."""
    edges = np.zeros(num_rows + 1, np.int64)  # +1 where a range starts, -1 behind its end
    for column in (0, 2):
        starts, lengths = pivots[:, column], pivots[:, column + 1]
        seen = lengths > 0
        np.add.at(edges, starts[seen], 1)
        np.add.at(edges, starts[seen] + lengths[seen], -1)
    return np.where(np.cumsum(edges)[:num_rows] > 0, np.arange(num_rows), -1)
