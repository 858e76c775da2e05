"""Workspaces of streams and of captured graphs, with streams and graphs that only take notes in
CuPy's place: who shares memory, and what waits for what. tests/test_launch_gpu.py asks a GPU."""

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import BackendError, DeviceMemoryError
from ringslab.rawkernels.cuda import gqa_workspace
from ringslab.rawkernels.cuda.gqa_shapes import Cut
from ringslab.rawkernels.device.memory import _capture
from ringslab.rawkernels.device.workspaces import _kept, stream_workspace


class FullError(MemoryError):
    """In the place of CuPy's OutOfMemoryError."""


class FakeStream:
    """Notes what is queued on it: ("record", event), ("wait", event), ("graph", graph)."""

    def __init__(self, cuda, ptr):
        self.cuda, self.ptr, self.queued, self.captures = cuda, ptr, [], False

    def __enter__(self):
        self.cuda.stack.append(self)
        return self

    def __exit__(self, *exception):
        assert self.cuda.stack.pop() is self

    def is_capturing(self):
        return self.captures

    def begin_capture(self):
        self.captures = True

    def end_capture(self):
        self.captures = False
        graph = SimpleNamespace(upload=lambda stream: None)
        graph.launch = lambda: self.cuda.stack[-1].queued.append(("graph", graph))
        return graph

    def record(self):
        event = object()
        self.queued.append(("record", event))
        return event

    def wait_event(self, event):
        self.queued.append(("wait", event))


class FakeCuda:
    """The part of cupy.cuda that is asked for. Every stream that a capture makes has one address,
    as if the last one had gone."""

    CAPTURE_PTR = 999

    def __init__(self):
        self.stack = [FakeStream(self, 0)]
        self.runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError, getDevice=lambda: 0, memGetInfo=lambda: (2345, 10**6)
        )

    def get_current_stream(self):
        return self.stack[-1]

    def Device(self, device):
        return nullcontext()

    def Stream(self, non_blocking):
        return FakeStream(self, self.CAPTURE_PTR)


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    pool = SimpleNamespace(free_bytes=lambda: 1000)
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    memory = SimpleNamespace(OutOfMemoryError=FullError)
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.memory", memory)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("ringslab.rawkernels.device.probe._forked", lambda: False)
    _kept.cache_clear()
    yield cuda
    _kept.cache_clear()


def use(seen=None, name="sums"):
    found = stream_workspace(name, 32, lambda: np.zeros(4))
    if seen is not None:
        seen.append(found)
    return found


def test_graphs_share_what_their_stream_has(cuda):
    """Three captures on one stream find that stream's one workspace; two streams have two, and so
    have their graphs."""
    seen = []
    for ptr in (10, 20):
        with FakeStream(cuda, ptr):
            own, captured = use(), []
            for _ in range(3):
                _capture(lambda captured=captured: use(captured))
            assert all(one is own for one in captured)
            assert use() is own
            seen.append(own)
    assert seen[0] is not seen[1]


def test_a_capture_takes_nothing(cuda):
    """What the stream never took is refused, also where a stream that is gone had the capture's
    address and took it; that one's memory is where it was afterwards, also after an error."""
    with FakeStream(cuda, FakeCuda.CAPTURE_PTR):
        gone = use()
    with FakeStream(cuda, 10):
        with pytest.raises(BackendError, match="partial sums"):
            _capture(lambda: use(name="partial sums"))
        with pytest.raises(BackendError, match="taking memory for sums"):
            _capture(use)
        own, captured = use(), []
        _capture(lambda: use(captured))
        assert captured[0] is own
    with FakeStream(cuda, FakeCuda.CAPTURE_PTR):
        assert use() is gone


def test_launches_elsewhere_take_turns(cuda):
    """On the stream that it was captured on a graph is launched at once. On another it waits for
    what that one has queued, and what that one queues next waits for the graph."""
    with FakeStream(cuda, 10) as owner:
        use()
        launch = _capture(use)
        launch()
    (graph,) = owner.queued
    assert graph[0] == "graph"
    with FakeStream(cuda, 20) as other:
        launch()
    assert owner.queued[1:] == [("record", other.queued[0][1]), ("wait", other.queued[2][1])]
    assert [what for what, _ in other.queued] == ["wait", "graph", "record"]
    assert other.queued[1] == graph


def test_graphs_without_workspaces_wait_for_nothing(cuda):
    """A stream that has none: its graphs are launched anywhere as they are."""
    with FakeStream(cuda, 10) as owner:
        launch = _capture(lambda: None)
    with FakeStream(cuda, 20) as other:
        launch()
    assert owner.queued == []
    assert [what for what, _ in other.queued] == ["graph"]


def test_the_stream_of_a_thread_is_each_threads_own(cuda):
    """cudaStreamPerThread has the address 2 in every thread, and is another stream in each; the
    null stream is the same for all."""
    for ptr, shared in ((0, True), (2, False)):
        with FakeStream(cuda, ptr):
            own, seen = use(), []
            thread = threading.Thread(target=use, args=(seen,))
            thread.start()
            thread.join()
            assert (seen[0] is own) == shared


def test_memory_that_runs_out_is_named(cuda, monkeypatch):
    """2,345 bytes of the device and 1,000 of CuPy's pool are free where the partial sums of a step
    want 64 MiB and 65,536 counters: both numbers are said. Nothing is kept then: the next call with
    room takes it."""
    fmt = rs.make_record_format("bf16", 64, latent=False, num_kv_heads=8)
    arguments = (fmt, Cut(4, 1, 3, True, splits=2), 1, 2, None)

    def full():
        raise FullError("Out of memory allocating 67,108,864 bytes")

    monkeypatch.setattr(gqa_workspace, "_make", full)
    says = "partial sums: needs 67,371,008 bytes but 3,345 are free on cuda:0 .*67,108,864"
    with pytest.raises(DeviceMemoryError, match=says):
        gqa_workspace.split_workspace(*arguments)
    monkeypatch.setattr(gqa_workspace, "_make", lambda: "room")
    assert gqa_workspace.split_workspace(*arguments) == "room"
