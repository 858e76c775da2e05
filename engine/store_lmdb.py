"""A shelf on disk: LMDB, the default where values outlive the process.

One writer at a time and readers that never wait, over all processes of a machine; a commit is
whole or not there. Four tables change together in one transaction:

    values  key -> sealed value
    index   key -> (turn, bytes), little-endian u64 each
    order   turn, big-endian u64 -> key: the smallest turn was used longest ago
    totals  b"used" -> bytes of all keys and sealed values, little-endian u64
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from ..layouts.errors import StoreError
from .store_directory import private_directory, sync_directory
from .store_gate import Gate
from .store_order import UseOrder
from .store_seal import Sealed
from .store_stats import Outage, ShelfFault, StoreStats

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
TABLES = ("values", "index", "order", "totals")
# Of the binding: 1 opens a directory twice in one process, which breaks LMDB's locks; 2.0 holds the
# interpreter while it waits for another process; 2.2 fails once the map has grown.
MIN_LMDB_MAJOR = 3
START_MAP_BYTES = 1 << 30  # address space, not disk: the file grows as it is written
MAX_MAP_BYTES = 1 << 46
MAX_SEALED_BYTES = 1 << 31  # LMDB's own bound is 4 GiB
MAX_READERS = 512  # read transactions at once, over all processes
MAX_TOUCHED = 1 << 16  # keys whose use is remembered until the next put
TRIES = 64  # of one transaction, each after a growth of the map or the clearing of dead readers

Result = TypeVar("Result")


class LmdbShelf:
    """Sealed values in an LMDB environment of this user alone."""

    max_sealed_bytes = MAX_SEALED_BYTES

    def __init__(
        self,
        path: str,
        budget_bytes: int | None,
        stats: StoreStats,
        *,
        sync: bool = True,
        map_bytes: int = START_MAP_BYTES,
    ) -> None:
        try:
            import lmdb
        except ImportError as error:
            raise StoreError(f"lmdb:{path}: {error}; pip install lmdb") from None
        if int(lmdb.__version__.split(".")[0]) < MIN_LMDB_MAJOR:
            raise StoreError(
                f"lmdb:{path}: lmdb {lmdb.__version__} fails or freezes with several writers; "
                f"pip install 'lmdb>={MIN_LMDB_MAJOR}'"
            )
        self.lmdb, self.budget_bytes, self.stats = lmdb, budget_bytes, stats
        self.sync, self.map_bytes = sync, map_bytes
        self.path = private_directory(os.path.expanduser(path), DATA_FILE, LOCK_FILE)
        self.outage = Outage(f"lmdb:{self.path}")
        self._gate = Gate()
        self._write_lock = threading.Lock()  # a writer waits here, outside of LMDB and of the gate
        self._is_closed = False
        self._touched: dict[bytes, None] = {}
        self._touch_lock = threading.Lock()
        try:
            self._open()
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"lmdb:{self.path}: {error}; a directory opened twice in one process needs one "
                "store that is shared, a damaged one must be removed"
            ) from None

    def fetch(self, key: bytes) -> bytes | None:
        sealed = self._run(lambda txn: txn.get(key, db=self._values), write=False)
        if sealed is not None:
            with self._touch_lock:
                self._touched.pop(key, None)
                self._touched[key] = None
                if len(self._touched) > MAX_TOUCHED:
                    del self._touched[next(iter(self._touched))]
        return sealed

    def head(self, key: bytes, num_bytes: int) -> tuple[bytes, int] | None:
        def look(txn: Any) -> tuple[bytes, int] | None:
            sealed = txn.get(key, db=self._values)
            return None if sealed is None else (bytes(sealed[:num_bytes]), len(sealed))

        return self._run(look, write=False, buffers=True)

    def place(self, items: Sequence[tuple[bytes, Sealed]]) -> None:
        touched = self._take_touched()

        def write(txn: Any) -> int:
            order = self._order(txn)
            order.renew(touched)
            evicted = sum(self._place_one(txn, order, *item) for item in items)
            order.save()
            return evicted

        evicted = self._run(write, write=True)
        if evicted:
            self.stats.add(evicted=evicted)

    def _place_one(self, txn: Any, order: UseOrder, key: bytes, sealed: Sealed) -> int:
        """Number of values that had to go for this one."""
        order.remove(key)
        txn.put(key, sealed, db=self._values)
        order.append(key, len(key) + len(sealed))
        evicted = 0
        while self.budget_bytes is not None and order.used_bytes > self.budget_bytes:
            oldest = order.pop_oldest()
            if oldest is None:
                break
            txn.delete(oldest, db=self._values)
            evicted += 1
        return evicted

    def remove(self, key: bytes, seen: Sealed | None = None) -> bool:
        def write(txn: Any) -> bool:
            if seen is not None and txn.get(key, db=self._values) != seen:
                return False
            order = self._order(txn)
            order.remove(key)
            order.save()
            return txn.delete(key, db=self._values)

        if self.head(key, 0) is None:  # spares a commit
            return False
        return self._run(write, write=True)

    def close(self) -> None:
        touched = self._take_touched()

        def write(txn: Any) -> None:
            order = self._order(txn)
            order.renew(touched)
            order.save()

        if touched:
            with suppress(ShelfFault):  # what is lost is when keys were used, no value
                self._run(write, write=True)
        with self._gate.alone():
            self._env.close()

    def _order(self, txn: Any) -> UseOrder:
        return UseOrder(txn, self._index, self._turns, self._totals)

    def _take_touched(self) -> list[bytes]:
        with self._touch_lock:
            touched, self._touched = list(self._touched), {}
        return touched

    def _run(self, work: Callable[[Any], Result], *, write: bool, buffers: bool = False) -> Result:
        """work(transaction), again after the map has grown. Raises ShelfFault."""
        lmdb = self.lmdb
        for _ in range(TRIES):
            opened, map_bytes = self._env, self.map_bytes
            if self._is_closed:
                self._mend(lambda seen=opened: self._reopen(seen))
            try:
                with (
                    self._write_lock if write else nullcontext(),
                    self._gate.shared(),
                    self._env.begin(write=write, buffers=buffers) as txn,
                ):
                    result = work(txn)
                self.outage.over()
                return result
            except lmdb.MapFullError:
                self._mend(lambda seen=map_bytes: self._grow(seen))
            except lmdb.MapResizedError:
                self._mend(lambda: self._set_map(0))  # another process has grown it
            except lmdb.ReadersFullError:
                if self._env.reader_check() == 0:
                    raise self.outage.fault("all readers' slots are taken") from None
            except lmdb.PanicError:
                self._mend(lambda seen=opened: self._reopen(seen))
            except lmdb.Error as error:
                raise self.outage.fault(str(error)) from None
        raise self.outage.fault("gave up: the map has to grow again and again")

    def _mend(self, change: Callable[[], None]) -> None:
        """Changes the environment while no transaction of this process runs."""
        try:
            with self._gate.alone():
                change()
        except (self.lmdb.Error, OSError, OverflowError) as error:
            raise self.outage.fault(str(error)) from None

    def _grow(self, seen: int) -> None:
        """Doubles the map, unless another thread has since it was `seen` bytes."""
        if self.map_bytes > MAX_MAP_BYTES // 2:
            raise OverflowError(f"the map may not pass {MAX_MAP_BYTES:,} bytes")
        if self.map_bytes == seen:
            self._set_map(2 * seen)

    def _set_map(self, size: int) -> None:
        self._env.set_mapsize(size)
        self.map_bytes = self._env.info()["map_size"]

    def _reopen(self, seen: Any) -> None:
        """After a failed write of LMDB's own pages an environment refuses all work."""
        if self._env is seen:
            self._is_closed = True  # where opening fails, the next call tries it again
            self._env.close()
            self._open()
            self._is_closed = False

    def _open(self) -> None:
        """Opens the environment. Raises lmdb.Error and OSError."""
        self._env = self.lmdb.open(
            self.path,
            map_size=self.map_bytes,
            max_dbs=len(TABLES),
            max_readers=MAX_READERS,
            mode=0o600,
            sync=self.sync,
        )
        try:
            self._env.reader_check()  # slots of processes that were killed
            self._prepare()
        except BaseException:
            self._env.close()
            raise

    def _prepare(self) -> None:
        """The tables of an environment just opened, while other processes may grow its map."""
        for _ in range(TRIES):
            try:
                self._fill_truncated()
                tables = [self._env.open_db(name.encode()) for name in TABLES]
                break
            except self.lmdb.MapResizedError:
                self._env.set_mapsize(0)
            except self.lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
        else:
            raise OSError("other processes grow the map without end")
        self._values, self._index, self._turns, self._totals = tables
        sync_directory(self.path)
        self.map_bytes = self._env.info()["map_size"]

    def _fill_truncated(self) -> None:
        """Puts zeros where the file was cut off: reading past its end through the map would kill
        the process, while zeros are damage that is found."""
        with self._env.begin(write=True):  # no other process writes meanwhile
            needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            file = os.path.join(self.path, DATA_FILE)
            if os.stat(file).st_size >= needed:
                return
            handle = os.open(file, os.O_RDWR)
            try:
                os.posix_fallocate(handle, 0, needed)
            finally:
                os.close(handle)
