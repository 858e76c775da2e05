"""A device with streams, in NumPy, that runs what is queued in any order that it may."""

from contextlib import contextmanager
from dataclasses import replace
from random import Random

from ringslab.rawkernels.memory import load_memory


class Device:
    """A device with streams: what is queued runs when it likes, each stream in order, and not
    before the events that it waits for."""

    def __init__(self, seed):
        self.random = Random(seed)
        self.streams, self.current, self.done = [[]], 0, set()
        self.events = 0
        host = load_memory("cpu")
        self.memory = replace(
            host,
            copy=lambda dst, src: self.queue(lambda: dst.__setitem__(..., src[: dst.size])),
            upload=lambda dst, src: self.queue(lambda: dst.__setitem__(..., src)),
            download=lambda dst, src: self.queue(lambda: dst.__setitem__(..., src)),
            zero=lambda x: self.queue(lambda: x.fill(0)),
            record=self.record,
            after=lambda event: self.queue(None, needs=event[0]),
            wait=self.wait,
            is_done=lambda event: event[0] in self.done,
            side_stream=self.side_stream,
        )

    def queue(self, work, needs=None, event=None):
        self.streams[self.current].append((work, needs, event))

    def record(self, event=None):
        self.events += 1
        self.queue(None, event=self.events)
        event = [0] if event is None else event
        event[0] = self.events  # an event that is recorded again stands for the new point
        return event

    def side_stream(self):
        self.streams.append([])
        own = len(self.streams) - 1

        @contextmanager
        def scope():
            before, self.current = self.current, own
            try:
                yield
            finally:
                self.current = before

        return scope

    def step(self):
        """Runs the head of some stream; False where none may run."""
        ready = [s for s in self.streams if s and (s[0][1] is None or s[0][1] in self.done)]
        if not ready:
            return False
        work, _, event = self.random.choice(ready).pop(0)
        if work is not None:
            work()
        if event is not None:
            self.done.add(event)
        return True

    def wait(self, event):
        while event[0] not in self.done:
            assert self.step(), "waits for what never comes"
