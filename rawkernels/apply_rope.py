"""apply_rope: rotary embedding of the last dims of vectors."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from ..layouts.rope import Rope
from .arrays import BF16, as_array, backend_of, empty_like_backend
from .checks import check_flag
from .operations import operation


def apply_rope(
    x: Any,
    positions: Any,
    rope: Rope,
    inverse: bool = False,
    out: Any = None,
    *,
    stream: Any = None,
) -> Any:
    """`x` with its last `rope.dims` dims rotated by each token's position; returns `out`.

    x: bf16 (bfloat16 or uint16 bits) or float32 [T, H, D] (or [T, D]); positions int32 [T];
    `inverse` rotates backwards. `out`, of x's shape and dtype, may be `x` itself. Cosines and sines
    are float32, products and sums float32 one by one, then rounded to x's dtype: the same bits on
    every backend (the rule of layouts/rope.py).
    Raises ArgumentError for other shapes or dtypes, and for rope.dims above D.
    """
    check_flag("apply_rope", "inverse", inverse)
    x, positions = as_array(x, "x"), as_array(positions, "positions")
    if len(x.shape) not in (2, 3):
        raise ArgumentError(f"apply_rope: x.shape={tuple(x.shape)} but must be [T, H, D] or [T, D]")
    if out is None:
        out = empty_like_backend(x.shape, np.float32 if x.dtype == np.float32 else BF16, x)
    target = as_array(out, "out")
    if tuple(target.shape) != tuple(x.shape):
        raise ArgumentError(
            f"apply_rope: out.shape={tuple(target.shape)} but x.shape={tuple(x.shape)}"
        )
    by_head = (x.shape[0], 1, x.shape[1]) if len(x.shape) == 2 else x.shape
    operation(backend_of(x=x, positions=positions, out=target), "apply_rope")(
        x.reshape(by_head),
        positions,
        target.reshape(by_head),
        rope=rope,
        inverse=inverse,
        stream=stream,
    )
    return out
