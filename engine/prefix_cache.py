"""The prefix cache of an engine: moves snapshots between state slots and a store, as the planner
orders (schedules/prefix_planner.py). docs/prefix.md says what the contracts promise.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.digest import layout_digest
from ..layouts.errors import BatchError
from ..layouts.slots import SlotLayout
from ..rawkernels.memory import Memory
from ..schedules.prefix_index import Entry, LayerKind, PrefixIndex
from ..schedules.prefix_keys import root_key
from ..schedules.prefix_planner import RINGS, PlannerCounters, PrefixPlanner
from ..schedules.prefix_rules import resume_rule
from .snapshot_copies import SnapshotCopies, SnapshotLoads, snapshot_buffer_bytes
from .store import Store, open_store
from .store_seal import head_bytes

KEY_PREFIX = b"ringslab/prefix/"


def snapshot_bytes(layout: SlotLayout, contract: str) -> int:
    """Bytes of a snapshot, from the start of a slot on: the stored rings, or all rings under
    `full`. Compression state, last in a slot, is never part of it."""
    if contract != "full":
        return layout.stored_bytes
    rings = [ring for ring in layout.rings if ring.kind != "compression"]
    return max(ring.offset + ring.bytes for ring in rings)


def prefix_buffer_bytes(cfg: Config) -> int:
    """Device bytes that a prefix cache takes on a GPU beside the slab."""
    return snapshot_buffer_bytes(snapshot_bytes(cfg.slot_layout, cfg.prefix.contract))


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
        config = cfg.prefix
        self.config, self.layout, self.memory = config, cfg.slot_layout, memory
        self.num_bytes = snapshot_bytes(cfg.slot_layout, config.contract)
        # A Redis server is shared and evicts by its own rules; the others hold what we put there.
        self._shared = not config.store.startswith(("memory:", "lmdb:"))
        self.store: Store = open_store(
            config.store,
            layout=cfg,
            budget_bytes=None if self._shared else config.budget_bytes,
        )
        self.index = PrefixIndex((self._kind(),), config.budget_bytes)
        self._what = ("full" if config.contract == "full" else "stored", layout_digest(cfg))
        self.planner = PrefixPlanner(
            resume_rule(cfg, config.contract),
            self.index,
            block_size=config.block_size,
            interval=config.snapshot_blocks,
            root=b"",
            fetch=self._fetch,
            probe=None if config.store == "memory:" else self._probe,
        )
        self._sinks, self._words = b"", ()
        self.depend_on()
        self.counters = CacheCounters()
        self._copies = SnapshotCopies(memory, self.num_bytes) if on_gpu else None
        self._loads = SnapshotLoads(memory, self.num_bytes) if on_gpu else None
        self._writer = ThreadPoolExecutor(1, "ringslab-snapshots") if on_gpu else None
        self._pending: dict[bytes, Future] = {}

    def depend_on(self, *words: str) -> None:
        """States what the bytes of a snapshot depend on beside the configuration, the sinks and the
        tokens (weights, a run's seed): under other words nothing is found. No request may be
        live."""
        self._words = words
        self.planner.root = root_key(*self._what, self._sinks, *words)

    def check_idle(self, call: str, idle: bool) -> None:
        """Raises BatchError for what would change the meaning of snapshots under way."""
        if not idle:
            raise BatchError(f"{call}: requests are running; with a prefix cache do it before")

    def set_sinks(self, sinks: list[Any]) -> None:
        """The sinks of all layers (None where a layer has none), which the keys of the layers above
        depend on. No request may be live."""
        given = [self.memory.to_host(sink).tobytes() for sink in sinks if sink is not None]
        self._sinks = b"".join(given)
        self.depend_on(*self._words)

    def before_step(self, slab: Any) -> None:
        """Queues the copies into slots that begin in the batch to come."""
        for order in self.planner.take_restores():
            self._restore(slab, order.state_id, order.snapshot)

    def after_step(self, slab: Any, lacking: set[int]) -> None:
        """Queues what follows from the batch that was committed: copies over rings that a replay
        has rebuilt, and snapshots. `lacking`: state ids of which a layer misses records."""
        self.before_step(slab)
        for order in self.planner.take_snapshots():
            if order.state_id in lacking:
                self.counters.skipped += 1
            else:
                self._save(self._slot(slab, order.state_id), order.keys, order.blocks)
        self._settle()

    def flush(self) -> None:
        """Waits until every snapshot is with the store."""
        for future in list(self._pending.values()):
            future.result()
        self._settle()
        self.store.flush()

    def clear(self) -> None:
        """Forgets every snapshot. No request may be live."""
        self.flush()
        for entry in self.index.clear():
            self._delete(entry.key)

    def close(self) -> None:
        """Hands over what is on its way and closes the store."""
        if self._writer is not None:
            self._writer.shutdown()
        self.store.close()

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
            "store": {"url": self.config.store, **self.store.stats.as_dict()},
        }

    def reset_counters(self) -> None:
        """Counts from zero, for a run; what is cached stays."""
        self.planner.counters = PlannerCounters()
        self.counters = CacheCounters()

    def _kind(self) -> LayerKind:
        name = self._name(bytes(16))
        return LayerKind(RINGS, "boundary", len(name) + head_bytes(name) + self.num_bytes)

    def _name(self, key: bytes) -> bytes:
        return KEY_PREFIX + key

    def _slot(self, slab: Any, state_id: int) -> Any:
        begin = state_id * self.layout.slot_bytes
        return slab[begin : begin + self.num_bytes]

    def _restore(self, slab: Any, state_id: int, value: bytes) -> None:
        slot = self._slot(slab, state_id)
        if self._loads is None:
            self.memory.upload(slot, np.frombuffer(value, np.uint8))
        else:
            self._loads.load(slot, value)
        self.counters.restores += 1

    def _save(self, slot: Any, keys: Any, blocks: int) -> None:
        entry = Entry(RINGS, keys[blocks - 1])
        gone = self.index.insert(RINGS, keys, blocks)
        if entry not in gone:
            self.counters.snapshots += 1
            if self._copies is None:
                self._judge(entry.key, self.store.put(self._name(entry.key), slot))
            else:
                buffer = self._copies.take(slot)
                self._pending[entry.key] = self._writer.submit(self._write, buffer, entry.key)
        for other in gone:
            if other != entry and not self._shared:
                self._delete(other.key)

    def _write(self, buffer: int, key: bytes) -> bool:
        """On the writer's thread."""
        try:
            return self.store.put(self._name(key), self._copies.read(buffer))
        finally:
            self._copies.give_back(buffer)

    def _delete(self, key: bytes) -> None:
        if self._writer is None:
            self.store.delete(self._name(key))
        else:  # after its put
            self._writer.submit(self.store.delete, self._name(key))

    def _settle(self) -> None:
        """Forgets snapshots that the store did not take."""
        for key in [key for key, future in self._pending.items() if future.done()]:
            self._judge(key, self._pending.pop(key).result())

    def _judge(self, key: bytes, taken: bool) -> None:
        if not taken:
            self.counters.refused += 1
            self.index.drop(Entry(RINGS, key))

    def _fetch(self, key: bytes) -> bytes | None:
        pending = self._pending.get(key)
        if pending is not None:
            pending.result()
        value = self.store.get(self._name(key))
        return value if value is not None and len(value) == self.num_bytes else None

    def _probe(self, key: bytes) -> bool:
        return self.store.contains(self._name(key))
