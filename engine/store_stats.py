"""What a store counts, and the fault that a shelf raises for the store to count."""

import threading
import warnings
from dataclasses import dataclass, field, fields


class ShelfFault(Exception):
    """A shelf could not do what was asked: full, unreachable, damaged. Counted, never passed on."""


@dataclass
class StoreStats:
    """Counts since the store was opened; any thread may read them.

    hits, misses  of `get`; together all of them
    corrupt       values whose seal did not hold, each a miss and removed
    errors        calls that the disk or the server failed; a `get` among them is a miss
    puts          values stored
    refused       values above the budget or above what the store can hold
    dropped       values that a writer thread had no room for in time, or lost at its end
    evicted       values removed to stay within the budget
    bytes_in      bytes of the values put, without their seals
    bytes_out     bytes of the values that hits returned
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    errors: int = 0
    puts: int = 0
    refused: int = 0
    dropped: int = 0
    evicted: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """Adds to counters, all at once."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """All counters at one moment."""
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "_lock"}


class Outage:
    """One warning for a run of faults: from the first one until something works again."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self._warned = False

    def fault(self, reason: str) -> ShelfFault:
        """The fault to raise; warns where the one before it is over."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.shown}: {reason}; the store gives misses until this is over",
                RuntimeWarning,
                stacklevel=2,
            )
        return ShelfFault(f"{self.shown}: {reason}")

    def over(self) -> None:
        self._warned = False
