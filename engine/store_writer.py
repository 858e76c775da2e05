"""Puts that wait in memory while a thread writes them: a step is not held up by a disk."""

import os
import threading
import time
from collections import OrderedDict
from typing import Any

from ..layouts.errors import ArgumentError, StoreError
from ..layouts.sizes import is_count, is_real
from .store_seal import check_key, view_value
from .store_stats import StoreStats

BATCH_VALUES, BATCH_BYTES = 64, 16 << 20  # of one commit; the last value may go beyond
END_WAIT_S = 30.0  # of `close`, for what still waits


class WritingStore:
    """A store whose puts are written by a thread, in the order in which they came.

    `queue_bytes` bounds keys and values that wait; a put that finds no room waits up to `wait_s`
    seconds for it, and is then dropped (False, counted). The value is copied before put returns.
    What waits is seen by get and contains. True from put means taken over, not stored: `flush`
    tells what became of it.
    """

    def __init__(self, store: Any, queue_bytes: int, wait_s: float = 0.0) -> None:
        self.store, self.queue_bytes, self.wait_s = store, queue_bytes, wait_s
        self.closed = False
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self._writing: dict[bytes, bytes] = {}
        self._taken_bytes = 0  # of what waits, is being written, or is being copied
        self._lost = 0  # puts taken over and not stored, since the last flush
        self._mistake: Exception | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._write, name="ringslab store", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> StoreStats:
        return self.store.stats

    @property
    def layout(self) -> bytes:
        return self.store.layout

    @property
    def shelf(self) -> Any:
        return self.store.shelf

    def get(self, key: bytes) -> bytes | None:
        """As `Store.get`; what waits to be written is a hit."""
        self._check_open()
        value = self._unwritten(check_key(key))
        if value is None:
            return self.store.get(key)
        self.stats.add(hits=1, bytes_out=len(value))
        return value

    def contains(self, key: bytes) -> bool:
        """As `Store.contains`; what waits to be written is there."""
        self._check_open()
        return self._unwritten(check_key(key)) is not None or self.store.contains(key)

    def put(self, key: bytes, value: Any) -> bool:
        """Takes a copy of a value over, to be stored soon. False: there was no room for it within
        `wait_s` seconds (`stats.dropped`), or it can never be stored (`stats.refused`). Raises as
        `Store.put` does."""
        self._check_open()
        check_key(key)
        view = view_value(value)
        if not self.store.fits(key, view.nbytes):
            self.stats.add(refused=1)
            return False
        size = len(key) + view.nbytes
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(size), self.wait_s):
                self.stats.add(dropped=1)
                return False
            self._taken_bytes += size
        try:
            copy = bytes(view)
        except BaseException:
            with self._changed:
                self._release(size)
            raise
        with self._changed:
            if self._ending:  # closed by another thread meanwhile
                self._release(size)
                self.stats.add(dropped=1)
                return False
            old = self._waiting.pop(key, None)
            if old is not None:  # never written: this one comes in its place
                self._release(len(key) + len(old))
            self._waiting[key] = copy
            self._changed.notify_all()
        return True

    def delete(self, key: bytes) -> bool:
        """As `Store.delete`, of what waits and of what is stored. Waits for a put of this key that
        is being written."""
        self._check_open()
        check_key(key)
        with self._changed:
            waited = self._waiting.pop(key, None)
            if waited is not None:
                self._release(len(key) + len(waited))
            self._changed.wait_for(lambda: key not in self._writing)
        return self.store.delete(key) or waited is not None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing waits. True: every put taken over since the last flush is stored, or
        was replaced by a later one. False: some are not (`stats` says why), or the time is over.
        Raises StoreError where the thread met what no store should raise."""
        self._check_open()
        return self._flush(timeout_s)

    def close(self) -> None:
        """Writes what waits, for at most 30 s, then closes the store; the rest is dropped."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self.store._pid:
            return
        try:
            self._flush(END_WAIT_S)
        finally:
            with self._changed:
                self._ending = True
                self.stats.add(dropped=len(self._waiting))
                self._waiting.clear()
                self._changed.notify_all()
            self._thread.join(END_WAIT_S)
            if not self._thread.is_alive():  # else it still uses what would be freed
                self.store.close()

    def _flush(self, timeout_s: float | None) -> bool:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._changed.wait_for(self._is_idle, left):
                return False
            mistake, self._mistake = self._mistake, None
            lost, self._lost = self._lost, 0
        if mistake is not None:
            raise StoreError(f"the store's writer failed: {mistake!r}") from mistake
        return lost == 0

    def _is_idle(self) -> bool:
        return not self._waiting and not self._writing

    def _has_room(self, size: int) -> bool:
        return self._taken_bytes + size <= self.queue_bytes

    def _release(self, size: int) -> None:
        self._taken_bytes -= size
        self._changed.notify_all()

    def _unwritten(self, key: bytes) -> bytes | None:
        with self._changed:
            return self._waiting.get(key, self._writing.get(key))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                self._writing = self._take_batch()
            stored, mistake = [], None
            try:
                stored = self.store.put_many(list(self._writing.items()))
            except Exception as error:  # told by the next flush: nobody waits for this thread
                mistake = error
            with self._changed:
                batch, self._writing = self._writing, {}
                self._lost += len(batch) - sum(stored)
                self._mistake = mistake or self._mistake
                self._release(sum(len(key) + len(value) for key, value in batch.items()))

    def _take_batch(self) -> dict[bytes, bytes]:
        """The oldest puts that wait: one commit of LMDB syncs the disk once, for one or many."""
        batch, size = {}, 0
        while self._waiting and len(batch) < BATCH_VALUES and size < BATCH_BYTES:
            key, value = self._waiting.popitem(last=False)
            batch[key] = value
            size += len(value)
        return batch

    def _check_open(self) -> None:
        if self.closed:
            raise StoreError("the store is closed")
        self.store._check_open()

    def __enter__(self) -> "WritingStore":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_queue(queue_bytes: Any, wait_s: Any) -> None:
    """Raises ArgumentError for a queue of no bytes or a wait that is no time."""
    if not is_count(queue_bytes) or queue_bytes < 1:
        raise ArgumentError(f"queue_bytes={queue_bytes!r} but must be a positive integer")
    if not is_real(wait_s) or not 0.0 <= wait_s <= threading.TIMEOUT_MAX:
        raise ArgumentError(f"wait_s={wait_s!r} but must be seconds, 0 or more")
