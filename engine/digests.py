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
class _Half:
    """Sums of some steps, uint64: in the log on the device, then on their way to pinned memory.

    spans   of each step: (request, log start, log end, position) of its kept tokens
    event   recorded behind the copy; None while nothing is on its way
    """

    device: Any
    pinned: np.ndarray
    used: int = 0
    spans: list[np.ndarray] = field(default_factory=list)
    event: Any = None


@dataclass
class DigestLog:
    """Token sums on the device, and the sums of the requests they belong to.

    halves   of the log. One is written by steps while the other, which was full, is on its way to
             the host: the device never waits for its sums to be read
    sums     uint64 [num_requests]
    lengths  int64 [num_requests]    positions of each request that count
    counted  int64 [num_requests]    of these, the ones that are in its sum
    """

    memory: Memory
    halves: tuple[_Half, _Half]
    sums: np.ndarray
    lengths: np.ndarray
    counted: np.ndarray
    turn: int = 0

    def begin(self, num_tokens: int) -> Any:
        """Zeroed uint64 [num_tokens] on the device for the step to come."""
        half = self.halves[self.turn]
        if half.used + num_tokens > half.device.shape[0]:
            self._send(half)
            self.turn = 1 - self.turn
            half = self.halves[self.turn]
            self._collect(half)  # sent a half ago
        return half.device[half.used : half.used + num_tokens]

    def keep(self, batch: Batch, requests: np.ndarray, kept: np.ndarray) -> None:
        """Notes which tokens of the step count: the first kept[i] of sequence i, which is request
        requests[i]; those that counted before are skipped."""
        half = self.halves[self.turn]
        starts = (batch.seqlens_k - batch.seqlens_q).astype(np.int64)
        ends = np.minimum(starts + kept, self.lengths[requests])
        # What a prefix hit computes again, to rebuild rings, is not the request's.
        first = np.maximum(np.maximum(starts, self.counted[requests]), batch.first_outputs)
        log = half.used + batch.cu_seqlens_q[:-1].astype(np.int64) - starts
        span = np.stack([requests, log + first, log + ends, first], axis=1)
        half.spans.append(span[ends > first])
        self.counted[requests] = np.maximum(self.counted[requests], ends)
        half.used += batch.num_tokens

    def flush(self) -> None:
        """Reads the waiting sums, adds them to their requests, and zeroes the log."""
        self._send(self.halves[self.turn])
        for half in self.halves:
            self._collect(half)

    def of(self, request: int) -> str:
        """Digest of one request, 16 hex digits. `flush` comes first."""
        return f"{int(self.sums[request]):016x}"

    def _send(self, half: _Half) -> None:
        """Queues the copy of a half to the host, and its zeroing."""
        if half.used:
            used = half.device[: half.used]
            self.memory.download(half.pinned[: half.used], used)
            half.event = self.memory.record(half.event)
            self.memory.zero(used)

    def _collect(self, half: _Half) -> None:
        """Adds up a half that was sent, once it is there."""
        if not half.used:
            return
        self.memory.wait(half.event)
        sums = half.pinned
        request, start, end, position = np.concatenate(half.spans).T
        owner = np.full(half.used, -1, np.int64)  # first position minus log index, per token
        lengths = end - start
        tokens = np.repeat(start - np.cumsum(lengths) + lengths, lengths)
        tokens += np.arange(len(tokens))
        owner[tokens] = np.repeat(position - start, lengths) + tokens
        with np.errstate(over="ignore"):
            words = owner[tokens].astype(np.uint64) * GOLDEN64
        mixed = splitmix64(sums[tokens] ^ words)
        np.add.at(self.sums, np.repeat(request, lengths), mixed)
        half.used, half.spans = 0, []


def open_digests(device: Any, lengths: list[int], memory: Memory) -> DigestLog:
    """A log in uint64 [n] on the device, of which a step may take half, for requests of which so
    many positions count."""
    memory.zero(device)
    size = device.shape[0] // 2  # rounded down
    halves = tuple(
        _Half(device[start : start + size], memory.pinned((size,), np.uint64))
        for start in (0, size)
    )
    return DigestLog(
        memory,
        halves,
        np.zeros(len(lengths), np.uint64),
        np.array(lengths, np.int64),
        np.zeros(len(lengths), np.int64),
    )


def combine(digests: dict[str, str]) -> str:
    """One digest of all requests, 32 hex digits, whatever the order in which they ended."""
    mixed = hashlib.blake2b(digest_size=16)
    for request_id in sorted(digests):
        mixed.update(f"{request_id}\0{digests[request_id]}\n".encode())
    return mixed.hexdigest()
