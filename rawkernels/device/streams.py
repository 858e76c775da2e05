"""Streams: what a `stream` argument may be, and whether a graph is being captured."""

from typing import Any

from ...layouts.errors import ArgumentError, BackendError


def cupy_stream(stream: Any) -> Any:
    """A CuPy stream for `stream`: None (the current stream), a CuPy stream, or any object with
    `__cuda_stream__` (numba, cuda.core, torch). Raises ArgumentError for anything else."""
    import cupy

    if stream is None:
        return cupy.cuda.get_current_stream()
    if hasattr(stream, "ptr"):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        described = stream.__cuda_stream__
        version_and_pointer = described() if callable(described) else described
        return cupy.cuda.ExternalStream(int(version_and_pointer[1]))
    raise ArgumentError(
        f"stream: got {type(stream).__name__}; pass a CuPy stream, an object with "
        "__cuda_stream__, or None for the current stream"
    )


def stream_pointer(stream: Any = None) -> int:
    """Address of the stream, for libraries that take one."""
    return int(cupy_stream(stream).ptr)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    import cupy

    try:
        return cupy.cuda.get_current_stream().is_capturing()
    except cupy.cuda.runtime.CUDARuntimeError:  # another stream captures; the null stream may not
        return True


def refuse_in_capture(what: str) -> None:
    """Raises BackendError while this thread captures a CUDA graph: `what` must come before."""
    if is_capturing():
        raise BackendError(
            f"{what} is not possible while a CUDA graph is captured; run the operation once on the "
            "same shapes before the capture"
        )
