"""window_prefill: query tokens against their history and their own chunk, in float64."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.rope import Rope
from ..arrays import bf16_bits
from ..checks import check_window_prefill
from ..value_checks import check_pivot_values
from .attention import attend_token, decode_records, rotate_back, write_output
from .bf16 import bf16_to_float32


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
    round_weights: bool = False,
    stream: Any = None,
) -> None:
    """q bf16 [T, H, D], records uint8 [num_seqs * W + T, record_bytes] -> out bf16 or float64
    [T, H, D], lse float32 [T, H].

    The keys of token t are the two row ranges of `plan.pivots[t]`, in order. `round_weights`: see
    `attend_token`.
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
    )
    check_pivot_values("window_prefill", plan, records.shape[0])
    queries = bf16_to_float32(bf16_bits(q, "q")).astype(np.float64)
    exact = np.zeros(q.shape, np.float64)
    for t, (start1, length1, start2, length2) in enumerate(plan.pivots.tolist()):
        visible = np.r_[start1 : start1 + length1, start2 : start2 + length2].astype(np.int64)
        exact[t], lse[t] = attend_token(
            queries[t],
            decode_records(records[visible], record_format),
            softmax_scale=softmax_scale,
            sink=sink,
            round_weights=round_weights,
        )
    write_output(rotate_back(exact, plan.positions, rope_out), out)
