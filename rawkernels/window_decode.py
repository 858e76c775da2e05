"""window_decode: sliding-window attention of decode steps over the rings of a slab."""

from typing import Any

import numpy as np

from ..layouts.plans import DecodePlan
from ..layouts.rope import Rope
from ..layouts.slots import RingKind, SlotLayout
from .arrays import BF16, FP16, as_array, backend_of, empty_like_backend
from .checks import check_plan
from .operations import operation


def window_decode(
    q: Any,
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: DecodePlan,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    kind: RingKind = "swa",
    out: Any = None,
    lse: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attention output and log-sum-exp (out, lse) of T query tokens.

    q: bf16 (bfloat16 or uint16 bits), or float16 for fp16 records, [T, num_q_heads, head_dim],
    rotated; slab: flat uint8, the new keys stored already. Rings of latent records (one vector is
    key and value of all heads) or of K and V apart: there query head h reads KV head h //
    (num_q_heads / num_kv_heads). sink: float32 [num_q_heads], a logit in the denominator only;
    softcap c > 0: scores become c tanh(s / c); rope_out (latent only): rotates the output's last
    dims backwards by the query's position. out like q, lse float32 [T, num_q_heads], natural,
    without the sink. A token that sees no key (padding) gives 0 and -inf. The keys are those of
    `plan.offset_len` and, in rings that pin first positions, of `plan.num_pinned`. Formulas:
    s = (q . k) * softmax_scale, o = sum exp(s - m) v / (sum exp(s - m) + exp(sink - m)).
    Raises ArgumentError for other shapes, dtypes, strides or devices, and for a plan made for
    another ring_len.
    """
    check_plan("window_decode", plan, DecodePlan)
    q, slab = as_array(q, "q"), as_array(slab, "slab")
    sink = None if sink is None else as_array(sink, "sink")
    out = empty_like_backend(q.shape, FP16 if q.dtype == FP16 else BF16, q) if out is None else out
    lse = empty_like_backend(q.shape[:2], np.float32, q) if lse is None else lse
    out_array, lse_array = as_array(out, "out"), as_array(lse, "lse")
    backend = backend_of(q=q, slab=slab, offset_len=plan.offset_len, out=out_array, lse=lse_array)
    operation(backend, "window_decode")(
        q,
        slab,
        layout,
        layer,
        plan,
        out_array,
        lse_array,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        softcap=softcap,
        kind=kind,
        stream=stream,
    )
    return out, lse
