"""digest_outputs: one 64-bit sum per token over the bits of its outputs."""

from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from .arrays import as_array, backend_of, empty_like_backend
from .checks import check_hash_layer
from .operations import operation


def digest_outputs(out: Any, layer: int, digests: Any = None, *, stream: Any = None) -> Any:
    """`digests` uint64 [T] with the outputs of one layer added to it, modulo 2^64; without it, a
    new one that starts at 0. Returns it.

    out: bf16 [T, ...]. A digest is a sum of keyed products (reference/digest_outputs.py has the
    formula): the order of adding does not matter, but layer, place and every bit do.
    Raises ArgumentError for other shapes or dtypes.
    """
    check_hash_layer("digest_outputs", layer)
    out = as_array(out, "out")
    if len(out.shape) < 2:
        raise ArgumentError(f"digest_outputs: out.shape={tuple(out.shape)} but must be [T, ...]")
    if digests is None:
        digests = empty_like_backend((out.shape[0],), np.uint64, out)
        digests[...] = 0
    target = as_array(digests, "digests")
    width = 1
    for extent in out.shape[1:]:
        width *= extent
    operation(backend_of(out=out, digests=target), "digest_outputs")(
        out.reshape(out.shape[0], width), layer, target, stream=stream
    )
    return digests
