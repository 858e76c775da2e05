"""Clocks of benchmarks: the host's, and a GPU's on a CuPy made of counters."""

import sys
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from ringslab.rawkernels.timing import host_stopwatch


def test_host_counts_every_call():
    """Two calls captured are two calls warm, then two a round: with 2 rounds to warm up and 3
    timed, 2 + 2 * 5."""
    watch, seen = host_stopwatch(), []
    replay = watch.capture([lambda: seen.append(0), lambda: seen.append(1)])
    assert replay.num_calls == 2
    assert len(watch.time_us(replay.run, 3, True)) == 3
    assert seen == [0, 1] * 6


def test_host_measures_microseconds():
    """A call that sleeps 2 ms takes 2,000 us or somewhat more."""
    times = host_stopwatch().time_us(lambda: time.sleep(0.002), 3, False)
    assert 2_000 <= min(times) < 1e6


def test_host_sustains_for_the_time_asked():
    """20 ms of calls that sleep 1 ms: only those of the second half count, at least one."""
    start = time.perf_counter()
    times = host_stopwatch().sustain_us(lambda: time.sleep(0.001), 0.02, False)
    assert time.perf_counter() - start >= 0.02
    assert 1 <= len(times) <= 10


class FakeStream:
    """Counts what is queued: a clock in milliseconds that fills, graphs and calls move on."""

    ptr = 1234

    def __init__(self):
        self.now, self.log, self.graph = 0.0, [], None

    def begin_capture(self):
        self.graph = []

    def end_capture(self):
        calls, self.graph = self.graph, None
        return SimpleNamespace(graph=0, launch=lambda stream: self.run(calls))

    def run(self, calls):
        self.log.append("graph")
        self.now += sum(calls)

    def queue(self, name, milliseconds):
        if self.graph is None:
            self.log.append(name)
            self.now += milliseconds
        else:
            self.graph.append(milliseconds)

    def synchronize(self):
        assert self.graph is None, "synchronized inside a capture"


class FakeEvent:
    def record(self, stream):
        self.at = stream.now

    def synchronize(self):
        pass


@pytest.fixture
def stream(monkeypatch):
    """A stream of a CuPy that has only what the stopwatch uses, and no cuBLAS."""
    stream = FakeStream()

    def empty(size, dtype):
        return SimpleNamespace(
            data=SimpleNamespace(memset_async=lambda value, size, on: on.queue("fill", 70.0))
        )

    cupy = ModuleType("cupy")
    cupy.empty = empty
    cupy.cuda = SimpleNamespace(
        Event=FakeEvent, get_elapsed_time=lambda start, end: end.at - start.at
    )
    pool = SimpleNamespace(free_all_blocks=lambda: stream.log.append("free"))
    cupy.get_default_memory_pool = lambda: pool
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return stream


def device_watch(stream):
    from ringslab.rawkernels.device.timing import load_device_stopwatch

    return load_device_stopwatch(stream)


def test_device_time_is_the_graphs(stream):
    """Two calls of 1 and 2 ms in a graph are 3,000 us a round; the fill before it is outside."""
    watch = device_watch(stream)
    calls = [lambda: stream.queue("a", 1.0), lambda: stream.queue("b", 2.0)]
    replay = watch.capture(calls)
    assert stream.log == ["a", "b"]  # once each before the capture, which queues nothing
    assert replay.kernels is None
    assert watch.time_us(replay.run, 3, True) == pytest.approx([3000.0] * 3)
    assert stream.log == ["a", "b"] + ["fill", "graph"] * 5
    assert watch.stream == 1234
    assert watch.matmul is None


def test_device_without_a_flush(stream):
    """Large inputs need no fill."""
    watch = device_watch(stream)
    replay = watch.capture([lambda: stream.queue("a", 1.0)])
    watch.time_us(replay.run, 1, False)
    assert "fill" not in stream.log


def test_device_sustains(stream):
    """Rounds of the second half of the time, each by its own events."""
    watch = device_watch(stream)
    replay = watch.capture([lambda: stream.queue("a", 1.0)])
    times = watch.sustain_us(replay.run, 0.02, True)
    assert times
    assert set(np.round(times)) == {1000.0}


def test_device_host_time_waits_for_nothing(stream):
    """21 calls: one warm, 20 timed together."""
    watch = device_watch(stream)
    assert watch.host_us(lambda: stream.queue("a", 1.0)) >= 0
    assert stream.log == ["a"] * 21


def test_a_failed_capture_tells_its_cause(stream):
    """The call's own error comes out, not that of the broken capture, which is ended."""
    watch = device_watch(stream)
    turns = []

    def call():
        turns.append(0)
        if len(turns) == 2:
            raise ValueError("cannot be captured")

    def broken():
        stream.graph = None
        raise RuntimeError("capture was invalidated")

    stream.end_capture = broken
    with pytest.raises(ValueError, match="cannot be captured"):
        watch.capture([call])
    assert stream.graph is None


@pytest.mark.gpu
def test_on_a_gpu():
    """A copy of 64 MB by the stopwatch is a copy, takes time, and a graph knows its kernels."""
    import cupy

    from ringslab.rawkernels.device.timing import make_stream
    from ringslab.rawkernels.operations import load_operations

    stream = make_stream()
    with stream:
        watch = device_watch(stream)
        ids = cupy.arange(1024, dtype=np.int32)
        source, target = (cupy.zeros((1024, 32768), np.uint16) for _ in range(2))
        seeded = load_operations("cuda").seeded_activations
        replay = watch.capture([lambda: seeded(1, 0, ids, ids, source)])
        watch.copy(target, source)
        watch.sync()
        assert (source == target).all()
        assert source.any()
        assert min(watch.time_us(replay.run, 3, True)) > 1.0
        assert replay.kernels in (None, ("seeded_activations",))
