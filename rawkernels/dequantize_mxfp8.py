"""dequantize_mxfp8: MXFP8 elements and scales to float32."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.formats import MX_BLOCK
from ..layouts.sizes import div_ceil
from .arrays import as_array, backend_of, empty_like_backend
from .operations import operation


def dequantize_mxfp8(values: Any, scales: Any, *, stream: Any = None) -> Any:
    """float32 [..., D] of E4M3 bytes uint8 [..., D] and E8M0 bytes uint8 [..., div_ceil(D, 32)].

    Exact: element times 2^(code - 127). Scale 0xFF and elements 0x7F and 0xFF are NaN.
    Raises ArgumentError where the shapes do not belong together or a dtype is not uint8.
    """
    values, scales = as_array(values, "values"), as_array(scales, "scales")
    if len(values.shape) == 0 or len(values.shape) != len(scales.shape):
        raise ArgumentError(
            f"dequantize_mxfp8: values.shape={tuple(values.shape)} and "
            f"scales.shape={tuple(scales.shape)} must have the same axes, at least one"
        )
    width = values.shape[-1]
    wanted = (*values.shape[:-1], div_ceil(width, MX_BLOCK))
    if tuple(scales.shape) != wanted:
        raise ArgumentError(
            f"dequantize_mxfp8: scales.shape={tuple(scales.shape)} but "
            f"values.shape={tuple(values.shape)} needs {wanted}"
        )
    rows = 1
    for extent in values.shape[:-1]:
        rows *= extent
    out = empty_like_backend((rows, width), np.float32, values)
    operation(backend_of(values=values, scales=scales), "dequantize_mxfp8")(
        values.reshape(rows, width), scales.reshape(rows, wanted[-1]), out, stream=stream
    )
    return out.reshape(values.shape)
