"""window_decode: query tokens against the last keys of their sequences' rings, in float64."""

from typing import Any

import numpy as np

from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..checks import check_window_decode
from ..value_checks import check_decode_values
from .attention import attend_token, decode_records, rotate_back, wide, write_output
from .store_records import read_records, ring_pieces


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
    round_weights: bool = False,
    stream: Any = None,
) -> None:
    """q bf16 or float16 [T, H, D], slab flat uint8 -> out like q or float64 [T, H, D], lse float32
    [T, H].

    The keys of token t are `offset_len[t, 1]` consecutive ring rows from row `offset_len[t, 0]`,
    wrapping at the end of that ring to its first row that is not pinned; and, where the ring pins
    positions, its first `num_pinned[t]` rows. `round_weights`: see `rounded_to` of `attend_token`.
    """
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
    pieces = ring_pieces(slab, access)
    queries = wide(q)
    exact = np.zeros(q.shape, np.float64)
    none = np.zeros((0, access.format.num_kv_heads, q.shape[2]))
    for t, (offset, length) in enumerate(plan.offset_len.tolist()):
        pinned = int(plan.num_pinned[t]) if plan.sink_tokens else 0
        keys = values = none
        if length + pinned:
            state_id, oldest = divmod(offset, access.ring_len)
            turn = access.ring_len - access.sink_tokens
            moved = access.sink_tokens + (oldest - access.sink_tokens + np.arange(length)) % turn
            indices = np.concatenate([np.arange(pinned), moved])
            keys, values = decode_records(read_records(pieces, (state_id, indices)), access.format)
        exact[t], lse[t] = attend_token(
            queries[t],
            keys,
            values,
            softmax_scale=softmax_scale,
            sink=sink,
            softcap=softcap,
            rounded_to=q.dtype if round_weights else None,
        )
    write_output(rotate_back(exact, plan.positions, rope_out), out)
