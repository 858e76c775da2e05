"""Two pinned host buffers in turn, so that one is filled while the other is still being copied."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.memory import Memory


@dataclass
class PinnedPair:
    """int32 buffers of `ints` elements: `claim()`, fill it, upload from it, `sent()`."""

    memory: Memory
    ints: int
    host: tuple[np.ndarray, np.ndarray] = ()
    events: list[Any] = field(default_factory=lambda: [None, None])
    turn: int = 0

    def __post_init__(self) -> None:
        self.host = tuple(self.memory.pinned((self.ints,), np.int32) for _ in range(2))

    def claim(self) -> int:
        """Which buffer may be written now: waits for the copy out of it, two uploads ago."""
        if self.events[self.turn] is not None:
            self.memory.wait(self.events[self.turn])
        return self.turn

    def sent(self) -> None:
        """The upload from the claimed buffer is queued."""
        self.events[self.turn] = self.memory.record(self.events[self.turn])
        self.turn = 1 - self.turn
