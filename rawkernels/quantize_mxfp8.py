"""quantize_mxfp8: numbers to MXFP8 elements and scales."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.formats import MX_BLOCK
from ..layouts.sizes import div_ceil
from .arrays import as_array, backend_of, empty_like_backend
from .operations import operation


def quantize_mxfp8(
    x: Any, scale_rounding: str = "ceil", amax_floor: float = 1e-4, *, stream: Any = None
) -> tuple[Any, Any]:
    """Elements and scales of `x`: (values uint8 [..., D], scales uint8 [..., div_ceil(D, 32)]).

    x: float32 or bf16 (bfloat16 or uint16 bits) [..., D]; 32 values along the last axis share a
    scale, the last block may be short. Scale byte c means 2^(c - 127). `scale_rounding` "ceil"
    takes the smallest power of two that keeps the block's largest magnitude at or below 448 (with
    amax_floor 1e-4: DeepSeek's rule), "floor" is 2^(floor(log2(amax)) - 8) (with amax_floor 0: OCP
    MX v1.0), which saturates some elements. Elements are E4M3, round to nearest even. NaN in a
    block: scale 0xFF, elements 0x7F; infinity: scale 254 and +-448.

    Raises ArgumentError for another dtype, a scalar, a rule that does not exist, or an array that
    is not C-contiguous.
    """
    x = as_array(x, "x")
    if len(x.shape) == 0:
        raise ArgumentError("quantize_mxfp8: x is a scalar but must have at least one axis")
    width = x.shape[-1]
    blocks = div_ceil(width, MX_BLOCK)
    rows = x.reshape(_rows(x.shape), width)
    values = empty_like_backend(rows.shape, np.uint8, x)
    scales = empty_like_backend((rows.shape[0], blocks), np.uint8, x)
    operation(backend_of(x=x), "quantize_mxfp8")(
        rows, values, scales, scale_rounding=scale_rounding, amax_floor=amax_floor, stream=stream
    )
    return values.reshape(x.shape), scales.reshape(*x.shape[:-1], blocks)


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows
