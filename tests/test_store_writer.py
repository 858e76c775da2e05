"""Puts by a thread: copied, ordered, bounded, visible while they wait."""

import socket
import threading
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import LAYOUT_A

import ringslab as rs
from ringslab.engine.store_stats import ShelfFault
from ringslab.errors import ArgumentError, StoreError


class Held:
    """Holds a store's writer: `place` waits until `free` is set. Optionally fails."""

    def __init__(self, store, monkeypatch) -> None:
        self.free, self.entered = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.sizes: list[int] = []  # number of values of each call
        place = store.shelf.place

        def held(items) -> None:
            self.entered.set()
            assert self.free.wait(30)
            self.sizes.append(len(items))
            if self.error is not None:
                raise self.error
            place(items)

        monkeypatch.setattr(store.shelf, "place", held)


def test_values_are_copied_and_seen_while_they_wait(monkeypatch):
    """With the writer held at the first of three puts: all three are read as they were put, though
    the arrays were changed since; after flush they are stored."""
    with rs.open_store("memory:", layout=LAYOUT_A, queue_bytes=10_000) as store:
        held = Held(store, monkeypatch)
        values = [np.full(100, n, np.uint8) for n in range(3)]
        for n, value in enumerate(values):
            assert store.put(b"%d" % n, value)
            value[:] = 99
        assert held.entered.wait(30)
        assert [store.get(b"%d" % n) for n in range(3)] == [bytes([n]) * 100 for n in range(3)]
        assert all(store.contains(b"%d" % n) for n in range(3))
        assert store.stats.puts == 0
        assert not store.flush(timeout_s=0.01)
        held.free.set()
        assert store.flush()
        assert store.stats.puts == 3
        assert [store.store.get(b"%d" % n) for n in range(3)] == [
            bytes([n]) * 100 for n in range(3)
        ]


def test_a_full_queue_drops_at_once(monkeypatch):
    """Room for two values of 100 bytes with their keys: the third put is False without waiting, is
    counted, and leaves the others alone; a replaced value gives its room back."""
    with rs.open_store("memory:", queue_bytes=2 * 101) as store:
        held = Held(store, monkeypatch)
        assert store.put(b"a", bytes(100))
        assert held.entered.wait(30)
        assert store.put(b"b", bytes(100))
        assert not store.put(b"c", bytes(100))
        assert not store.put(b"d", bytes(300))
        assert store.stats.dropped == 2
        assert store.get(b"c") is None
        assert store.delete(b"b")
        assert store.put(b"c", b"x" * 100)
        held.free.set()
        assert store.flush()
        assert (store.get(b"a"), store.get(b"b"), store.get(b"c")) == (bytes(100), None, b"x" * 100)
        assert store._taken_bytes == 0


def test_put_waits_for_room(monkeypatch):
    """With wait_s = 30 a put waits for the room that the writer makes, and is stored."""
    with rs.open_store("memory:", queue_bytes=101, wait_s=30) as store:
        held = Held(store, monkeypatch)
        assert store.put(b"a", bytes(100))
        assert held.entered.wait(30)
        threading.Timer(0.05, held.free.set).start()
        assert store.put(b"b", bytes(100))
        assert store.flush()
        assert store.stats.puts == 2


def test_the_last_of_several_puts_stays(monkeypatch):
    """Three versions under one key while the writer is held at the first: the last is read, and it
    is what is stored; delete then removes what is being written and what waits."""
    with rs.open_store("memory:", queue_bytes=10_000) as store:
        held = Held(store, monkeypatch)
        assert store.put(b"k", b"1")
        assert held.entered.wait(30)
        assert store.put(b"k", b"22")
        assert store.put(b"k", b"333")
        assert store.get(b"k") == b"333"
        threading.Timer(0.05, held.free.set).start()
        assert store.delete(b"k")
        assert store.flush()
        assert store.get(b"k") is None
        assert store._taken_bytes == 0


def test_flush_tells_of_lost_values(monkeypatch):
    """A put that the shelf fails is False from the next flush, once, and counts as an error; an
    exception that no shelf should raise is a StoreError from flush, once, and the thread lives."""
    with rs.open_store("memory:", queue_bytes=10_000) as store:
        held = Held(store, monkeypatch)
        held.free.set()
        held.error = ShelfFault("disk full")
        assert store.put(b"k", b"1")
        assert not store.flush()
        assert store.flush()
        assert store.stats.errors == 1
        held.error = ZeroDivisionError("a mistake")
        assert store.put(b"k", b"1")
        with pytest.raises(StoreError, match="a mistake"):
            store.flush()
        held.error = None
        assert store.put(b"k", b"2")
        assert store.flush()
        assert store.get(b"k") == b"2"


