"""NVTX ranges through CuPy, for machines without the nvtx package."""

from collections.abc import Callable


def cupy_ranges() -> tuple[Callable[[str], None], Callable[[], None]] | None:
    """CuPy's (push, pop) of NVTX ranges, or None where there is no CuPy."""
    try:
        from cupy.cuda import nvtx
    except ImportError:
        return None
    return nvtx.RangePush, nvtx.RangePop
