"""Device memory of window_prefill over records of K and V apart: the decoded keys and values of one
launch. Apart from its launcher, so that an engine can state sizes without loading kernels."""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...layouts.formats import RecordFormat
from ...layouts.plans import PrefillPlan
from ...layouts.sizes import align_up
from ..device.streams import cupy_stream

SCRATCH_ALIGN = 512  # bytes between arrays; CuPy's pool gives whole pieces of it


class PrefillScratch(NamedTuple):
    """What a launch works with: int32 [num_seqs + 2] twice, and keys and values
    [most_keys, num_kv_heads, head_dim] as uint16 bits or float16."""

    q_ends: Any
    cu_seqlens_k: Any
    k: Any
    v: Any


def scratch_bytes(num_seqs: int, num_keys: int, fmt: RecordFormat) -> int:
    """Bytes that a launch over so many sequences and keys (`PrefillPlan.most_keys`) works with."""
    return 2 * sum(_padded_bytes(num_seqs, num_keys, fmt))


def _padded_bytes(num_seqs: int, num_keys: int, fmt: RecordFormat) -> tuple[int, int]:
    """Of one of the bounds, and of the keys or the values."""
    sizes = 4 * (num_seqs + 2), 2 * num_keys * fmt.num_kv_heads * fmt.head_dim
    return tuple(align_up(size, SCRATCH_ALIGN) for size in sizes)


def cut_scratch(buffer: Any, plan: PrefillPlan, fmt: RecordFormat) -> PrefillScratch:
    """The arrays of a launch, in a buffer uint8 [scratch_bytes] or longer."""
    bounds, vectors = _padded_bytes(plan.num_seqs, plan.most_keys, fmt)
    rows = (plan.most_keys, fmt.num_kv_heads, fmt.head_dim)
    dtype = np.dtype(np.float16 if fmt.type == "fp16" else np.uint16)

    def part(start: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    ends = [part(start, (plan.num_seqs + 2,), np.dtype(np.int32)) for start in (0, bounds)]
    first = 2 * bounds
    return PrefillScratch(*ends, *(part(at, rows, dtype) for at in (first, first + vectors)))


def take_scratch(plan: PrefillPlan, fmt: RecordFormat, stream: Any) -> PrefillScratch:
    """The same in memory of CuPy's pool, for `stream`."""
    import cupy

    size = scratch_bytes(plan.num_seqs, plan.most_keys, fmt)
    with cupy_stream(stream):  # the pool gives a stream's memory to that stream's next taker
        return cut_scratch(cupy.empty(size, np.uint8), plan, fmt)
