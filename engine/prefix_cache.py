"""The prefix cache of an engine: moves snapshots between state slots and a store, as the planner
orders (schedules/prefix_planner.py). docs/prefix.md says what the contracts promise.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.digest import layout_digest
from ..layouts.errors import ArgumentError, BatchError
from ..layouts.sizes import div_exact
from ..layouts.slots import SlotLayout
from ..layouts.store_url import store_kind
from ..rawkernels.memory import Memory
from ..schedules.batch import HostBatch
from ..schedules.prefix_index import Entry, LayerKind, PrefixIndex
from ..schedules.prefix_keys import root_key
from ..schedules.prefix_orders import PAGES, RINGS, PlannerCounters, SnapshotOrder
from ..schedules.prefix_planner import PrefixPlanner
from ..schedules.prefix_rules import resume_rule
from .prefix_values import PrefixValues, entry_bytes
from .snapshot_copies import snapshot_buffer_bytes
from .snapshot_stage import stage_bytes, take_stage
from .store import Store, open_store


def snapshot_bytes(layout: SlotLayout, contract: str) -> int:
    """Bytes of a snapshot, from the start of a slot on: the stored rings, or all rings under
    `full`. Compression state, last in a slot, is never part of it."""
    if contract != "full":
        return layout.stored_bytes
    rings = [ring for ring in layout.rings if ring.kind != "compression"]
    return max(ring.offset + ring.bytes for ring in rings)


def value_sizes(cfg: Config) -> dict[str, int]:
    """Bytes of a value of each kind of layers: rings, and where layers see all keys the pages of
    one block."""
    sizes = {RINGS: snapshot_bytes(cfg.slot_layout, cfg.prefix.contract)}
    if cfg.paged_layout is not None:
        sizes[PAGES] = _pages_of_block(cfg) * cfg.paged_layout.block_bytes
    return sizes


def prefix_buffer_bytes(cfg: Config) -> int:
    """Device bytes that a prefix cache takes on a GPU beside the slab."""
    sizes = value_sizes(cfg)
    return stage_bytes(cfg, sizes[RINGS]) + sum(map(snapshot_buffer_bytes, sizes.values()))


def _pages_of_block(cfg: Config) -> int:
    return div_exact(cfg.prefix.block_size, cfg.paged_layout.block_size)


@dataclass
class CacheCounters:
    """snapshots, restores    copied out of, into a slot
    skipped                snapshots that a layer left out of a batch made worthless
    refused                snapshots that the store did not take
    """

    snapshots: int = 0
    restores: int = 0
    skipped: int = 0
    refused: int = 0


def open_prefix(
    cfg: Config, memory: Memory, backend: str
) -> "tuple[PrefixCache | None, PrefixPlanner | None]":
    """The prefix cache that a configuration asks for and what the scheduler asks of it; both None
    where there is none. Raises as `PrefixCache` does."""
    if cfg.prefix is None:
        return None, None
    cache = PrefixCache(cfg, memory, on_gpu=backend == "cuda")
    return cache, cache.planner


class PrefixCache:
    """Snapshots of one engine. Used by the thread that queues its steps, within its memory's scope.

    Raises StoreError where the store cannot be opened, DeviceMemoryError where the copies' buffers
    do not fit.
    """

    def __init__(self, cfg: Config, memory: Memory, *, on_gpu: bool) -> None:
        config, sizes = cfg.prefix, value_sizes(cfg)
        self.config, self.layout, self.memory = config, cfg.slot_layout, memory
        self.paged = cfg.paged_layout
        self._block_pages = 0 if self.paged is None else _pages_of_block(cfg)
        self.num_bytes = sizes[RINGS]
        # A Redis server is shared and evicts by its own rules; the others hold what we put there.
        kind = store_kind(config.store)
        self._shared = kind == "redis"
        bounded = kind == "lmdb"  # it may hold what other processes put
        self.store: Store = open_store(
            config.store, layout=cfg, budget_bytes=config.budget_bytes if bounded else None
        )
        self.values = PrefixValues(self.store, memory, sizes, on_gpu=on_gpu)
        self.stage = take_stage(cfg, self.num_bytes, memory)
        rules = {PAGES: "every_block", RINGS: "boundary"}
        kinds = tuple(
            LayerKind(kind, rules[kind], entry_bytes(kind, sizes[kind]))
            for kind in rules
            if kind in sizes
        )
        self.index = PrefixIndex(kinds, config.budget_bytes)
        self._what = ("full" if config.contract == "full" else "stored", layout_digest(cfg))
        self.planner = PrefixPlanner(
            resume_rule(cfg, config.contract),
            self.index,
            block_size=config.block_size,
            interval=config.snapshot_blocks,
            root=b"",
            fetch=self._fetch,
            probe=None if config.store == "memory:" else self._probe,
            stage=None if self.stage is None else self.stage.room,
        )
        self._sinks, self._scope = b"", ()
        self.words: tuple[str, ...] = ()  # of depend_on
        self.depend_on()
        self.reset_counters()

    def depend_on(self, *words: str) -> None:
        """States what the bytes of a snapshot depend on beside the configuration, the sinks and the
        tokens (weights, a run's seed): under other words nothing is found. Raises BatchError while
        requests run, ArgumentError for what is no text."""
        self.check_idle("depend_on", self.planner.idle)
        for word in words:
            if not isinstance(word, str):
                raise ArgumentError(f"depend_on: {word!r} is {type(word).__name__}, but give text")
        self.planner.root = root_key(*self._what, self._sinks, *self._scope, *words)
        self.words = words

    def set_aside(self) -> None:
        """From here on nothing is found that was stored before, by this engine or by another one
        that shares the store: for comparisons. Raises BatchError while requests run."""
        self.check_idle("set_aside", self.planner.idle)
        self.clear()
        self._scope = (os.urandom(16),)
        self.depend_on(*self.words)

    def check_idle(self, call: str, idle: bool) -> None:
        """Raises BatchError for what would change the meaning of snapshots under way."""
        if not idle:
            raise BatchError(f"{call}: requests are running; with a prefix cache do it before")

    def set_sinks(self, sinks: list[Any]) -> None:
        """The sinks of all layers (None where a layer has none), which the keys of the layers above
        depend on. No request may be live."""
        given = [self.memory.to_host(sink).tobytes() for sink in sinks if sink is not None]
        self._sinks = b"".join(given)
        self.depend_on(*self.words)

    def staged_places(self, host: HostBatch) -> np.ndarray | None:
        """Of a batch about to be computed: the place of the stage that takes each token's record as
        well, int32 [T], -1 for none; None where the batch passes no boundary that is due."""
        staged = self.planner.staged
        return self.stage.places_of(host, staged) if staged else None

    def before_step(self, tools: Any) -> None:
        """Queues the copies into slots (and pages) that begin in the batch to come. `tools`: the
        engine's `StepTools`. One that fails is made again before the next batch, unless its request
        has lost the slot."""
        while self.planner.restores:
            order = self.planner.restores[0]
            rings, pages = order.snapshot
            self.values.load(RINGS, rings, self._slot(tools.slab, order.state_id))
            for block, value in enumerate(pages):
                self.values.load(PAGES, value, self._pages(tools, order.table, block))
            del self.planner.restores[0]
            self.counters.restores += 1

    def after_step(self, tools: Any, lacking: set[int]) -> None:
        """Queues what follows from the batch that was committed: copies over rings that a replay
        has rebuilt, and snapshots. `lacking`: state ids of which a layer misses records."""
        orders = self.planner.take_snapshots()  # now or never: slots move on, whatever fails here
        self.before_step(tools)
        for order in orders:
            if order.state_id in lacking:
                self.counters.skipped += 1
                continue
            for block in range(order.blocks if self.paged is not None else 0):
                pages = partial(self._pages, tools, order.table, block)
                self._save(PAGES, order.keys, block + 1, pages)
            self._save(RINGS, order.keys, order.blocks, partial(self._rings, tools, order))
        self._settle()

    def flush(self) -> None:
        """Waits until every snapshot is with the store."""
        self.values.flush()
        self._settle()

    def clear(self) -> None:
        """Forgets every snapshot. No request may be live."""
        self.flush()
        for entry in self.index.clear():
            self.values.delete(entry)

    def close(self) -> None:
        """Hands over what is on its way and closes the store."""
        self.values.close()

    def as_report(self) -> dict[str, Any]:
        """What the cache did, for a run's report."""
        return {
            "contract": self.config.contract,
            "block_size": self.config.block_size,
            "snapshot_blocks": self.config.snapshot_blocks,
            "snapshot_bytes": self.num_bytes,
            **asdict(self.planner.counters),
            **asdict(self.counters),
            "kinds": {name: asdict(stats) for name, stats in self.index.stats.items()},
            "store": {"url": self.config.store} | self._store_counts(),
        }

    def reset_counters(self) -> None:
        """Counts from zero, for a run; what is cached stays."""
        self.planner.counters = PlannerCounters()
        self.counters = CacheCounters()
        self.index.reset_stats()
        self._counted = self.store.stats.as_dict()

    def _store_counts(self) -> dict[str, int]:
        return {name: n - self._counted[name] for name, n in self.store.stats.as_dict().items()}

    def _rings(self, tools: Any, order: SnapshotOrder) -> list[Any]:
        if order.place is None:
            return self._slot(tools.slab, order.state_id)
        return self._slot(self.stage.slab, order.place)

    def _slot(self, slab: Any, state_id: int) -> list[Any]:
        """The bytes of a state slot, or of a place of the stage, that are stored, uint8
        [num_bytes]."""
        begin = state_id * self.layout.slot_bytes
        return [slab[begin : begin + self.num_bytes]]

    def _pages(self, tools: Any, table: np.ndarray, block: int) -> list[Any]:
        """The pages that hold a block of a prefix, uint8 [block_bytes] each."""
        size, pool = self.paged.block_bytes, tools.paged.pool
        pages = table[block * self._block_pages : (block + 1) * self._block_pages].tolist()
        return [pool[page * size : (page + 1) * size] for page in pages]

    def _save(self, kind: str, keys: Any, blocks: int, get_parts: Callable[[], list]) -> None:
        entry = Entry(kind, keys[blocks - 1])
        if entry in self.index:
            return
        gone = self.index.insert(kind, keys, blocks)
        try:
            self._forget(other for other in gone if other != entry)
            if entry in gone:
                return
            self.values.put(entry, get_parts())
        except BaseException:
            self._forget(self.index.drop(entry))
            raise
        self.counters.snapshots += kind == RINGS

    def _forget(self, entries: Iterable[Entry]) -> None:
        """Removes from the store what the index let go."""
        if not self._shared:
            for entry in entries:
                self.values.delete(entry)

    def _settle(self) -> None:
        """Forgets what the store did not take."""
        for entry in self.values.take_refused():
            self.counters.refused += 1
            self._forget(self.index.drop(entry))

    def _fetch(self, keys: Sequence[bytes], blocks: int) -> tuple[bytes, list[bytes]] | None:
        """Rings and pages of a prefix; None where one is gone, which the index forgets then."""
        entries = [Entry(PAGES, key) for key in keys[:blocks] if self.paged is not None]
        found = []
        for entry in (*entries, Entry(RINGS, keys[blocks - 1])):
            value = self.values.get(entry)
            if value is None:
                self._forget(self.index.drop(entry))
                return None
            found.append(value)
        return found[-1], found[:-1]

    def _probe(self, keys: Sequence[bytes], blocks: int) -> bool:
        entries = [(PAGES, block) for block in range(1, blocks + 1) if self.paged is not None]
        entries.append((RINGS, blocks))
        if not all(self.values.contains(Entry(kind, keys[n - 1])) for kind, n in entries[::-1]):
            return False
        for kind, n in entries:
            self._forget(self.index.insert(kind, keys, n))
        return True
