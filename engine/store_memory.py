"""A shelf in this process's memory, with a byte budget."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from .store_seal import Sealed
from .store_stats import StoreStats


class MemoryShelf:
    """Sealed values in a dict; the one not used for longest goes first (LRU)."""

    max_sealed_bytes = None

    def __init__(self, budget_bytes: int | None, stats: StoreStats) -> None:
        self.budget_bytes, self.stats = budget_bytes, stats
        self.used_bytes = 0
        self._values: OrderedDict[bytes, Sealed] = OrderedDict()
        self._lock = threading.Lock()

    def fetch(self, key: bytes) -> Sealed | None:
        with self._lock:
            sealed = self._values.get(key)
            if sealed is not None:
                self._values.move_to_end(key)
            return sealed

    def head(self, key: bytes, num_bytes: int) -> tuple[Sealed, int] | None:
        with self._lock:
            sealed = self._values.get(key)
        return None if sealed is None else (sealed[:num_bytes], len(sealed))

    def place(self, items: Sequence[tuple[bytes, Sealed]]) -> None:
        with self._lock:
            for key, sealed in items:
                self._drop(key)
                self._values[key] = sealed
                self.used_bytes += len(key) + len(sealed)
                while self.budget_bytes is not None and self.used_bytes > self.budget_bytes:
                    self._drop(next(iter(self._values)))
                    self.stats.add(evicted=1)

    def remove(self, key: bytes, seen: Sealed | None = None) -> bool:
        with self._lock:
            if seen is not None and self._values.get(key) != seen:
                return False
            return self._drop(key)

    def close(self) -> None:
        with self._lock:
            self._values.clear()
            self.used_bytes = 0

    def _drop(self, key: bytes) -> bool:
        sealed = self._values.pop(key, None)
        if sealed is None:
            return False
        self.used_bytes -= len(key) + len(sealed)
        return True
