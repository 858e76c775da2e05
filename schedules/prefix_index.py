"""Which prefixes are cached, for each kind of layer, under one byte budget.

Two kinds of layers keep two kinds of entries, and have two rules for a hit at a boundary (the end
of a block of tokens):

    "boundary"     rings: what a query past the boundary reads of them is the last window - 1
                   positions before it, so one entry at the boundary is all that is needed, and
                   entries at shorter prefixes are not
    "every_block"  layers that see all keys: an entry for each block from the first one on

A boundary can be used where every kind says so; the longest such boundary is the hit.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

HitRule = Literal["boundary", "every_block"]


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers that are cached together. entry_bytes: of one entry, as the budget counts
    it."""

    name: str
    rule: HitRule
    entry_bytes: int


class Entry(NamedTuple):
    """What is cached of one prefix for one kind."""

    kind: str
    key: bytes


@dataclass
class KindStats:
    """Of one kind. hit_blocks: blocks of the longest prefix that this kind alone could have given,
    added up over look-ups, so that one sees which kind cuts hits short."""

    lookups: int = 0
    hits: int = 0
    hit_blocks: int = 0
    inserted: int = 0
    evicted: int = 0
    dropped: int = 0
    entries: int = 0
    bytes: int = 0


@dataclass
class PrefixIndex:
    """kinds          kinds of layers, at least one
    budget_bytes   most bytes of all entries; None: no bound

    Keys are those of `prefix_keys`: `keys[k]` names the first k + 1 blocks of a sequence. Entries
    leave in the order of their last use, but never one that a longer cached prefix needs: an
    every_block entry goes after the entries of the block behind it and after the boundary entries
    at its own end.
    """

    kinds: tuple[LayerKind, ...]
    budget_bytes: int | None = None
    stats: dict[str, KindStats] = field(init=False)
    used_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        assert self.kinds
        self._entries: OrderedDict[Entry, tuple[Entry, ...]] = OrderedDict()  # with what each needs
        self._needed_by: dict[Entry, int] = {}  # entries that need it
        self.stats = {kind.name: KindStats() for kind in self.kinds}
        self._kind = {kind.name: kind for kind in self.kinds}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def reset_stats(self) -> None:
        """Counts from zero; entries and bytes are what there is."""
        self.stats = {
            name: KindStats(entries=stats.entries, bytes=stats.bytes)
            for name, stats in self.stats.items()
        }

    def boundaries(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Numbers of blocks whose prefix every kind has, the longest first."""
        most = min(self._unbroken(kind, keys) for kind in self.kinds)
        for blocks in range(most, 0, -1):
            if all(
                Entry(kind.name, keys[blocks - 1]) in self._entries
                for kind in self.kinds
                if kind.rule == "boundary"
            ):
                yield blocks

    def count_lookup(self, keys: Sequence[bytes]) -> None:
        """Counts one look-up in the statistics of each kind."""
        for kind in self.kinds:
            stats, blocks = self.stats[kind.name], self._unbroken(kind, keys)
            while kind.rule == "boundary" and blocks > 0:
                if Entry(kind.name, keys[blocks - 1]) in self._entries:
                    break
                blocks -= 1
            stats.lookups += 1
            stats.hits += blocks > 0
            stats.hit_blocks += blocks

    def use(self, keys: Sequence[bytes], blocks: int) -> None:
        """The prefix of so many blocks was used: its entries are the newest, shorter prefixes newer
        than longer ones."""
        for entry in self._entries_of(keys, blocks):
            if entry in self._entries:
                self._entries.move_to_end(entry)

    def insert(self, kind_name: str, keys: Sequence[bytes], blocks: int) -> list[Entry]:
        """Adds the entry of the prefix of so many blocks. Returns what was evicted for it; the new
        entry itself is among that where the budget cannot hold it, or where an every_block entry
        that it needs is not there (nobody could reach it)."""
        kind, entry = self._kind[kind_name], Entry(kind_name, keys[blocks - 1])
        if entry in self._entries:
            self.use(keys, blocks)
            return []
        needs = self._needs(kind, keys, blocks)
        too_large = self.budget_bytes is not None and kind.entry_bytes > self.budget_bytes
        if too_large or any(need not in self._entries for need in needs):
            return [entry]
        self._entries[entry] = needs
        for need in needs:
            self._needed_by[need] = self._needed_by.get(need, 0) + 1
        stats = self.stats[kind_name]
        stats.inserted += 1
        stats.entries += 1
        stats.bytes += kind.entry_bytes
        self.used_bytes += kind.entry_bytes
        self.use(keys, blocks)
        return self._shrink()

    def drop(self, entry: Entry) -> list[Entry]:
        """Forgets an entry that is gone from the store, and every entry that needs it; returns
        them all."""
        if entry not in self._entries:
            return []
        gone = [entry]
        for other in [e for e, needs in self._entries.items() if entry in needs]:
            gone += self.drop(other)
        self._remove(entry)
        self.stats[entry.kind].dropped += 1
        return gone

    def clear(self) -> list[Entry]:
        """Forgets everything; returns what it was."""
        gone = list(self._entries)
        self._entries.clear()
        self._needed_by.clear()
        self.used_bytes = 0
        for entry in gone:
            self.stats[entry.kind].dropped += 1
        for stats in self.stats.values():
            stats.entries = stats.bytes = 0
        return gone

    def _unbroken(self, kind: LayerKind, keys: Sequence[bytes]) -> int:
        """Blocks from the first one on that an every_block kind has; a boundary kind sets no
        limit of its own."""
        if kind.rule == "boundary":
            return len(keys)
        for blocks, key in enumerate(keys):
            if Entry(kind.name, key) not in self._entries:
                return blocks
        return len(keys)

    def _needs(self, kind: LayerKind, keys: Sequence[bytes], blocks: int) -> tuple[Entry, ...]:
        """Entries without which a new one could not be reached."""
        last = blocks - 1 if kind.rule == "every_block" else blocks
        return tuple(
            Entry(other.name, keys[last - 1])
            for other in self.kinds
            if other.rule == "every_block" and last > 0
            if kind.rule == "boundary" or other.name == kind.name
        )

    def _entries_of(self, keys: Sequence[bytes], blocks: int) -> Iterator[Entry]:
        """Entries that a hit at a boundary reads, in the order in which they may leave."""
        for kind in self.kinds:
            if kind.rule == "boundary":
                yield Entry(kind.name, keys[blocks - 1])
        for kind in self.kinds:
            if kind.rule == "every_block":
                yield from (Entry(kind.name, key) for key in reversed(keys[:blocks]))

    def _shrink(self) -> list[Entry]:
        gone: list[Entry] = []
        while self.budget_bytes is not None and self.used_bytes > self.budget_bytes:
            oldest = next(e for e in self._entries if not self._needed_by.get(e))
            self._remove(oldest)
            self.stats[oldest.kind].evicted += 1
            gone.append(oldest)
        return gone

    def _remove(self, entry: Entry) -> None:
        for need in self._entries.pop(entry):
            left = self._needed_by[need] - 1
            if left:
                self._needed_by[need] = left
            else:
                del self._needed_by[need]
        size = self._kind[entry.kind].entry_bytes
        stats = self.stats[entry.kind]
        stats.entries -= 1
        stats.bytes -= size
        self.used_bytes -= size
