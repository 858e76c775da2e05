"""window_prefill over records of K and V apart: the joint buffer is decoded to contiguous K and V
once, then `window_attention` runs over them. The decoded keys are read by many queries, and the
kernels of window_attention are the fastest there are, so the extra pass over memory pays."""

from typing import Any, NamedTuple

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ..device.streams import cupy_stream
from .ring_load import joint_load
from .window_attention import window_attention


class PrefillScratch(NamedTuple):
    """What a launch works with: int32 [num_seqs + 2] twice, and keys and values
    [most_keys, num_kv_heads, head_dim] as uint16 bits or float16."""

    q_ends: Any
    cu_seqlens_k: Any
    k: Any
    v: Any


def take_scratch(plan: PrefillPlan, fmt: RecordFormat, stream: Any) -> PrefillScratch:
    """New arrays from CuPy's pool, for `stream`."""
    import cupy

    ends = (plan.num_seqs + 2,)
    rows = (plan.most_keys, fmt.num_kv_heads, fmt.head_dim)
    dtype = np.float16 if fmt.type == "fp16" else np.uint16
    with cupy_stream(stream):  # the pool gives a stream's memory to that stream's next taker
        arrays = [cupy.empty(ends, np.int32) for _ in range(2)]
        return PrefillScratch(*arrays, *(cupy.empty(rows, dtype) for _ in range(2)))


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
    makes them the queries of sequences without keys. `variant` goes to window_attention.
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
