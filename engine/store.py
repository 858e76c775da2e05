"""The external store: sealed values by key, in memory, in LMDB or on a Redis server.

A `Store` seals, checks and counts; where the sealed bytes lie is a shelf's matter. A store is a
cache: whatever is wrong with a value or with the place it lies in, `get` gives the value that was
put under this key for this layout, or None.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ..layouts.digest import DIGEST_BYTES, layout_digest
from ..layouts.errors import ArgumentError, StoreError
from ..layouts.sizes import is_count, is_real
from ..layouts.store_url import STORE_URLS, store_kind
from .store_lmdb import LmdbShelf
from .store_memory import MemoryShelf
from .store_redis import RedisShelf
from .store_seal import (
    Sealed,
    check_key,
    head_bytes,
    is_head,
    seal,
    sealed_bytes,
    unseal,
    view_value,
)
from .store_stats import ShelfFault, StoreStats
from .store_writer import WritingStore, check_queue


class Shelf(Protocol):
    """Where sealed values lie. Every method may raise ShelfFault; keys are 1 to 511 bytes.

    budget_bytes      bytes of keys and sealed values that are kept at most, or None
    max_sealed_bytes  the longest sealed value that can be placed, or None
    """

    budget_bytes: int | None
    max_sealed_bytes: int | None

    def fetch(self, key: bytes) -> Sealed | None:
        """All bytes under a key, which now counts as used."""

    def head(self, key: bytes, num_bytes: int) -> tuple[Sealed, int] | None:
        """The first bytes under a key, and how many there are in all."""

    def place(self, items: Sequence[tuple[bytes, Sealed]]) -> None:
        """Replaces what is under each key, in this order, each value wholly or not at all; durable
        when it returns. After a ShelfFault of several, some may be there."""

    def remove(self, key: bytes, seen: Sealed | None = None) -> bool:
        """Whether something was there and is removed; where `seen` is given, only if that is still
        what lies there (it may have been replaced meanwhile)."""

    def close(self) -> None: ...


class Store:
    """get, put, contains, delete, close; `stats` counts. Made by `open_store`; any thread may use
    it, and it is a context manager."""

    def __init__(self, shelf: Shelf, layout: bytes, stats: StoreStats) -> None:
        self.shelf, self.layout, self.stats = shelf, layout, stats
        self.closed = False
        self._pid = os.getpid()

    def get(self, key: bytes) -> bytes | None:
        """The value under a key, or None. A value that is damaged, or was put for another layout,
        is removed and counts as corrupt and as a miss. Raises ArgumentError for what is no key."""
        self._check_open()
        check_key(key)
        try:
            sealed = self.shelf.fetch(key)
        except ShelfFault:
            self.stats.add(misses=1, errors=1)
            return None
        if sealed is None:
            self.stats.add(misses=1)
            return None
        value = unseal(sealed, key, self.layout)
        if value is None:
            self.stats.add(misses=1, corrupt=1)
            self._remove(key, sealed)
            return None
        self.stats.add(hits=1, bytes_out=len(value))
        return value

    def put(self, key: bytes, value: Any) -> bool:
        """Stores a copy of a value (bytes, or a C-contiguous array) under a key, whole or not at
        all. True: it is stored, and stays through a kill of this process. False: it is not (too
        large, disk full, server away), counted in `stats`; a value from before may still be there.
        Raises ArgumentError for what is no key or no buffer."""
        self._check_open()
        check_key(key)
        view = view_value(value)
        if not self.fits(key, view.nbytes):
            self.stats.add(refused=1)
            return False
        return self.put_many([(key, view)])[0]

    def put_many(self, items: Sequence[tuple[bytes, Any]]) -> list[bool]:
        """As one `put` after the other, which of them are stored; LMDB syncs once for all. The
        keys and values are checked and small enough (`fits`)."""
        views = [(key, view_value(value)) for key, value in items]
        sealed = [(key, seal(key, view, self.layout)) for key, view in views]
        if len(sealed) > 1:
            try:
                self.shelf.place(sealed)
                self.stats.add(puts=len(views), bytes_in=sum(view.nbytes for _, view in views))
                return [True] * len(views)
            except ShelfFault:  # perhaps of one of them, or of all together: one by one then
                pass
        return [
            self._put_one(item, view.nbytes) for item, (_, view) in zip(sealed, views, strict=True)
        ]

    def fits(self, key: bytes, value_bytes: int) -> bool:
        """Whether a value of that size can be stored at all."""
        size = sealed_bytes(key, value_bytes)
        budget, longest = self.shelf.budget_bytes, self.shelf.max_sealed_bytes
        return (budget is None or size + len(key) <= budget) and (
            longest is None or size <= longest
        )

    def _put_one(self, item: tuple[bytes, Sealed], value_bytes: int) -> bool:
        try:
            self.shelf.place([item])
        except ShelfFault:
            self.stats.add(errors=1)
            return False
        self.stats.add(puts=1, bytes_in=value_bytes)
        return True

    def contains(self, key: bytes) -> bool:
        """Whether a value lies under a key, by its header: the checksum is not computed, so a `get`
        may yet find damage. Counts nothing but errors."""
        self._check_open()
        check_key(key)
        try:
            found = self.shelf.head(key, head_bytes(key))
        except ShelfFault:
            self.stats.add(errors=1)
            return False
        return found is not None and is_head(found[0], found[1], key, self.layout)

    def delete(self, key: bytes) -> bool:
        """Removes what is under a key; whether there was something."""
        self._check_open()
        return self._remove(check_key(key), None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """True: nothing waits in a store without a writer thread."""
        self._check_open()
        return True

    def close(self) -> None:
        """Frees what the store holds; a second call does nothing, any other is a StoreError."""
        if not self.closed:
            self.closed = True
            if os.getpid() == self._pid:  # a forked child must not end what its parent uses
                self.shelf.close()

    def _remove(self, key: bytes, seen: Sealed | None) -> bool:
        try:
            return self.shelf.remove(key, seen)
        except ShelfFault:
            self.stats.add(errors=1)
            return False

    def _check_open(self) -> None:
        if self.closed:
            raise StoreError("the store is closed")
        if os.getpid() != self._pid:
            raise StoreError(
                "the store was opened before a fork: neither LMDB nor a connection can be shared "
                "with a child; start processes by spawn and open a store in each"
            )

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_store(
    url: str,
    *,
    layout: Any = None,
    budget_bytes: int | None = None,
    sync: bool = True,
    timeout_s: float = 2.0,
    queue_bytes: int | None = None,
    wait_s: float = 0.0,
) -> Store | WritingStore:
    """A store at `memory:`, `lmdb:PATH` or `redis://HOST:PORT/DB`.

    layout        whose bytes the values are: a Config, a SlotLayout, or the 16 bytes of
                  `layout_digest`; None for bytes of no layout. Values of another are never read
    budget_bytes  bytes of keys and sealed values kept, least recently used out first; None: no
                  bound. A Redis server has its own (`maxmemory`), so it takes none here
    sync          LMDB: a put waits for the disk, and survives a power cut. Without, it survives
                  the end of this process, and a power cut may cost the whole directory
    timeout_s     Redis: seconds to connect, and for each read or write
    queue_bytes   puts are taken over by a thread that writes them, and at most so many bytes of
                  keys and values wait; None: put itself writes
    wait_s        seconds that a put then waits for room before it is dropped

    Raises ArgumentError for another address or option, StoreError where the store cannot be opened.
    """
    if not isinstance(url, str) or "\0" in url:
        raise ArgumentError(f"url={url!r} but must be a string")
    digest = _digest_of(layout)
    budget = _check_budget(budget_bytes)
    if not is_real(timeout_s) or not 0 < timeout_s < math.inf:
        raise ArgumentError(f"timeout_s={timeout_s!r} but must be a positive number of seconds")
    if queue_bytes is not None:
        check_queue(queue_bytes, wait_s)
    stats = StoreStats()
    kind = store_kind(url)
    shelf: Shelf
    if kind == "memory":
        shelf = MemoryShelf(budget, stats)
    elif kind == "lmdb":
        shelf = LmdbShelf(url.removeprefix("lmdb:"), budget, stats, sync=bool(sync))
    elif kind == "redis":
        if budget is not None:
            raise ArgumentError("budget_bytes: a Redis server has its own bound, set maxmemory")
        shelf = RedisShelf(url, stats, timeout_s=float(timeout_s))
    else:
        raise ArgumentError(f"url={url!r} but must be {STORE_URLS}")
    store = Store(shelf, digest, stats)
    return store if queue_bytes is None else WritingStore(store, int(queue_bytes), float(wait_s))


def _digest_of(layout: Any) -> bytes:
    if layout is None:
        return bytes(DIGEST_BYTES)
    if isinstance(layout, bytes):
        if len(layout) != DIGEST_BYTES:
            raise ArgumentError(f"layout has {len(layout)} bytes but a digest has {DIGEST_BYTES}")
        return layout
    try:
        return layout_digest(layout)
    except TypeError as error:
        raise ArgumentError(f"layout: {error}; give a Config, a SlotLayout or a digest") from None


def _check_budget(budget_bytes: Any) -> int | None:
    if budget_bytes is None:
        return None
    if not is_count(budget_bytes) or budget_bytes < 1:
        raise ArgumentError(f"budget_bytes={budget_bytes!r} but must be a positive integer")
    return int(budget_bytes)
