"""One digest of a run: over every accepted token's outputs of the model's own layers.

`digest_outputs` adds up a 64-bit sum for each token on the device. The sums of many steps wait
there and are read together, so that a step needs no wait; on the host each is mixed with its
position and added to its request. Draft layers are left out: what they give depends on which drafts
a step held. A token that is computed again (after a preemption) counts once.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory
from ..rawkernels.reference.activation_hash import GOLDEN64, splitmix64
from ..schedules.batch import Batch


@dataclass
class DigestLog:
    """Token sums on the device, and the sums of the requests they belong to.

    device   uint64 [capacity]; the first `used` of them hold steps that were not read yet
    sums     uint64 [num_requests]
    lengths  int64 [num_requests]    positions of each request that count
    counted  int64 [num_requests]    of these, the ones that are in its sum
    spans    of each unread step: (request, log start, log end, position) of its kept tokens
    """

    memory: Memory
    device: Any
    sums: np.ndarray
    lengths: np.ndarray
    counted: np.ndarray
    used: int = 0
    spans: list[np.ndarray] = field(default_factory=list)

    def begin(self, num_tokens: int) -> Any:
        """Zeroed uint64 [num_tokens] on the device for the step to come."""
        if self.used + num_tokens > self.device.shape[0]:
            self.flush()
        return self.device[self.used : self.used + num_tokens]

    def keep(self, batch: Batch, requests: np.ndarray, kept: np.ndarray) -> None:
        """Notes which tokens of the step count: the first kept[i] of sequence i, which is request
        requests[i]; those that counted before are skipped."""
        starts = (batch.seqlens_k - batch.seqlens_q).astype(np.int64)
        ends = np.minimum(starts + kept, self.lengths[requests])
        # What a prefix hit computes again, to rebuild rings, is not the request's.
        first = np.maximum(np.maximum(starts, self.counted[requests]), batch.first_outputs)
        log = self.used + batch.cu_seqlens_q[:-1].astype(np.int64) - starts
        span = np.stack([requests, log + first, log + ends, first], axis=1)
        self.spans.append(span[ends > first])
        self.counted[requests] = np.maximum(self.counted[requests], ends)
        self.used += batch.num_tokens

    def flush(self) -> None:
        """Reads the waiting sums, adds them to their requests, and zeroes the log."""
        if self.used:
            sums = self.memory.to_host(self.device[: self.used])
            request, start, end, position = np.concatenate(self.spans).T
            owner = np.full(self.used, -1, np.int64)  # first position minus log index, per token
            lengths = end - start
            tokens = np.repeat(start - np.cumsum(lengths) + lengths, lengths)
            tokens += np.arange(len(tokens))
            owner[tokens] = np.repeat(position - start, lengths) + tokens
            with np.errstate(over="ignore"):
                words = owner[tokens].astype(np.uint64) * GOLDEN64
            mixed = splitmix64(sums[tokens] ^ words)
            np.add.at(self.sums, np.repeat(request, lengths), mixed)
        self.device.fill(0)
        self.used, self.spans = 0, []

    def of(self, request: int) -> str:
        """Digest of one request, 16 hex digits. `flush` comes first."""
        return f"{int(self.sums[request]):016x}"


def open_digests(device: Any, lengths: list[int], memory: Memory) -> DigestLog:
    """A log for requests of which so many positions count."""
    log = DigestLog(
        memory,
        device,
        np.zeros(len(lengths), np.uint64),
        np.array(lengths, np.int64),
        np.zeros(len(lengths), np.int64),
    )
    log.flush()
    return log


def combine(digests: dict[str, str]) -> str:
    """One digest of all requests, 32 hex digits, whatever the order in which they ended."""
    mixed = hashlib.blake2b(digest_size=16)
    for request_id in sorted(digests):
        mixed.update(f"{request_id}\0{digests[request_id]}\n".encode())
    return mixed.hexdigest()
