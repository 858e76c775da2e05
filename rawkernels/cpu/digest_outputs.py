"""digest_outputs on the CPU."""

from typing import Any

import numpy as np
from numba import prange

from ..arrays import bf16_bits
from ..checks import check_digest_outputs
from .activation_hash import pair_hash, splitmix64
from .kernels import device_function, kernel, launch


@device_function
def _keyed_word(row, e, key):
    """The word of elements e and e + 1, zeros behind the row's end, plus its key, modulo 2^32."""
    low = np.uint32(row[e]) if e < row.size else np.uint32(0)
    high = np.uint32(row[e + 1]) if e + 1 < row.size else np.uint32(0)
    word = np.uint32(low | np.uint32(high << np.uint32(16)))
    return np.uint32(word + pair_hash(key, e >> 1))


@kernel
def _add_digests(out, layer, digests):
    key = splitmix64(np.uint64(layer))
    for t in prange(out.shape[0]):
        row = out[t]
        total = np.uint64(0)
        for e in range(0, row.size, 4):
            total += np.uint64(_keyed_word(row, e, key)) * np.uint64(_keyed_word(row, e + 2, key))
        digests[t] += total


def digest_outputs(out: Any, layer: int, digests: Any, *, stream: Any = None) -> None:
    """out bf16 [T, width]; adds to digests uint64 [T], modulo 2^64."""
    check_digest_outputs(out, digests)
    if out.size == 0:
        return
    launch(_add_digests, out.size, bf16_bits(out, "out"), np.uint64(layer), digests)
