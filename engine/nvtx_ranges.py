"""NVTX ranges around the phases of a run: step, plan, and each operation with layer and batch size.

Off unless a profiler is attached, and then a range costs one attribute test. The nvtx package is
used where it is installed, CuPy's binding where it is not.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from ..rawkernels.device.ranges import cupy_ranges

DOMAIN = "ringslab"
# Set by Nsight Systems and Nsight Compute in the process they profile. RINGSLAB_NVTX=1 asks for
# ranges where a tool attaches in another way, 0 keeps them off.
INJECTION_VARIABLES = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH")
_OFF = nullcontext()


@dataclass(frozen=True)
class Ranges:
    """`span(name, ...)` is a context manager; with `enabled` False it does nothing."""

    enabled: bool
    push: Callable[[str], None]
    pop: Callable[[], None]

    def span(self, name: str, layer: int | None = None, size: int | None = None):
        """A range `name`, or `name layer=3 tokens=96`."""
        return self._span(name, layer, size) if self.enabled else _OFF

    @contextmanager
    def _span(self, name: str, layer: int | None, size: int | None):
        parts = [name]
        if layer is not None:
            parts.append(f"layer={layer}")
        if size is not None:
            parts.append(f"tokens={size}")
        self.push(" ".join(parts))
        try:
            yield
        finally:
            self.pop()


NO_RANGES = Ranges(False, lambda message: None, lambda: None)


def load_ranges() -> Ranges:
    """Ranges for this process, decided now: on where a profiler has set up NVTX, or where
    RINGSLAB_NVTX=1, and either binding is there."""
    wish = os.environ.get("RINGSLAB_NVTX")
    attached = any(os.environ.get(name) for name in INJECTION_VARIABLES)
    if wish == "0" or not (attached or wish == "1"):
        return NO_RANGES
    try:
        import nvtx
    except ImportError:
        functions = cupy_ranges()
        return NO_RANGES if functions is None else Ranges(True, *functions)
    return Ranges(
        True,
        lambda message: nvtx.push_range(message, domain=DOMAIN),
        lambda: nvtx.pop_range(domain=DOMAIN),
    )
