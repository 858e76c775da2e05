"""Plans: int32 arrays that say which keys each query token of a batch reads.

A plan is frozen and its arrays are never changed after it is built. The arrays live where the
batch runs: NumPy on the CPU, CuPy on the GPU. All counts and indices are int32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_SEGMENTS = 3  # copies a sequence's history can need: zeros, up to the wrap, from the wrap on
MAX_PINNED_SEGMENTS = 2  # and those of its pinned positions: copied, zeros


@dataclass(frozen=True)
class DecodePlan:
    """Keys of a decode batch of T query tokens in `num_seqs` sequences.

    cu_seqlens_q [num_seqs + 1]  tokens of sequence i are cu_seqlens_q[i] .. cu_seqlens_q[i + 1]
    state_ids    [T]             state slot of each token's sequence; -1 is padding
    positions    [T]
    offset_len   [T, 2]          row of the oldest visible key, number of visible keys
    index        [T, W']         rows of the keys, oldest first, then -1; W' is `window`, or
                                 `window` plus the longest block for a draft block (plus S, below)

    The keys of a token are `length` consecutive positions, so `offset_len` says all: they start at
    the given row and wrap at the end of the ring, `(state_id + 1) * ring_len`.

    With `sink_tokens` S (rings whose first S positions are pinned) a token sees a second range:
    positions 0 .. num_pinned[t] - 1, at as many first rows of its ring. `offset_len` is the range
    of its other keys, which wraps to ring index S; where a token sees pinned keys alone, its offset
    is the first row of its ring and its length 0. `index` has the pinned keys first.

    num_pinned   [T]             None where sink_tokens is 0
    """

    window: int
    ring_len: int
    num_seqs: int
    max_seqlen_q: int
    cu_seqlens_q: Any
    state_ids: Any
    positions: Any
    offset_len: Any
    index: Any
    sink_tokens: int = 0
    num_pinned: Any = None

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])


@dataclass(frozen=True)
class PrefillPlan:
    """Keys of a prefill batch of T query tokens in `num_seqs` sequences.

    The joint buffer of a layer has num_seqs * window history rows, then T new records.

    cu_seqlens_q    [num_seqs + 1]
    state_ids       [num_seqs]
    seqlens_k       [num_seqs]    tokens of each sequence after this batch
    positions       [T]
    token_state_ids [T]           the sequence's state slot for each token (for `store_records`)
    segments        [S, 3]        source row or -1 for zeros, destination row, number of rows
    num_segments    [1]           how many of the segments count; the rest, if any, have 0 rows
    pivots          [T, 4]        section-1 start, length, section-2 start, length, in rows of the
                                  joint buffer; section 1 is history, section 2 the new records

    With `sink_tokens` S each sequence has S more history rows, before the others: its positions
    below S. `pivots` are then the keys from position S on, and

    pinned_pivots   [T, 4]        the same of the keys below S; None where sink_tokens is 0
    """

    window: int
    ring_len: int
    num_seqs: int
    max_seqlen_q: int
    cu_seqlens_q: Any
    state_ids: Any
    seqlens_k: Any
    positions: Any
    token_state_ids: Any
    segments: Any
    num_segments: Any
    pivots: Any
    sink_tokens: int = 0
    pinned_pivots: Any = None

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    @property
    def history_rows(self) -> int:
        return self.num_seqs * (self.window + self.sink_tokens)

    @property
    def most_keys(self) -> int:
        """Keys of the batch at most: what `ring_load` needs room for."""
        return self.num_seqs * (self.window - 1 + self.sink_tokens) + self.num_tokens


def prefill_ranges(plan: PrefillPlan) -> np.ndarray:
    """All rows of the joint buffer that each query of a host plan reads, as int32 [T, 4] or, with
    pinned positions, [T, 8]: start, length, and so on, in the order of the positions."""
    if plan.pinned_pivots is None:
        return plan.pivots
    return np.concatenate([plan.pinned_pivots, plan.pivots], axis=1)


def history_lengths(plan: PrefillPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of a host plan: how many pinned positions, and how many others, the first query of each
    sequence sees before its chunk; int64 [num_seqs] each, 0 for a sequence without queries.

    No later query sees more of the history, so these are the keys to load for a chunk.
    """
    first = plan.cu_seqlens_q[:-1].astype(np.int64)
    has_queries = plan.cu_seqlens_q[1:] > first
    at = np.where(has_queries, first, 0)

    def lengths(pivots: Any) -> np.ndarray:
        if pivots is None or not has_queries.any():
            return np.zeros(first.shape, np.int64)
        return np.where(has_queries, pivots[at, 1], 0).astype(np.int64)

    return lengths(plan.pinned_pivots), lengths(plan.pivots)
