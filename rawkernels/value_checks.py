"""Checks of the numbers inside index arrays, for the host backends: an index that is out of range
is an error there, where a GPU kernel skips it."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError


def refuse(op: str, name: str, array: np.ndarray, bad: np.ndarray, rule: str) -> None:
    """ArgumentError that names the first bad entry, if there is one."""
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        where = ", ".join(str(i) for i in first)
        raise ArgumentError(f"{op}: {name}[{where}]={array[first]} but {rule}")


def check_store_values(
    op: str, state_ids: np.ndarray, positions: np.ndarray, num_slots: int, name: str = "state_ids"
) -> None:
    """State ids are -1 (padding) or below `num_slots`; positions of stored tokens are >= 0."""
    bad = (state_ids < -1) | (state_ids >= num_slots)
    refuse(op, name, state_ids, bad, f"must be -1 (padding) or 0..{num_slots - 1}")
    bad = (positions < 0) & (state_ids >= 0)
    refuse(op, "positions", positions, bad, "must be at least 0")


def check_segment_values(op: str, plan: Any, num_slots: int) -> np.ndarray:
    """The segments that count, int32 [num_segments, 3]; each lies inside one ring and inside the
    history section."""
    count = int(plan.num_segments[0])
    if not 0 <= count <= plan.segments.shape[0]:
        raise ArgumentError(
            f"{op}: plan.num_segments[0]={count} but plan.segments.shape[0]="
            f"{plan.segments.shape[0]}"
        )
    segments = plan.segments[:count]
    source, target, rows = segments.astype(np.int64).T
    ring_rows = num_slots * plan.ring_len
    bad = (rows > 0) & ((source < -1) | (source >= ring_rows))
    refuse(op, "segment sources", source, bad, f"must be -1 or a row in 0..{ring_rows - 1}")
    bad = (source >= 0) & (source % plan.ring_len + rows > plan.ring_len)
    refuse(op, "segment rows", rows, bad, f"runs past its ring of {plan.ring_len}")
    bad = (rows < 0) | (target < 0) | (target + rows > plan.history_rows)
    refuse(op, "segment targets", target, bad, f"must stay in 0..{plan.history_rows - 1}")
    return segments


def check_decode_values(op: str, plan: Any, num_slots: int) -> None:
    """Each token's keys lie in one ring of the slab; length 0 needs no valid offset."""
    offsets, lengths = plan.offset_len.T
    bad = (lengths < 0) | (lengths > plan.ring_len)
    refuse(op, "lengths", lengths, bad, f"must be 0..ring_len={plan.ring_len}")
    rows = num_slots * plan.ring_len
    pinned = np.zeros_like(lengths) if plan.num_pinned is None else plan.num_pinned
    bad = (pinned < 0) | (pinned > plan.sink_tokens)
    refuse(op, "num_pinned", pinned, bad, f"must be 0..sink_tokens={plan.sink_tokens}")
    bad = ((lengths > 0) | (pinned > 0)) & ((offsets < 0) | (offsets >= rows))
    refuse(op, "offsets", offsets, bad, f"must be a row in 0..{rows - 1}")
    bad = (lengths > 0) & (offsets % plan.ring_len < plan.sink_tokens)
    refuse(op, "offsets", offsets, bad, f"is a pinned row of a ring of {plan.ring_len}")


def check_pivot_values(op: str, plan: Any, num_rows: int) -> None:
    """All ranges of each token lie inside the joint buffer."""
    every = {"": plan.pivots}
    if plan.pinned_pivots is not None:
        every["pinned "] = plan.pinned_pivots
    for kind, pivots in every.items():
        for column, name in ((0, "section-1"), (2, "section-2")):
            starts = pivots[:, column].astype(np.int64)
            lengths = pivots[:, column + 1].astype(np.int64)
            refuse(op, f"{kind}{name} lengths", lengths, lengths < 0, "must be at least 0")
            bad = (lengths > 0) & ((starts < 0) | (starts + lengths > num_rows))
            refuse(op, f"{kind}{name} starts", starts, bad, f"its range leaves 0..{num_rows - 1}")


def check_load_values(op: str, plan: Any, num_slots: int) -> None:
    """State ids of a prefill plan are -1 (padding) or below `num_slots`."""
    states = plan.state_ids
    bad = (states < -1) | (states >= num_slots)
    refuse(op, "state_ids", states, bad, f"must be -1 (padding) or 0..{num_slots - 1}")
