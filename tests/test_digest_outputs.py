"""digest_outputs on every backend: a plain-Python model, and what a digest notices."""

import numpy as np
import pytest
from helpers import MASK64, Guarded, operations, random_bf16, splitmix64, to_backend, to_host

import ringslab as rs
from ringslab.rawkernels.digest_outputs import digest_outputs

MASK32 = 2**32 - 1


def digest(backend, out, layer, start=None):
    digests = Guarded((out.shape[0],), np.uint64, backend)
    digests.array[...] = 0 if start is None else to_backend(start, backend)
    operations(backend).digest_outputs(to_backend(out, backend), layer, digests.array)
    return digests.host()


def word_key(layer, j):
    """The pair hash of (splitmix64(layer), j)."""
    key = splitmix64(layer)
    x = ((key & MASK32) + j * 0x9E3779B9 & MASK32) ^ key >> 32
    x = (x ^ x >> 16) * 0x7FEB352D & MASK32
    x = (x ^ x >> 15) * 0x846CA68B & MASK32
    return x ^ x >> 16


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1500])
def test_against_python_integers(backend, width):
    """Sums over pairs of words of their products, each word plus its key, on top of what was there,
    modulo 2^64; the row is filled up with zeros to whole pairs."""
    out = random_bf16(np.random.default_rng(width), (3, width))
    start = np.array([0, 2**64 - 1, 12345], np.uint64)
    found = digest(backend, out, 42, start)
    for t in range(3):
        total = int(start[t])
        bits = [int(b) for b in out[t]] + [0] * (-width % 4)
        words = [low | high << 16 for low, high in zip(bits[0::2], bits[1::2], strict=True)]
        keyed = [word + word_key(42, j) & MASK32 for j, word in enumerate(words)]
        total += sum(a * b for a, b in zip(keyed[0::2], keyed[1::2], strict=True))
        assert int(found[t]) == total & MASK64


def test_notices_every_bit_place_and_layer(backend):
    """One bit, -0 for +0, two elements exchanged within a word and two words within a term, two
    terms exchanged, another layer: another digest, in that token only."""
    out = random_bf16(np.random.default_rng(5), (2, 128))
    out[0, 3] = 0
    base = digest(backend, out, 1)
    changes = []
    for _ in range(5):
        changes.append(out.copy())
    changes[0][0, 100] ^= 1
    changes[1][0, 3] = 0x8000
    changes[2][0, [6, 7]] = out[0, [7, 6]]
    changes[3][0, 8:12] = out[0, [10, 11, 8, 9]]
    changes[4][0, 16:24] = out[0, [20, 21, 22, 23, 16, 17, 18, 19]]
    for changed in changes:
        found = digest(backend, changed, 1)
        assert found[0] != base[0]
        assert found[1] == base[1]
    assert (digest(backend, out, 2) != base).all()


def test_public_entry(fast_backend):
    """[T, H, D] is flattened; digests add up over layers; no tokens is fine."""
    out = to_backend(random_bf16(np.random.default_rng(5), (4, 3, 32)), fast_backend)
    first = digest_outputs(out, 0)
    both = digest_outputs(out, 1, digest_outputs(out, 0))
    again = to_host(first) + to_host(digest_outputs(out, 1))
    np.testing.assert_array_equal(to_host(both), again)
    assert digest_outputs(out[:0], 0).shape == (0,)
    with pytest.raises(rs.errors.ArgumentError, match="uint64"):
        digest_outputs(out, 0, to_backend(np.zeros(4, np.int64), fast_backend))
