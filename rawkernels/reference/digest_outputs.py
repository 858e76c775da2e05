"""digest_outputs: one 64-bit sum per token over all its output bits, whatever the order."""

from typing import Any

import numpy as np

from ..checks import check_digest_outputs
from .activation_hash import splitmix64

LAYER_SHIFT = np.uint64(48)  # layer above bit 48, element from bit 16, the value's bits below
ELEMENT_SHIFT = np.uint64(16)


def digest_outputs(out: Any, layer: int, digests: Any, *, stream: Any = None) -> None:
    """out bf16 [T, width]; adds to digests uint64 [T], modulo 2^64, the sum over elements e of
    splitmix64(layer << 48 ^ e << 16 ^ bits). -0 and +0 differ."""
    check_digest_outputs(out, digests)
    bits = out.view(np.uint16).astype(np.uint64)  # [T, width]
    element = np.arange(out.shape[1], dtype=np.uint64) << ELEMENT_SHIFT
    mixed = splitmix64((np.uint64(layer) << LAYER_SHIFT) ^ element[None] ^ bits)
    with np.errstate(over="ignore"):
        digests += mixed.sum(axis=1, dtype=np.uint64)
