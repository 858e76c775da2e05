"""window_decode: query tokens against the last keys of their sequences' rings, in float64."""

from typing import Any

import numpy as np

from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.slots import SlotLayout
from ..arrays import bf16_bits
from ..checks import check_window_decode
from ..value_checks import check_decode_values
from .attention import attend_token, decode_records, rotate_back, write_output
from .bf16 import bf16_to_float32
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
    kind: str = "swa",
    round_weights: bool = False,
    stream: Any = None,
) -> None:
    """q bf16 [T, H, D], slab flat uint8 -> out bf16 or float64 [T, H, D], lse float32 [T, H].

    The keys of token t are `offset_len[t, 1]` consecutive ring rows from row `offset_len[t, 0]`,
    wrapping at the end of that ring. `round_weights`: see `attend_token`.
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
    )
    check_decode_values("window_decode", plan, num_slots)
    pieces = ring_pieces(slab, access)
    queries = bf16_to_float32(bf16_bits(q, "q")).astype(np.float64)
    exact = np.zeros(q.shape, np.float64)
    for t, (offset, length) in enumerate(plan.offset_len.tolist()):
        state_id, oldest = divmod(offset, access.ring_len) if length else (0, 0)
        indices = (oldest + np.arange(length)) % access.ring_len
        keys = np.zeros((0, q.shape[2]))
        if length:
            keys = decode_records(read_records(pieces, (state_id, indices)), access.format)
        exact[t], lse[t] = attend_token(
            queries[t],
            keys,
            softmax_scale=softmax_scale,
            sink=sink,
            round_weights=round_weights,
        )
    write_output(rotate_back(exact, plan.positions, rope_out), out)
