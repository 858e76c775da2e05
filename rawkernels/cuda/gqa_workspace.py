"""Device memory of decode kernels that share a sequence among several thread blocks."""

from typing import Any

from ...layouts.formats import RecordFormat
from ..device.workspaces import stream_workspace
from .gqa_shapes import MAX_SPLIT_BYTES, MAX_UNITS, Cut, state_words

SPLIT_SCRATCH_BYTES = MAX_SPLIT_BYTES + 4 * MAX_UNITS  # partial states, uint32 counters


def split_bytes(fmt: RecordFormat, cut: Cut, units: int, num_parts: int) -> int:
    """Bytes of partial states of `units` blocks, every part of every one."""
    return units * cut.heads * num_parts * 4 * state_words(fmt.head_dim, cut.row_tiles) * 32


def split_workspace(
    fmt: RecordFormat, cut: Cut, units: int, num_parts: int, stream: Any, scratch: Any = None
) -> tuple[Any, Any]:
    """Partial states and counters for a launch on `stream`; (None, None) with one split.

    They are `scratch`, the caller's, for launches that follow one another: float32
    [MAX_SPLIT_BYTES / 4], and uint32 [MAX_UNITS], zeros before the first. Without it the same is
    taken at a stream's first split launch and kept; DeviceMemoryError where it does not fit.
    """
    if cut.splits == 1:
        return None, None
    assert split_bytes(fmt, cut, units, num_parts) <= MAX_SPLIT_BYTES, "choose_cut bounds them"
    assert units <= MAX_UNITS, "choose_cut bounds them"
    if scratch is not None:
        partials, counters = scratch
        assert partials.nbytes >= MAX_SPLIT_BYTES, "whatever the cut"
        assert counters.nbytes >= 4 * MAX_UNITS, "whatever the cut"
        return partials, counters
    return stream_workspace("partial sums", SPLIT_SCRATCH_BYTES, _make, stream)


def _make() -> tuple[Any, Any]:
    import cupy

    return cupy.empty(MAX_SPLIT_BYTES // 4, "float32"), cupy.zeros(MAX_UNITS, "uint32")
