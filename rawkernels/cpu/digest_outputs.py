"""digest_outputs on the CPU."""

from typing import Any

import numpy as np
from numba import prange

from ..arrays import bf16_bits
from ..checks import check_digest_outputs
from .activation_hash import splitmix64
from .kernels import kernel, launch


@kernel
def _add_digests(out, layer, digests):
    tokens, width = out.shape
    for t in prange(tokens):
        total = np.uint64(0)
        for e in range(width):
            word = (np.uint64(layer) << np.uint64(48)) ^ (np.uint64(e) << np.uint64(16))
            total += splitmix64(word ^ np.uint64(out[t, e]))
        digests[t] += total


def digest_outputs(out: Any, layer: int, digests: Any, *, stream: Any = None) -> None:
    """out bf16 [T, width]; adds to digests uint64 [T], modulo 2^64."""
    check_digest_outputs(out, digests)
    if out.size == 0:
        return
    launch(_add_digests, out.size, bf16_bits(out, "out"), np.uint64(layer), digests)
