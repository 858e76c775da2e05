"""window_prefill: sliding-window attention of prefill chunks over their joint buffer."""

from typing import Any

import numpy as np

from ..layouts.formats import RecordFormat
from ..layouts.plans import PrefillPlan
from ..layouts.rope import Rope
from .arrays import BF16, FP16, as_array, backend_of, empty_like_backend
from .checks import check_plan
from .operations import operation


def window_prefill(
    q: Any,
    records: Any,
    plan: PrefillPlan,
    record_format: RecordFormat,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention output and log-sum-exp (out, lse) of T query tokens.

    q: bf16 (bfloat16 or uint16 bits), or float16 for fp16 records, [T, num_q_heads, head_dim],
    rotated; records: uint8 [plan.history_rows + T, record_bytes] (or more rows), history first, of
    latent records or of K and V apart (query head h reads KV head h // (num_q_heads /
    num_kv_heads)). sink: float32 [num_q_heads], a logit in the denominator only; softcap c > 0:
    scores become c tanh(s / c); rope_out (latent only): rotates the output's last dims backwards by
    the query's position. out like q, lse float32 [T, num_q_heads], natural, without the sink. A
    query that sees no key gives 0 and -inf. Formulas:
    s = (q . k) * softmax_scale, o = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m)).
    Raises ArgumentError for other shapes, dtypes, strides or devices.
    """
    check_plan("window_prefill", plan, PrefillPlan)
    q, records = as_array(q, "q"), as_array(records, "records")
    sink = None if sink is None else as_array(sink, "sink")
    out = empty_like_backend(q.shape, FP16 if q.dtype == FP16 else BF16, q) if out is None else out
    lse = empty_like_backend(q.shape[:2], np.float32, q) if lse is None else lse
    out_array, lse_array = as_array(out, "out"), as_array(lse, "lse")
    backend = backend_of(q=q, records=records, pivots=plan.pivots, out=out_array, lse=lse_array)
    operation(backend, "window_prefill")(
        q,
        records,
        plan,
        record_format,
        out_array,
        lse_array,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        softcap=softcap,
        stream=stream,
    )
    return out, lse
