"""window_decode on the CPU: decode each visible record once, then attend."""

from typing import Any

import numpy as np

from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..checks import check_window_decode
from ..value_checks import check_decode_values
from .attention_kernel import attend
from .record_kernels import decode_keys, ring_addresses


def window_decode(
    q: Any,
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    softcap: float = 0.0,
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], slab flat uint8 -> out like q, lse float32 [T, H]."""
    access, num_slots = check_window_decode(
        q,
        slab,
        layout,
        layer,
        plan,
        out,
        lse,
        kind,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        softcap=softcap,
    )
    check_decode_values("window_decode", plan, num_slots)
    if q.size == 0:
        return
    rows, ranges = visible_rows(plan)
    attend(
        q,
        *decode_keys(slab, ring_addresses(rows, access), access.format),
        ranges,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        rope_out=rope_out,
        positions=plan.positions,
    )


def visible_rows(plan: DecodePlan) -> tuple[np.ndarray, np.ndarray]:
    """The ring rows that any token sees, int64 [n] ascending, and each token's keys as ranges of
    places in that list, int64 [T, 4], or [T, 6] with pinned positions first. Rows that follow each
    other in a token's range follow each other in the list, because all of them are in it."""
    ring_len, sink_tokens = plan.ring_len, plan.sink_tokens
    offset, length = plan.offset_len.astype(np.int64).T
    ring_start = offset - offset % ring_len
    moved_start = ring_start + sink_tokens
    length1 = np.minimum(length, ring_start + ring_len - offset)  # up to the wrap
    step = np.arange(max(int(length.max(initial=0)), 1))[None]  # [1, longest]
    turn = (offset - moved_start)[:, None] + step
    rows = (moved_start[:, None] + turn % (ring_len - sink_tokens))[step < length[:, None]]
    if sink_tokens:
        step = np.arange(sink_tokens)[None]
        pinned = (ring_start[:, None] + step)[step < plan.num_pinned[:, None]]
        rows = np.concatenate([pinned, rows])
    visible = np.unique(rows)
    starts, lengths = [offset, moved_start], [length1, length - length1]
    if sink_tokens:
        starts, lengths = [ring_start, *starts], [plan.num_pinned.astype(np.int64), *lengths]
    ranges = np.empty((offset.shape[0], 2 * len(starts)), np.int64)
    ranges[:, 0::2] = np.searchsorted(visible, np.stack(starts, axis=1))
    ranges[:, 1::2] = np.stack(lengths, axis=1)
    return visible, ranges
