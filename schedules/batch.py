"""What passes between the scheduler, the engine and its caller: requests and batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ..layouts.plans import DecodePlan, PrefillPlan
from ..rawkernels.plan_checks import DecodeMode

BatchKind = Literal["prefill", "decode"]


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how many tokens to generate after it.

    id: not empty, and not the id of a request that is still running. prompt: int32 [n], n >= 1,
    tokens >= 0. max_new_tokens: at least 0; with 0 the prompt is computed and no token comes out.
    arrival_s: seconds from the start of a trace; the scheduler itself does not look at it.
    hash_ids: names of the prompt's blocks where a trace has them, each standing for its block and
    all before it; a prefix cache then uses them in place of hashes of the tokens.
    Checked by `submit`, which raises RequestError.
    """

    id: str
    prompt: Any
    max_new_tokens: int
    arrival_s: float = 0.0
    hash_ids: tuple[int, ...] = ()


class PlanKey(NamedTuple):
    """Which plan of a batch: the layers of one window, ring_len, mode and sink_tokens share it.

    A prefill batch has mode "causal" only.
    """

    window: int
    ring_len: int
    mode: DecodeMode = "causal"
    sink_tokens: int = 0


@dataclass(frozen=True, eq=False)
class _Batch:
    """What HostBatch and Batch share. A base class, because two lists of these fields, and a third
    to copy one to the other, drift apart."""

    step: int
    kind: BatchKind
    request_ids: tuple[str, ...]
    slots: np.ndarray
    state_ids: np.ndarray
    cu_seqlens_q: np.ndarray
    seqlens_k: np.ndarray
    is_last_chunk: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    token_state_ids: np.ndarray
    num_drafts: np.ndarray
    start_positions: np.ndarray
    swa_valid_start: np.ndarray
    first_outputs: np.ndarray

    @property
    def num_seqs(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def seqlens_q(self) -> np.ndarray:
        """New tokens of each sequence, int32 [num_seqs]."""
        return np.diff(self.cu_seqlens_q)

    @property
    def is_first_chunk(self) -> np.ndarray:
        """Sequences that begin in this batch, bool [num_seqs], at position 0 or behind a cached
        prefix: they were just given their state slot (or are recomputed in it), so their state
        starts afresh."""
        return self.seqlens_k - self.seqlens_q == self.start_positions


@dataclass(frozen=True, eq=False)
class HostBatch(_Batch):
    """What the scheduler decided to run, in NumPy arrays; T tokens in num_seqs sequences.

    step             counts the batches, from 0
    request_ids      one a sequence
    slots            int32 [num_seqs]      rows of the sequence table
    state_ids        int32 [num_seqs]      state slots
    cu_seqlens_q     int32 [num_seqs + 1]  tokens of sequence i: cu_seqlens_q[i] .. [i + 1]
    seqlens_k        int32 [num_seqs]      tokens of each sequence after this batch
    is_last_chunk    bool  [num_seqs]      the sequence's known tokens end in this batch, so its
                                           last query gives a next token; always so in a decode
    token_ids        int32 [T]             decode: the last generated token, then the drafts
    positions        int32 [T]
    token_state_ids  int32 [T]             state slot of each token's sequence
    num_drafts       int32 [num_seqs]      0 in a prefill
    start_positions  int32 [num_seqs]      where computing began in the sequence's slot: 0, or its
                                           first position after a prefix hit
    swa_valid_start  int32 [num_seqs]      ring positions below it are missing
    first_outputs    int32 [num_seqs]      outputs of positions below it are not the sequence's:
                                           those are computed to rebuild rings after a hit
    block_tables     int32 [num_seqs, most blocks]  blocks of the paged pool that hold the first
                                           seqlens_k tokens of each sequence, then -1; None where
                                           nothing is paged
    """

    block_tables: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class BatchArrays:
    """A batch's arrays on the engine's device, as a caller's own kernels need them; int32. Three
    are there for models with global layers: the row of block_tables of each token's sequence (-1 is
    padding), bounds of each sequence's tokens 0 .. seqlen_k, and the tables. The last are
    there where a prefill passes snapshots: the place of the stage that takes each token's record as
    well, or -1."""

    token_ids: Any
    positions: Any
    token_state_ids: Any
    cu_seqlens_q: Any
    token_seq_ids: Any = None
    cu_seqlens_k: Any = None
    block_tables: Any = None
    staged_places: Any = None


@dataclass(frozen=True, eq=False)
class Batch(_Batch):
    """A `HostBatch` with its plans: what `Engine.next_batch` returns. Fields as in HostBatch."""

    plans: Mapping[PlanKey, DecodePlan | PrefillPlan]
    on_device: BatchArrays
    block_tables: np.ndarray | None = None


def with_plans(
    host: HostBatch,
    plans: Mapping[PlanKey, DecodePlan | PrefillPlan],
    on_device: BatchArrays,
) -> Batch:
    """The batch that an engine hands out; its arrays are the host batch's own."""
    return Batch(**vars(host), plans=plans, on_device=on_device)
