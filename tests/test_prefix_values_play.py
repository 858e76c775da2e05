"""Values on their way, played in random orders of calls, of the device and of the store."""

import time
from concurrent.futures import wait as wait_for
from dataclasses import replace
from random import Random
from threading import Thread

import numpy as np
import pytest
from device_model import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from ringslab.engine import snapshot_copies
from ringslab.engine.prefix_values import PrefixValues, value_name
from ringslab.engine.store import open_store
from ringslab.schedules.prefix_index import Entry
from ringslab.schedules.prefix_orders import PAGES, RINGS

SIZES = {RINGS: 8, PAGES: 6}
ENTRIES = [Entry(kind, bytes([n]) * 16) for kind in SIZES for n in range(3)]
# More puts than other calls, so that buffers run out.
CALLS = ["put"] * 4 + ["delete", "get", "look", "device", "flush", "put and delete"]


def in_time(work):
    """Runs `work`, which must not wait for ever."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "waits for ever"
    if raised:
        raise raised[0]


class Story:
    """Calls, and what must come of them."""

    def __init__(self, seed, store):
        self.random, self.device = Random(seed), Device(seed)
        self.number, self.wanted = 0, {}
        put = store.put

        def slow_put(*given):
            if self.random.random() < 0.2:
                time.sleep(1e-4)
            return put(*given)

        store.put = slow_put
        self.values = PrefixValues(store, self.device.memory, SIZES, on_gpu=True)
        self.slots = {kind: np.zeros(size, np.uint8) for kind, size in SIZES.items()}

    def act(self, call, entry):
        values = self.values
        if call.startswith("put"):
            self.number += 1
            fill, slot = self.number % 251, self.slots[entry.kind]
            self.device.queue(lambda: slot.fill(fill))  # the step before
            halves = [slot[:2], slot[2:]] if self.number % 2 else [slot]
            values.put(entry, halves)
            self.device.queue(lambda: slot.fill(255))  # the step after
            self.wanted[entry] = bytes([fill]) * SIZES[entry.kind]
        if call.endswith("delete"):
            values.delete(entry)
            self.wanted[entry] = None
        if call == "get":
            assert values.get(entry) == self.wanted.get(entry)
        if call == "look":
            assert values.take_refused() == []
        if call == "device":
            for _ in range(self.random.randrange(8)):
                self.device.step()
        if call == "flush":
            values.flush()
            self.check()

    def check(self):
        """Every value that was put last is whole, and all buffers are free."""
        for entry in ENTRIES:
            assert self.values.store.get(value_name(entry)) == self.wanted.get(entry)
        for copies in self.values._copies.values():
            free = [copies._free.get_nowait() for _ in range(copies._free.qsize())]
            assert sorted(free) == list(range(len(copies.pinned)))
            for buffer in free:
                copies._free.put(buffer)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(2, 3),
    st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from(ENTRIES)), max_size=40),
)
def test_values_arrive_whole_in_any_order(seed, buffers, acts):
    """Rings and pages, put and put again, deleted before and after they have crossed, with fewer
    buffers than values on their way: what is read is what was put last, whatever steps overwrite,
    no call waits for ever, and every buffer comes back once."""
    with pytest.MonkeyPatch.context() as patch, open_store("memory:") as store:
        patch.setattr(snapshot_copies, "MAX_BUFFERS", buffers)

        def play():
            story = Story(seed, store)
            for call, entry in acts:
                story.act(call, entry)
            story.act("flush", None)
            story.values._writers.shutdown()

        in_time(play)


@pytest.fixture
def two_buffers(monkeypatch):
    """A device that does nothing until it is told to, a store, and values with two buffers of each
    kind on their way between them."""
    monkeypatch.setattr(snapshot_copies, "MAX_BUFFERS", 2)
    device = Device(seed=1)
    with open_store("memory:") as store:
        yield device, store, PrefixValues(store, device.memory, SIZES, on_gpu=True)


def test_a_full_house_waits_for_one_value(two_buffers):
    """With both buffers of the rings on their way the next put waits for the first to cross and for
    the store to take it, however long that takes, and not for the device to send the second."""
    device, store, values = two_buffers
    put, waited = store.put, []
    store.put = lambda *given: time.sleep(0.05) or put(*given)
    wait = device.memory.wait
    values._copies[RINGS].memory = replace(
        device.memory, wait=lambda event: waited.append(event[0]) or wait(event)
    )
    for n in range(3):
        values.put(ENTRIES[n], [np.full(SIZES[RINGS], n, np.uint8)])
    assert len(waited) == 1
    values.flush()
    for n in range(3):
        assert values.get(ENTRIES[n]) == bytes([n]) * SIZES[RINGS]


def test_a_kind_waits_for_its_own_buffers(two_buffers):
    """Rings that fill their buffers do not hold up pages."""
    device, _, values = two_buffers
    for n in range(2):
        values.put(ENTRIES[n], [np.full(SIZES[RINGS], n, np.uint8)])
    values.put(ENTRIES[3], [np.full(SIZES[PAGES], 3, np.uint8)])
    assert not device.done
    values.close()


def test_a_wait_that_fails_loses_no_buffer(two_buffers):
    """The device fails once while a value is waited for (or Ctrl-C comes): the next wait takes it,
    and all buffers come back."""
    device, store, values = two_buffers
    wait, copies = device.memory.wait, values._copies[RINGS]
    failing = [RuntimeError("the device failed")]

    def fail_once(event):
        if failing:
            raise failing.pop()
        wait(event)

    copies.memory = replace(device.memory, wait=fail_once)
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    with pytest.raises(RuntimeError, match="failed"):
        values.flush()
    values.flush()
    assert store.get(value_name(ENTRIES[0])) == bytes([5]) * SIZES[RINGS]
    assert copies._free.qsize() == 2


def test_close_closes_the_store_though_the_device_fails(two_buffers):
    """What was handed over is stored, the threads end, the store is closed, the fault comes out."""
    device, store, values = two_buffers

    def fail(event):
        raise RuntimeError("the device failed")

    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    values._copies[RINGS].memory = replace(device.memory, wait=fail)
    with pytest.raises(RuntimeError, match="failed"):
        values.close()
    assert store.closed
    with pytest.raises(RuntimeError, match="shutdown"):
        values._writers.submit(print)


@pytest.mark.parametrize("end", ["flush", "take_refused", "get"])
def test_a_store_that_raises_on_a_thread(two_buffers, end):
    """A put that raises comes out of what waits for it, and its buffer comes back."""
    device, store, values = two_buffers
    put = store.put

    def fail(*given):
        raise MemoryError("no room")

    store.put = fail
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    while device.step():
        pass
    values._hand_over()
    wait_for([values._pending[ENTRIES[0]]])
    with pytest.raises(MemoryError, match="no room"):
        values.get(ENTRIES[0]) if end == "get" else getattr(values, end)()
    store.put = put
    assert values.get(ENTRIES[0]) is None  # told once
    values.flush()
    assert values.take_refused() == [ENTRIES[0]]
    assert values._copies[RINGS]._free.qsize() == 2
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 6, np.uint8)])
    assert values.get(ENTRIES[0]) == bytes([6]) * SIZES[RINGS]
    values.close()


def test_a_buffer_that_is_with_nobody(two_buffers):
    """Ctrl-C between a copy and the note of it: the buffer is gone, and the other one serves."""
    _, _, values = two_buffers
    values._copies[RINGS].take([np.zeros(SIZES[RINGS], np.uint8)])

    def put_three():
        for n in range(3):
            values.put(ENTRIES[n], [np.full(SIZES[RINGS], n, np.uint8)])
        values.flush()

    in_time(put_three)
    for n in range(3):
        assert values.get(ENTRIES[n]) == bytes([n]) * SIZES[RINGS]
    values.close()


def test_a_delete_that_fails_is_told_once(two_buffers):
    """By flush or by the next look."""
    _, store, values = two_buffers
    delete = store.delete

    def fail(key):
        raise MemoryError("no room")

    for end in (values.flush, values.take_refused):
        store.delete = fail
        values.delete(ENTRIES[0])
        wait_for(values._deletes)
        with pytest.raises(MemoryError, match="no room"):
            end()
        store.delete = delete
        assert end() in (None, [])
    values.close()


def test_a_value_on_its_way_is_there_and_a_new_one_is_not_refused(two_buffers):
    """contains before the value has crossed; a put after one that the store did not take."""
    _, store, values = two_buffers
    put = store.put
    store.put = lambda *given: False
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    assert values.contains(ENTRIES[0])
    assert values.get(ENTRIES[0]) is None
    store.put = put
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 6, np.uint8)])
    values.flush()
    assert values.take_refused() == []
    assert values.get(ENTRIES[0]) == bytes([6]) * SIZES[RINGS]
    values.close()


def test_whether_a_value_is_there_waits_for_its_delete(two_buffers):
    """A delete that is slow: the value counts as gone from the call on."""
    _, store, values = two_buffers
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    values.flush()
    delete = store.delete
    store.delete = lambda key: time.sleep(0.1) or delete(key)
    assert values.contains(ENTRIES[0])
    values.delete(ENTRIES[0])
    assert not values.contains(ENTRIES[0])
    values.close()


def test_put_hands_over_what_has_crossed_and_waits_for_nothing(two_buffers):
    """While the host waits for nothing: a value that is on the device's side, but has not crossed,
    is not handed over; one that has crossed is, by the next put."""
    device, store, values = two_buffers

    def fail(event):
        raise AssertionError("waited")

    values._copies[RINGS].memory = replace(device.memory, wait=fail)
    values.put(ENTRIES[0], [np.full(SIZES[RINGS], 5, np.uint8)])
    main, aside = device.streams[0], device.streams[1:]
    device.streams[1:] = [[] for _ in aside]
    while device.step():
        pass
    assert main == []
    assert values.take_refused() == []  # its copy within the device is done, no more
    device.streams[1:] = aside
    while device.step():
        pass
    values._copies[RINGS].memory = device.memory
    values.put(ENTRIES[1], [np.full(SIZES[RINGS], 6, np.uint8)])
    values._pending[ENTRIES[0]].result()
    assert store.get(value_name(ENTRIES[0])) == bytes([5]) * SIZES[RINGS]
    values.close()
