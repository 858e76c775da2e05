"""window_decode on the CPU: decode each visible record once, then attend."""

from typing import Any

import numpy as np

from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..checks import check_window_decode
from ..value_checks import check_decode_values
from .attention_kernel import attend
from .record_kernels import decode_rows, ring_addresses


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
    kind: str = "swa",
    stream: Any = None,
) -> None:
    """q bf16 [T, H, D], slab flat uint8 -> out bf16 [T, H, D], lse float32 [T, H]."""
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
    )
    check_decode_values("window_decode", plan, num_slots)
    if q.size == 0:
        return
    rows, ranges = visible_rows(plan.offset_len, access.ring_len)
    keys = decode_rows(slab, ring_addresses(rows, access), access.format)[:, 0]
    attend(
        q,
        keys,
        ranges,
        out,
        lse,
        softmax_scale=softmax_scale,
        sink=sink,
        rope_out=rope_out,
        positions=plan.positions,
    )


def visible_rows(offset_len: np.ndarray, ring_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The ring rows that any token sees, int64 [n] ascending, and each token's keys as two ranges
    of places in that list, int64 [T, 4]. Rows that follow each other in a token's range follow each
    other in the list, because all of them are in it."""
    offset, length = offset_len.astype(np.int64).T
    ring_start = offset - offset % ring_len
    length1 = np.minimum(length, ring_start + ring_len - offset)  # up to the wrap
    step = np.arange(max(int(length.max(initial=0)), 1))[None]  # [1, longest]
    rows = ring_start[:, None] + (offset[:, None] - ring_start[:, None] + step) % ring_len
    visible = np.unique(rows[step < length[:, None]])
    ranges = np.stack(
        [
            np.searchsorted(visible, offset),
            length1,
            np.searchsorted(visible, ring_start),
            length - length1,
        ],
        axis=1,
    )
    return visible, ranges
