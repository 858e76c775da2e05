"""Scratch memory of kernels, kept for each stream: launches on one stream follow one another, so
they can share it; launches on two streams may not."""

from collections.abc import Callable
from functools import cache
from typing import Any

from .probe import current_device
from .streams import refuse_in_capture, stream_pointer


def stream_workspace(what: str, make: Callable[[], Any], stream: Any = None) -> Any:
    """What `make()` allocates, made at a stream's first call with this name and kept.

    Raises BackendError where the stream is being captured and has none yet.
    """
    kept = _kept(current_device(), stream_pointer(stream))
    if what not in kept:
        refuse_in_capture(f"taking memory for {what} on a stream that has none")
        kept[what] = (make, make())
    return kept[what][1]


def take_workspaces_of(other: int) -> bool:
    """Gives the current stream what the stream at address `other` has, of its own; whether there
    was any. For a graph that is captured on a stream of its own: it may then be launched anywhere,
    as long as nothing else uses that stream."""
    device = current_device()
    found, own = _kept(device, other), _kept(device, stream_pointer())
    for what, (make, _) in found.items():
        if what not in own:
            own[what] = (make, make())
    return bool(found)


@cache
def _kept(device: int, stream: int) -> dict[str, tuple[Callable[[], Any], Any]]:
    return {}
