"""Reference of decode plans: the definition written out, one token and one column at a time."""

from typing import Any

from ..plan_checks import check_sizes, mode_code


def plan_decode(
    state_ids: Any,
    positions: Any,
    cu_seqlens_q: Any,
    swa_valid_start: Any,
    offset_len: Any,
    index: Any,
    *,
    window: int,
    ring_len: int,
    mode: str,
    stream: Any = None,
) -> None:
    """Fill offset_len [T, 2] and index [T, W'] (int32) for T tokens.

    state_ids, positions int [T]; cu_seqlens_q int [num_seqs + 1]; swa_valid_start an int or
    int [T]. Padding (state id below 0, or a token past cu_seqlens_q) has offset 0, length 0 and
    index -1, and so has a token that sees nothing.
    """
    check_sizes("plan_decode", window, ring_len)
    mode_code("plan_decode", mode)
    offset_len[...] = 0
    index[...] = -1
    for i in range(len(cu_seqlens_q) - 1):
        tokens = range(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        real = [t for t in tokens if state_ids[t] >= 0]
        for t in real:
            first, last = int(positions[real[0]]), int(positions[real[-1]])
            keys = visible_positions(mode, window, int(positions[t]), first, last)
            valid = swa_valid_start if isinstance(swa_valid_start, int) else int(swa_valid_start[t])
            keys = [key for key in keys if key >= max(valid, 0)]
            if not keys:
                continue
            base = int(state_ids[t]) * ring_len
            offset_len[t] = base + keys[0] % ring_len, len(keys)
            for column, key in enumerate(keys):
                index[t, column] = base + key % ring_len


def visible_positions(mode: str, window: int, p: int, first: int, last: int) -> list[int]:
    """Positions that a query at p sees, oldest first, perhaps below 0. `first` and `last` are the
    first and the last position of its sequence in this batch."""
    if mode == "block":
        anchor = first - 1  # the last committed position
        return list(range(anchor - window + 1, last + 1))
    if mode == "draft_step" and p > first:
        return list(range(first - window + 1, last + 1))
    return list(range(p - window + 1, p + 1))
