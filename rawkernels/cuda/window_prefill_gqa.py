"""window_prefill over records of K and V apart: the joint buffer is decoded to contiguous K and V
once, then `window_attention` runs over them. The decoded keys are read by many queries, and the
kernels of window_attention are the fastest there are, so the extra pass over memory pays."""

from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from .prefill_scratch import PrefillScratch, take_scratch
from .ring_load import joint_load
from .window_attention import window_attention


def launch(
    q: Any,
    records: Any,
    plan: PrefillPlan,
    fmt: RecordFormat,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any,
    softcap: float,
    stream: Any,
    scratch: PrefillScratch | None = None,
    **variant: Any,
) -> None:
    """q bf16 or float16 [T, H, D] against a joint buffer; arrays are checked by the caller.

    Tokens that belong to no sequence, and those of padding sequences, see no key: `joint_load`
    makes them the queries of sequences without keys. `scratch`: what `cut_scratch` gives; None
    takes it from CuPy's pool. `variant` goes to window_attention.
    """
    if plan.num_seqs == 0:
        out.fill(0)
        lse.fill(-np.inf)
        return
    scratch = scratch or take_scratch(plan, fmt, stream)
    joint_load(records, plan, fmt, *scratch, stream)
    window_attention(
        q,
        scratch.k,
        scratch.v,
        scratch.q_ends,
        scratch.cu_seqlens_k,
        out,
        lse,
        softmax_scale=softmax_scale,
        window=plan.window,
        softcap=softcap,
        sink=sink,
        sink_tokens=plan.sink_tokens,
        stream=stream,
        **variant,
    )
