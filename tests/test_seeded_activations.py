"""seeded_activations on every backend: worked values, a plain-Python model, equal bits."""

import ml_dtypes
import numpy as np
import pytest
from helpers import MASK64, Guarded, from_bf16, i32, operations, splitmix64, to_backend, to_host

import ringslab as rs

MASK32 = 2**32 - 1


def seeded(backend, seed, layer, token_ids, positions, width):
    out = Guarded((len(token_ids), width), np.uint16, backend)
    operations(backend).seeded_activations(
        seed,
        layer,
        to_backend(i32(token_ids), backend),
        to_backend(i32(positions), backend),
        out.array,
    )
    return out.host()


def model(seed, layer, token_id, position, e):
    """One element in Python integers."""
    key = seed & MASK64
    for word in (layer, token_id, position):
        key = splitmix64(key ^ (word * 0x9E3779B97F4A7C15 & MASK64))
    x = (key + (e // 2) * 0x9E3779B9) & MASK32
    x ^= key >> 32
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    x ^= x >> 16
    low = x >> (16 * (e % 2))
    return ((low & 0xFF) + ((low >> 8) & 0xFF) - 255) / 128


def test_splitmix64_vector():
    """The published first output for seed 0."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 2**64 + 5])
def test_against_python_integers(backend, seed):
    """Odd widths, the largest token and position, seeds past 2^64 (taken modulo)."""
    tokens, positions = [0, 1, 129_279, 2**31 - 1], [0, 5, 1_000_000, 2**31 - 2]
    for width in (1, 2, 7, 64):
        found = from_bf16(seeded(backend, seed, 42, tokens, positions, width))
        wanted = [
            [model(seed, 42, t, p, e) for e in range(width)]
            for t, p in zip(tokens, positions, strict=True)
        ]
        np.testing.assert_array_equal(found, np.float32(wanted))


def test_pure_function_of_its_row(backend):
    """A row depends on (seed, layer, token, position) alone, not on the batch or the width."""
    rng = np.random.default_rng(0)
    tokens, positions = rng.integers(0, 1000, 50), rng.integers(0, 9999, 50)
    whole = seeded(backend, 7, 3, tokens, positions, 100)
    np.testing.assert_array_equal(
        whole[20:21], seeded(backend, 7, 3, tokens[20:21], positions[20:21], 100)
    )
    np.testing.assert_array_equal(whole[:, :33], seeded(backend, 7, 3, tokens, positions, 33))
    for other in (
        seeded(backend, 8, 3, tokens, positions, 100),
        seeded(backend, 7, 4, tokens, positions, 100),
        seeded(backend, 7, 3, tokens + 1, positions, 100),
        seeded(backend, 7, 3, tokens, positions + 1, 100),
    ):
        assert (other == whole).mean() < 0.02  # equal values by chance: 1 in 384


def test_distribution(backend):
    """400,000 values: mean 0, variance 0.667 (two bytes: (256^2 - 1) / 6 / 128^2), range
    +-255/128, neighbours uncorrelated."""
    x = from_bf16(seeded(backend, 1, 0, range(400), range(400), 1000)).astype(np.float64)
    assert abs(x.mean()) < 0.005
    assert x.var() == pytest.approx(0.66666, abs=0.005)
    assert np.abs(x).max() <= 255 / 128
    for shifted in (x[:, 1:] * x[:, :-1], x[1:] * x[:-1]):
        assert abs(shifted.mean()) < 0.005


def test_public_entry(fast_backend):
    """Allocates bf16, fills a given `out`, takes lists; a wrong width is refused."""
    tokens = to_backend(i32([1, 2, 3]), fast_backend)
    out = rs.seeded_activations(5, 0, tokens, tokens, 12)
    np.testing.assert_array_equal(
        to_host(out).view(np.uint16), seeded("reference", 5, 0, [1, 2, 3], [1, 2, 3], 12)
    )
    assert rs.seeded_activations(5, 0, tokens, tokens, 12, out=out) is out
    assert rs.seeded_activations(5, 0, tokens[:0], tokens[:0], 12).shape == (0, 12)
    if fast_backend == "cpu":
        assert rs.seeded_activations(5, 0, [1], [2], 4).dtype == ml_dtypes.bfloat16
    with pytest.raises(rs.errors.ArgumentError, match=r"out\.shape"):
        rs.seeded_activations(5, 0, tokens, tokens, 13, out=out)
