"""Values of a prefix cache: bytes of state slots and of pages, between a device and a store."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory
from ..schedules.prefix_index import Entry
from .snapshot_copies import SnapshotCopies, SnapshotLoads, placed
from .store import Store
from .store_seal import head_bytes

KEY_PREFIX = b"ringslab/prefix/"
# A value is copied and summed at about 1 GB/s a thread, without the interpreter; snapshots of all
# rings at every block come at 2 GB/s.
WRITERS = 4


def value_name(entry: Entry) -> bytes:
    """The key of an entry's value in a store."""
    return KEY_PREFIX + entry.kind.encode() + b"/" + entry.key


def entry_bytes(kind: str, num_bytes: int) -> int:
    """What a value of a kind counts in a store: its key, its seal and itself."""
    name = value_name(Entry(kind, bytes(16)))
    return len(name) + head_bytes(name) + num_bytes


@dataclass
class _Crossing:
    """A value on its way to a buffer of the host; `entry` None: nobody wants it any more."""

    entry: Entry | None
    copies: SnapshotCopies
    buffer: int


class PrefixValues:
    """sizes: bytes of a value of each kind. On a GPU values cross to the host through
    `SnapshotCopies`. Those that are there are handed to threads, which put them into the store,
    what concerns one entry in the order of the calls: at the next call that looks, so that no
    thread waits for the device. On the host a value is stored at once."""

    def __init__(
        self, store: Store, memory: Memory, sizes: dict[str, int], *, on_gpu: bool
    ) -> None:
        self.store, self.memory, self.sizes = store, memory, sizes
        self._writers = ThreadPoolExecutor(WRITERS, "ringslab-snapshots") if on_gpu else None
        self._copies: dict[str, SnapshotCopies] = {}
        self._loads: dict[str, SnapshotLoads] = {}
        if on_gpu:
            self._copies = {kind: SnapshotCopies(memory, size) for kind, size in sizes.items()}
            self._loads = {kind: SnapshotLoads(memory, size) for kind, size in sizes.items()}
        self._crossing: deque[_Crossing] = deque()  # in the order of the device
        self._pending: dict[Entry, Future] = {}  # puts
        self._last: dict[Entry, Future] = {}  # the last put or delete of an entry
        self._deletes: list[Future] = []
        self._refused: list[Entry] = []

    def put(self, entry: Entry, parts: Sequence[Any]) -> None:
        """Queues the copy of a value, the parts (uint8, on the device) one after another, as they
        are after what was queued before. `take_refused` tells what became of it."""
        if entry in self._refused:
            self._refused.remove(entry)  # that was an earlier value
        if self._writers is None:
            value = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if not self.store.put(value_name(entry), value):
                self._refused.append(entry)
        else:
            copies = self._copies[entry.kind]
            self._hand_over()
            while self._must_hand_over(copies):
                self._hand_over_first()
            self._crossing.append(_Crossing(entry, copies, copies.take(parts)))

    def get(self, entry: Entry) -> bytes | None:
        """A value, waited for while it is on its way; None where it is gone or damaged."""
        while any(one.entry == entry for one in self._crossing):
            self._hand_over_first()
        pending = self._pending.pop(entry, None)
        if pending is not None:
            self._end_put(entry, pending)
        value = self.store.get(value_name(entry))
        return value if value is not None and len(value) == self.sizes[entry.kind] else None

    def load(self, kind: str, value: bytes, parts: Sequence[Any]) -> None:
        """Queues the copy of a value to parts of the device's memory."""
        if self._writers is not None:
            self._loads[kind].load(parts, value)
            return
        whole = np.frombuffer(value, np.uint8)
        for start, part in placed(parts, self.sizes[kind]):
            self.memory.upload(part, whole[start : start + part.nbytes])

    def contains(self, entry: Entry) -> bool:
        """Whether there is a value, after what was asked for the entry before."""
        if any(one.entry == entry for one in self._crossing):
            return True
        last = self._last.get(entry)
        if last is not None:
            wait([last])
        return self.store.contains(value_name(entry))

    def delete(self, entry: Entry) -> None:
        if self._writers is None:
            self.store.delete(value_name(entry))
        else:
            for one in self._crossing:
                if one.entry == entry:
                    one.entry = None
            self._deletes.append(self._submit(entry, self.store.delete, value_name(entry)))

    def take_refused(self) -> list[Entry]:
        """Values that the store did not take, of those whose put has ended."""
        self._hand_over()
        self._last = {entry: future for entry, future in self._last.items() if not future.done()}
        for entry in [entry for entry, future in self._pending.items() if future.done()]:
            self._end_put(entry, self._pending.pop(entry))
        self._end_deletes([one for one in self._deletes if one.done()])
        refused, self._refused = self._refused, []
        return refused

    def flush(self) -> None:
        """Waits until every value is with the store."""
        while self._crossing:
            self._hand_over_first()
        while self._pending:
            self._end_put(*self._pending.popitem())
        self._end_deletes(list(self._deletes))
        self.store.flush()

    def close(self) -> None:
        """Hands over what is on its way and closes the store, also where the device fails."""
        try:
            while self._crossing:
                self._hand_over_first()
        finally:
            if self._writers is not None:
                self._writers.shutdown()
            self.store.close()

    def _must_hand_over(self, copies: SnapshotCopies) -> bool:
        """Whether a buffer is free only once we hand one over: all are out, and none is with a
        thread, from where it comes back without us. (One may be with nobody, after a Ctrl-C.)"""
        if copies.has_free or not any(one.copies is copies for one in self._crossing):
            return False
        return not any(
            self._copies[entry.kind] is copies and not put.done()
            for entry, put in self._pending.items()
        )

    def _end_put(self, entry: Entry, put: Future) -> None:
        """Waits for a put that is not pending any more, and notes one that was refused. Raises what
        its thread met, once."""
        stored = False
        try:
            stored = put.result()
        finally:
            if not stored:
                self._refused.append(entry)

    def _end_deletes(self, deletes: list[Future]) -> None:
        """Waits for deletes. Raises what a thread met, once."""
        for one in deletes:
            self._deletes.remove(one)
            one.result()

    def _hand_over(self) -> None:
        """Hands the threads what has crossed."""
        while self._crossing and self._crossing[0].copies.has_crossed(self._crossing[0].buffer):
            self._hand_over_first()

    def _hand_over_first(self) -> None:
        """Hands over the value that is first on its way, once it is there."""
        one = self._crossing[0]
        value = one.copies.read(one.buffer)
        self._crossing.popleft()  # not where the wait failed: its buffer would be lost
        if one.entry is None:
            one.copies.give_back(one.buffer)
        else:
            self._pending[one.entry] = self._submit(one.entry, self._write, one, value)

    def _submit(self, entry: Entry, work: Callable[..., bool], *arguments: Any) -> Future:
        """Work of a thread, after what was submitted for the entry before: that one began earlier,
        as threads take work in order, so waiting for it ends."""
        before = self._last.get(entry)

        def run() -> bool:
            if before is not None:
                wait([before])
            return work(*arguments)

        self._last[entry] = future = self._writers.submit(run)
        return future

    def _write(self, one: _Crossing, value: np.ndarray) -> bool:
        """On a writer's thread."""
        try:
            return self.store.put(value_name(one.entry), value)
        finally:
            one.copies.give_back(one.buffer)
