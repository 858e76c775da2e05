"""Rotation tables on the GPU, one for each (Rope, device), made at first use and kept."""

from functools import cache
from typing import Any

from ...layouts.rope import Rope
from ..device.probe import current_device
from ..device.streams import refuse_in_capture
from ..rope_tables import cached_rope_table


def device_rope_table(rope: Rope) -> Any:
    """CuPy float64 [TABLE_ROWS, dims / 2, 2] on the current device.

    The first call for a rope copies 2 MB and waits for it, so it must come before the current
    stream is captured into a graph; BackendError says so otherwise.
    """
    return _table(rope, current_device())


@cache  # kept for good: captured graphs have its address
def _table(rope: Rope, device: int) -> Any:
    refuse_in_capture("making a rotation table")
    import cupy

    table = cupy.asarray(cached_rope_table(rope))
    cupy.cuda.get_current_stream().synchronize()  # later launches may be on other streams
    return table
