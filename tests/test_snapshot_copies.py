"""Snapshots on their way off a device: whole, whatever order the device runs its queues in."""

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from device_model import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from ringslab.engine.snapshot_copies import (
    LOAD_BUFFERS,
    SnapshotCopies,
    SnapshotLoads,
    snapshot_buffer_bytes,
    snapshot_buffers,
)
from ringslab.rawkernels.memory import load_memory

SIZE = 8
SNAPSHOT_BUFFERS = snapshot_buffers(SIZE)


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_no_step_tears_a_snapshot(seed, acts):
    """Steps overwrite a slot; snapshots are taken between them, read late and given back; restores
    come from host buffers that are reused: every value is that of its moment, in any order of the
    device's two queues."""
    device = Device(seed)
    copies, loads = SnapshotCopies(device.memory, SIZE), SnapshotLoads(device.memory, SIZE)
    slot, other = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    taken, number, sent, loaded = [], 0, 0, []
    for act in acts:
        if act == 0:
            number += 1
            for half in (slice(0, 4), slice(4, 8)):  # a kernel writes the slot in pieces
                device.queue(lambda half=half, n=number: slot.__setitem__(half, n % 256))
        elif act == 1 and len(taken) < SNAPSHOT_BUFFERS:
            taken.append((copies.take([slot]), number))
        elif act == 2 and taken:
            buffer, wanted = taken.pop(device.random.randrange(len(taken)))
            assert copies.read(buffer).tolist() == [wanted % 256] * SIZE
            copies.give_back(buffer)
        elif act == 3:
            sent += 1
            loads.load([other], bytes([sent % 256]) * SIZE)
            device.queue(lambda n=sent: loaded.append((n, other.tolist())))
    for buffer, wanted in taken:
        assert copies.read(buffer).tolist() == [wanted % 256] * SIZE
    while device.step():
        pass
    for wanted, found in loaded:
        assert found == [wanted % 256] * SIZE


def test_the_model_sees_a_missing_event():
    """Without the wait of the copying stream, some order of the queues tears a snapshot."""
    torn = 0
    for seed in range(50):
        device = Device(seed)
        device.memory = replace(device.memory, after=lambda event: None)
        copies, slot = SnapshotCopies(device.memory, SIZE), np.zeros(SIZE, np.uint8)
        device.queue(lambda slot=slot, seed=seed: slot.__setitem__(..., seed))
        copies.device[:] = 255
        torn += copies.read(copies.take([slot])).tolist() != [seed] * SIZE
    assert torn > 0


def test_the_next_snapshot_waits_for_a_buffer():
    """All 16 buffers on their way: the 17th waits until one is given back, and no longer."""
    copies = SnapshotCopies(load_memory("cpu"), SIZE)
    slot = np.arange(SIZE, dtype=np.uint8)
    buffers = [copies.take([slot]) for _ in range(SNAPSHOT_BUFFERS)]
    assert sorted(buffers) == list(range(SNAPSHOT_BUFFERS))
    found = []
    waiting = threading.Thread(target=lambda: found.append(copies.take([slot])))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    copies.give_back(buffers[3])
    waiting.join(5)
    assert found == [buffers[3]]
    assert copies.device.nbytes == snapshot_buffer_bytes(SIZE)
    assert LOAD_BUFFERS == 2


@pytest.mark.gpu
def test_on_a_gpu():
    """64 snapshots of 1 MB behind kernels that overwrite their slot: each is that of its moment."""
    import cupy

    memory = load_memory("cuda")
    copies = SnapshotCopies(memory, 1 << 20)
    slot = cupy.zeros(1 << 20, np.uint8)
    with memory.scope():
        for first in range(0, 64, SNAPSHOT_BUFFERS):
            taken = []
            for number in range(first, first + SNAPSHOT_BUFFERS):
                slot.fill(number)
                taken.append((copies.take([slot]), number))
                slot.fill(255)
            for buffer, number in taken:
                assert (copies.read(buffer) == number).all()
                copies.give_back(buffer)


@pytest.mark.parametrize(
    ("num_bytes", "buffers"),
    [(1, 32), (1 << 22, 32), ((1 << 22) + 1, 31), (1 << 26, 2), (1 << 27, 2), (1 << 31, 2)],
)
def test_small_snapshots_have_more_buffers(num_bytes, buffers):
    """32 of up to 4 MiB, as many as 128 MiB hold of larger ones, and never fewer than two."""
    assert snapshot_buffers(num_bytes) == buffers
    assert snapshot_buffer_bytes(num_bytes) == buffers * num_bytes


@pytest.mark.parametrize("call", ["copy", "record", "after", "download"])
def test_a_take_that_fails_loses_no_buffer(call):
    """Whatever was queued of it, the values that use the buffer next are whole."""
    for seed in range(20):
        device = Device(seed)
        copies, slot = SnapshotCopies(device.memory, SIZE), np.zeros(SIZE, np.uint8)

        def fail(*given):
            raise MemoryError("no room")

        copies.memory = replace(device.memory, **{call: fail})
        with pytest.raises(MemoryError):
            copies.take([slot])
        copies.memory, taken = device.memory, []
        for n in range(SNAPSHOT_BUFFERS):
            device.queue(partial(slot.fill, n))
            taken.append(copies.take([slot]))
        assert sorted(taken) == list(range(SNAPSHOT_BUFFERS))
        for n, buffer in enumerate(taken):
            assert copies.read(buffer).tolist() == [n] * SIZE
