"""Values on their way to a store by several threads: what concerns one entry keeps its order."""

import time
from random import Random
from threading import Event

import numpy as np
import pytest
from device_model import Device
from prefix_story import cached

from ringslab.engine.prefix_values import PrefixValues, value_name
from ringslab.engine.snapshot_copies import snapshot_buffers
from ringslab.engine.store import open_store
from ringslab.schedules.prefix_index import Entry
from ringslab.schedules.prefix_orders import RINGS


def test_what_concerns_one_entry_keeps_its_order():
    """Puts and deletes of five entries by several threads, to a store that takes a random time for
    each: of every entry the last call wins, and a get waits for the put before it."""
    rng = np.random.default_rng(3)
    with cached("full") as engine:
        cache = engine.prefix
        size, random, last = cache.num_bytes, Random(3), {}
        put, delete = cache.store.put, cache.store.delete
        cache.store.put = lambda *given: time.sleep(random.random() * 4e-3) or put(*given)
        cache.store.delete = lambda *given: time.sleep(random.random() * 4e-3) or delete(*given)
        values = PrefixValues(cache.store, cache.memory, {RINGS: size}, on_gpu=True)
        entries = [Entry(RINGS, bytes([n]) * 16) for n in range(5)]
        for _ in range(150):
            entry = entries[rng.integers(5)]
            if rng.integers(3):
                last[entry] = rng.integers(0, 256, size, dtype=np.uint8)
                values.put(entry, [last[entry]])
                if not rng.integers(8):
                    assert values.get(entry) == last[entry].tobytes()
            else:
                values.delete(entry)
                last[entry] = None
        values.flush()
        for entry, value in last.items():
            assert values.get(entry) == (None if value is None else value.tobytes())


@pytest.mark.parametrize("calls", ["put put", "put delete", "delete put"])
def test_a_slow_call_is_not_overtaken(calls):
    """Two calls for one entry, of which the store takes its time for the first: the second one
    stands, while another entry passes them. `flush` has waited for both."""
    with cached("full") as engine:
        cache = engine.prefix
        old, new = (np.full(cache.num_bytes, n, np.uint8) for n in (1, 2))
        entry, other = (Entry(RINGS, bytes([n]) * 16) for n in range(2))
        values = PrefixValues(cache.store, cache.memory, {RINGS: cache.num_bytes}, on_gpu=True)
        values.put(entry, [old])
        values.flush()
        others_turn, begun, ended = Event(), [], []

        def slow_at_first(call):
            def run(key, *given):
                number = begun.count(key)
                begun.append(key)
                if (key, number) == (value_name(entry), 0):
                    assert others_turn.wait(10)
                found = call(key, *given)
                ended.append((key, number))
                if key == value_name(other):
                    others_turn.set()
                return found

            return run

        cache.store.put = slow_at_first(cache.store.put)
        cache.store.delete = slow_at_first(cache.store.delete)
        for name, value in zip(calls.split(), (old, new), strict=True):
            values.take_refused()  # as after every step
            if name == "put":
                values.put(entry, [value])
            else:
                values.delete(entry)
        values.put(other, [old])
        values.flush()
        order = [(other, 0), (entry, 0), (entry, 1)]
        assert ended == [(value_name(one), number) for one, number in order]
        wanted = None if calls.endswith("delete") else new.tobytes()
        assert cache.store.get(value_name(entry)) == wanted


@pytest.mark.parametrize("end", ["flush", "close"])
def test_the_end_waits_for_puts_and_deletes(end):
    """A put and a delete of two entries by a slow store have ended when `flush` and `close` return,
    and the store closes after them."""
    with cached("full") as engine:
        cache, ended = engine.prefix, []
        values = PrefixValues(cache.store, cache.memory, {RINGS: cache.num_bytes}, on_gpu=True)
        close, entries = cache.store.close, [Entry(RINGS, bytes([n]) * 16) for n in range(2)]
        cache.store.put = lambda *given: time.sleep(0.05) or ended.append("put") or True
        cache.store.delete = lambda *given: time.sleep(0.1) or ended.append("delete") or True
        cache.store.close = lambda: ended.append("close") or close()
        values.put(entries[0], [np.zeros(cache.num_bytes, np.uint8)])
        values.delete(entries[1])
        getattr(values, end)()
        assert ended == ["put", "delete", "close"][: 2 if end == "flush" else 3]


NAMES = [Entry(RINGS, bytes([n]) * 16) for n in range(12)]


@pytest.fixture
def slow_device():
    """A device that does nothing until it is told to, and values that leave it for a store."""
    device = Device(seed=2)
    with open_store("memory:") as store:
        yield device, store, PrefixValues(store, device.memory, {RINGS: 64}, on_gpu=True)


def test_values_are_handed_over_when_they_are_there(slow_device):
    """Nobody waits for the device: put returns, and the store has nothing. Once the device has run,
    the next look at what was refused hands the value over."""
    device, store, values = slow_device
    values.put(NAMES[0], [np.full(64, 7, np.uint8)])
    assert values.take_refused() == []
    assert not store.contains(value_name(NAMES[0]))
    while device.step():
        pass
    values.take_refused()
    values.flush()
    assert store.get(value_name(NAMES[0])) == bytes([7]) * 64


def test_a_value_that_is_wanted_is_waited_for(slow_device):
    """get waits for the device up to this value, not for those behind it."""
    _, store, values = slow_device
    for n in range(3):
        values.put(NAMES[n], [np.full(64, n, np.uint8)])
    assert values.get(NAMES[1]) == bytes([1]) * 64
    values._pending[NAMES[0]].result()
    assert [store.contains(value_name(NAMES[n])) for n in range(3)] == [True, True, False]
    values.close()


def test_a_value_deleted_on_its_way_is_not_stored(slow_device):
    """Its buffer comes back once it has crossed, an older value of its name goes as well, and a
    newer one stays."""
    _, _, values = slow_device
    values.put(NAMES[0], [np.full(64, 1, np.uint8)])
    values.flush()
    for n in (2, 3):
        values.put(NAMES[0], [np.full(64, n, np.uint8)])
        values.put(NAMES[n], [np.full(64, n, np.uint8)])
        values.delete(NAMES[0])
    values.put(NAMES[4], [np.full(64, 4, np.uint8)])
    values.flush()
    assert [n for n in range(5) if values.contains(NAMES[n])] == [2, 3, 4]
    values.put(NAMES[0], [np.full(64, 5, np.uint8)])
    assert values.get(NAMES[0]) == bytes([5]) * 64
    copies = values._copies[RINGS]
    assert copies._free.qsize() == snapshot_buffers(64)


def test_more_values_than_buffers(slow_device):
    """With all buffers on their way a put waits for the first of them, and all arrive."""
    _, _, values = slow_device
    names = [Entry(RINGS, n.to_bytes(16, "little")) for n in range(3 * snapshot_buffers(64))]
    for n, name in enumerate(names):
        values.put(name, [np.full(64, n, np.uint8)])
    values.flush()
    assert [values.get(name) for name in names] == [bytes([n]) * 64 for n in range(len(names))]
