"""Scratch memory of kernels, kept for each stream: launches on one stream follow one another, so
they can share it; launches on two streams may not."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ...layouts.errors import DeviceMemoryError
from .probe import current_device, device_bytes
from .streams import refuse_in_capture, stream_pointer

PER_THREAD_STREAM = 2  # cudaStreamPerThread: one address, a stream of its own in each thread


def stream_workspace(what: str, num_bytes: int, make: Callable[[], Any], stream: Any = None) -> Any:
    """What `make()` allocates, `num_bytes` in all, made at a stream's first call with this name and
    kept.

    Raises BackendError where the stream is being captured and has none yet, DeviceMemoryError with
    both numbers where it does not fit.
    """
    kept = _workspaces_of(stream)
    if what not in kept:
        refuse_in_capture(f"taking memory for {what} on a stream that has none")
        kept[what] = _made(what, num_bytes, make)
    return kept[what]


def _made(what: str, num_bytes: int, make: Callable[[], Any]) -> Any:
    from cupy.cuda.memory import OutOfMemoryError

    try:
        return make()
    except OutOfMemoryError as error:
        device = current_device()
        free = device_bytes(device)[0]
        raise DeviceMemoryError(
            f"{what}: needs {num_bytes:,} bytes but {free:,} are free on cuda:{device} ({error})"
        ) from error


@contextmanager
def lent_workspaces(owner: Any) -> Iterator[dict[str, Any]]:
    """While it lasts, the current stream has what stream `owner` has, and nothing else: for a graph
    that is captured on a stream of its own. Yields it by name. Whoever launches the graph keeps it,
    and lets launches and what `owner` runs follow one another."""
    own = _workspaces_of(None)
    before, lent = dict(own), dict(_workspaces_of(owner))

    def replace(workspaces: dict[str, Any]) -> None:
        own.clear()
        own.update(workspaces)

    # A stream that is gone may have had this address, and graphs of it may still use what it had.
    replace(lent)
    try:
        yield lent
    finally:
        replace(before)


def _workspaces_of(stream: Any) -> dict[str, Any]:
    pointer = stream_pointer(stream)
    thread = threading.get_ident() if pointer == PER_THREAD_STREAM else 0
    return _kept(current_device(), pointer, thread)


@cache
def _kept(device: int, stream: int, thread: int) -> dict[str, Any]:
    return {}
