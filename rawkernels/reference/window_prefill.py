"""window_prefill: query tokens against their history and their own chunk, in float64."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan, prefill_ranges
from ...layouts.rope import Rope
from ..checks import check_window_prefill
from ..value_checks import check_pivot_values
from .attention import attend_token, decode_records, rotate_back, wide, write_output


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
    round_weights: bool = False,
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], records uint8 [num_seqs * (W + S) + T, record_bytes] -> out like
    q or float64 [T, H, D], lse float32 [T, H].

    The keys of token t are the two row ranges of `plan.pinned_pivots[t]`, where the plan has them,
    then those of `plan.pivots[t]`. `round_weights`: see `rounded_to` of `attend_token`.
    """
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
    queries = wide(q)
    exact = np.zeros(q.shape, np.float64)
    for t, ranges in enumerate(prefill_ranges(plan).tolist()):
        runs = zip(ranges[::2], ranges[1::2], strict=True)
        visible = np.concatenate([np.arange(start, start + length) for start, length in runs])
        exact[t], lse[t] = attend_token(
            queries[t],
            *decode_records(records[visible], record_format),
            softmax_scale=softmax_scale,
            sink=sink,
            softcap=softcap,
            rounded_to=q.dtype if round_weights else None,
        )
    write_output(rotate_back(exact, plan.positions, rope_out), out)