def test_what_waits_is_written_together(monkeypatch):
    """200 puts while the writer is held at the first: they are written as 1 + 64 + 64 + 64 + 7.
    A fault of many is tried again one by one, and only those that fail again are lost."""
    with rs.open_store("memory:", queue_bytes=1 << 20) as store:
        held = Held(store, monkeypatch)
        store.put(b"0", b"v")
        assert held.entered.wait(30)
        for n in range(1, 200):
            store.put(b"%d" % n, b"v%d" % n)
        held.free.set()
        assert store.flush()
        assert held.sizes == [1, 64, 64, 64, 7]
        assert store.get(b"199") == b"v199"
    with rs.open_store("memory:", queue_bytes=1 << 20) as store:
        place = store.shelf.place

        def fails_for_5(items) -> None:
            if b"5" in dict(items):
                raise ShelfFault("too much")
            place(items)

        monkeypatch.setattr(store.shelf, "place", fails_for_5)
        assert store.store.put_many([(b"%d" % n, b"v") for n in range(9)]) == [
            n != 5 for n in range(9)
        ]
        assert (store.stats.puts, store.stats.errors, store.stats.bytes_in) == (8, 1, 8)


def test_close_writes_what_waits(tmp_path):
    """20 puts of 100 kB to LMDB and close at once: all are there when it is opened again; a call
    after close is a StoreError."""
    pytest.importorskip("lmdb")
    url = f"lmdb:{tmp_path / 's'}"
    store = rs.open_store(url, queue_bytes=10 << 20)
    for n in range(20):
        assert store.put(b"%d" % n, bytes([n]) * 100_000)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put(b"k", b"v")
    assert not store._thread.is_alive()
    with rs.open_store(url) as store:
        assert all(store.get(b"%d" % n) == bytes([n]) * 100_000 for n in range(20))


def test_a_silent_server_loses_no_count():
    """300 puts of 1.4 MB while nobody answers: each is counted once, as an error of the thread or
    as dropped, none as stored, and flush says that they are lost."""
    pytest.importorskip("redis")
    with socket.create_server(("127.0.0.1", 0)) as silent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with rs.open_store(url, queue_bytes=8 << 20, timeout_s=1.0) as store:
            value = bytes(1_415_040)
            for n in range(300):
                store.put(b"%d" % n, value)
            assert not store.flush()
            stats = store.stats
            assert stats.puts == 0
            assert stats.errors + stats.dropped == 300


@pytest.mark.parametrize(
    "kw", [{"queue_bytes": 0}, {"queue_bytes": 1.5}, {"queue_bytes": 9, "wait_s": -1}]
)
def test_queues_that_are_refused(kw):
    """A queue has a positive number of bytes, a wait is not negative."""
    with pytest.raises(ArgumentError):
        rs.open_store("memory:", **kw)


STEP = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([b"a", b"b"]), st.binary(max_size=9)),
    st.tuples(st.sampled_from(["get", "contains", "delete"]), st.sampled_from([b"a", b"b"])),
    st.tuples(st.just("flush")),
    st.tuples(st.just("pause")),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=30))
def test_a_store_with_a_thread_is_a_dict(steps):
    """Any order of calls gives what a dict gives, whether the writer has come to them or not."""
    model: dict[bytes, bytes] = {}
    with rs.open_store("memory:", queue_bytes=1 << 20) as store:
        for name, *args in steps:
            if name == "put":
                assert store.put(*args)
                model[args[0]] = args[1]
            elif name == "get":
                assert store.get(*args) == model.get(*args)
            elif name == "contains":
                assert store.contains(*args) == (args[0] in model)
            elif name == "delete":
                assert store.delete(*args) == (model.pop(*args, None) is not None)
            elif name == "flush":
                assert store.flush()
            else:
                time.sleep(0)
        assert {key: store.get(key) for key in (b"a", b"b") if store.contains(key)} == model


def test_many_threads_put_and_read():
    """6 threads put and read 30 keys through a queue of 20 values: every value read is whole and
    its key's, and after flush nothing is counted as waiting."""
    bad = []
    with rs.open_store("memory:", queue_bytes=20 * 4000, wait_s=30) as store:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                n = int(rng.integers(30))
                if not store.put(b"%02d" % n, b"%02d" % n * 2000):
                    bad.append("dropped")
                n = int(rng.integers(30))
                if store.get(b"%02d" % n) not in (None, b"%02d" % n * 2000):
                    bad.append(n)
                if rng.random() < 0.1:
                    store.delete(b"%02d" % n)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []
        assert store.flush()
        assert store._taken_bytes == 0
