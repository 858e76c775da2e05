"""digest_outputs: one 64-bit sum per token over all its output bits, whatever the order."""

from typing import Any

import numpy as np

from ..checks import check_digest_outputs
from .activation_hash import pair_hashes, splitmix64

TERM_ELEMENTS = 4  # a term multiplies two words of two bf16 elements, the first the lower half


def digest_outputs(out: Any, layer: int, digests: Any, *, stream: Any = None) -> None:
    """out bf16 [T, width]; adds to digests uint64 [T], modulo 2^64, the digest of the row's bits.

    The row is cut into words w[j] of two elements, zeros behind its end, and each word has a key
    k[j], the pair hash of (splitmix64(layer), j). Words are taken two at a time: the digest is the
    sum over i of (w[2i] + k[2i] mod 2^32) * (w[2i + 1] + k[2i + 1] mod 2^32). This is the NH hash
    of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999): terms may be added in any order, and
    rows that differ anywhere have one digest with probability 2^-32. -0 and +0 differ.
    """
    check_digest_outputs(out, digests)
    tokens, width = out.shape
    padded = np.zeros((tokens, -(-width // TERM_ELEMENTS) * TERM_ELEMENTS), np.uint16)
    padded[:, :width] = out.view(np.uint16)
    words = padded[:, 0::2].astype(np.uint32) | padded[:, 1::2].astype(np.uint32) << np.uint32(16)
    key = splitmix64(np.full((1, 1), layer, np.uint64))
    keyed = words + pair_hashes(key, np.arange(words.shape[1], dtype=np.uint32)[None])
    terms = keyed[:, 0::2].astype(np.uint64) * keyed[:, 1::2].astype(np.uint64)
    with np.errstate(over="ignore"):
        digests += terms.sum(axis=1, dtype=np.uint64)
