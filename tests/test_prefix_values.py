"""Values on their way to a store by several threads: what concerns one entry keeps its order."""

import time
from random import Random
from threading import Event

import numpy as np
import pytest
from prefix_story import cached

from ringslab.engine.prefix_values import PrefixValues, value_name
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
