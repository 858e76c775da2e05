"""Snapshots of state slots off the device and back, beside the steps.

Off the device a snapshot goes in two copies. The first, within the device and in the order of the
steps, takes about a microsecond: the step after it may overwrite the slot. The second crosses to a
pinned host buffer on a stream of its own, while that step runs. On the host there is one copy, the
store's.
"""

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory

# Snapshots on their way at once; the next one waits for the store to take one. The host is two
# steps ahead and a prefill may have 16, but a buffer of a model with long windows is large.
MAX_BUFFERS, MIN_BUFFERS, BUFFERS_BYTES = 32, 2, 1 << 27
LOAD_BUFFERS = 2


def snapshot_buffers(num_bytes: int) -> int:
    """Snapshots of `num_bytes` that can be on their way."""
    return max(MIN_BUFFERS, min(MAX_BUFFERS, BUFFERS_BYTES // num_bytes))  # rounded down


def snapshot_buffer_bytes(num_bytes: int) -> int:
    """Device bytes of the buffers of snapshots on their way."""
    return snapshot_buffers(num_bytes) * num_bytes


def placed(parts: Sequence[Any], num_bytes: int) -> list[tuple[int, Any]]:
    """Each part with its start."""
    starts = np.cumsum([0] + [part.nbytes for part in parts]).tolist()
    assert starts[-1] == num_bytes, f"{starts[-1]} bytes, not {num_bytes}"
    return list(zip(starts[:-1], parts, strict=True))


@dataclass
class SnapshotCopies:
    """num_bytes: of a snapshot. `take` from the thread that queues steps, `read` and `give_back`
    from any."""

    memory: Memory
    num_bytes: int
    device: Any = field(init=False)  # uint8 [snapshot_buffers(num_bytes), num_bytes]
    pinned: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        buffers = snapshot_buffers(self.num_bytes)
        shape = (buffers, self.num_bytes)
        self.device = self.memory.empty(shape, np.uint8)
        self.pinned = self.memory.pinned(shape, np.uint8)
        self._aside = self.memory.side_stream()
        self._taken: list[Any] = [None] * buffers  # events: the slot may change
        self._crossed: list[Any] = [None] * buffers  # events: the pinned bytes are whole
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for buffer in range(buffers):
            self._free.put(buffer)

    def take(self, parts: Sequence[Any]) -> int:
        """Queues the copy of uint8 parts, num_bytes in all, one after another, as they are after
        what was queued before; returns the buffer that they go to. Waits while all buffers are on
        their way."""
        buffer, memory = self._free.get(), self.memory
        try:
            for start, part in placed(parts, self.num_bytes):
                memory.copy(self.device[buffer, start : start + part.nbytes], part)
            self._taken[buffer] = memory.record(self._taken[buffer])
            with self._aside():
                memory.after(self._taken[buffer])
                memory.download(self.pinned[buffer], self.device[buffer])
                self._crossed[buffer] = memory.record(self._crossed[buffer])
        except BaseException:
            self._free.put(buffer)  # what was queued already, nobody reads
            raise
        return buffer

    @property
    def has_free(self) -> bool:
        """Whether `take` would not wait."""
        return not self._free.empty()

    def has_crossed(self, buffer: int) -> bool:
        """Whether `read` would not wait."""
        return self.memory.is_done(self._crossed[buffer])

    def read(self, buffer: int) -> np.ndarray:
        """The bytes of a buffer, once they are there; valid until it is given back."""
        self.memory.wait(self._crossed[buffer])
        return self.pinned[buffer]

    def give_back(self, buffer: int) -> None:
        self._free.put(buffer)


@dataclass
class SnapshotLoads:
    """Host bytes to the device in stream order, through pinned buffers in turn."""

    memory: Memory
    num_bytes: int
    turn: int = 0

    def __post_init__(self) -> None:
        self.pinned = self.memory.pinned((LOAD_BUFFERS, self.num_bytes), np.uint8)
        self._sent: list[Any] = [None] * LOAD_BUFFERS

    def load(self, parts: Sequence[Any], value: bytes) -> None:
        """Queues the copy of num_bytes to uint8 parts of the device, one after another; `value` may
        go at once."""
        buffer, self.turn = self.turn, (self.turn + 1) % LOAD_BUFFERS
        if self._sent[buffer] is not None:
            self.memory.wait(self._sent[buffer])
        self.pinned[buffer] = np.frombuffer(value, np.uint8)
        for start, part in placed(parts, self.num_bytes):
            self.memory.upload(part, self.pinned[buffer, start : start + part.nbytes])
        self._sent[buffer] = self.memory.record(self._sent[buffer])
