"""stack_activations on every backend: the mixing rule, element by element, and equal bits."""

import numpy as np
import pytest
from helpers import Guarded, bf16, from_bf16, i32, operations, random_bf16, to_backend

import ringslab as rs
from ringslab.rawkernels.stack_activations import stack_activations


def stack(backend, previous, seed, layer, token_ids, positions):
    tokens, heads, dim = previous.shape
    q = Guarded((tokens, heads, dim), np.uint16, backend)
    kv = Guarded((tokens, dim), np.uint16, backend)
    operations(backend).stack_activations(
        to_backend(previous, backend),
        seed,
        layer,
        to_backend(i32(token_ids), backend),
        to_backend(i32(positions), backend),
        q.array,
        kv.array,
    )
    return q.host(), kv.host()


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 32), (5, 96), (64, 64)])
@pytest.mark.parametrize("seed", [0, 2**63 + 1])
def test_mixing_rule(backend, heads, dim, seed):
    """q from head (h + 1) % H, kv from head d % H; hashes of seeds 2 seed + 1 and 2 seed, modulo
    2^64; one float32 sum, rounded to nearest even."""
    rng = np.random.default_rng(heads)
    previous = random_bf16(rng, (6, heads, dim))
    tokens, positions = rng.integers(0, 1000, 6), rng.integers(0, 9999, 6)
    q, kv = stack(backend, previous, seed, 7, tokens, positions)
    hash_q, hash_kv = (
        rs.seeded_activations(s % 2**64, 7, i32(tokens), i32(positions), width).astype(np.float32)
        for s, width in ((2 * seed + 1, heads * dim), (2 * seed, dim))
    )
    before = from_bf16(previous)
    half = np.float32(0.5)
    for t in range(6):
        for d in range(dim):
            assert kv[t, d] == bf16(half * hash_kv[t, d] + before[t, d % heads, d])
        for h in range(heads):
            wanted = bf16(half * hash_q[t, h * dim : (h + 1) * dim] + before[t, (h + 1) % heads])
            np.testing.assert_array_equal(q[t, h], wanted)


def test_nan_stays_in_its_token(backend):
    """A NaN of token 1, head 2, dim 5 reaches q of head 1 and, where 5 % H = 2, kv; as 7fc0."""
    rng = np.random.default_rng(1)
    previous = random_bf16(rng, (3, 3, 32))
    clean_q, clean_kv = stack(backend, previous, 1, 1, [1, 2, 3], [4, 5, 6])
    previous[1, 2, 5] = 0xFFC3
    q, kv = stack(backend, previous, 1, 1, [1, 2, 3], [4, 5, 6])
    assert (q[1, 1, 5], kv[1, 5]) == (0x7FC0, 0x7FC0)
    q[1, 1, 5], kv[1, 5] = clean_q[1, 1, 5], clean_kv[1, 5]
    np.testing.assert_array_equal(q, clean_q)
    np.testing.assert_array_equal(kv, clean_kv)


def test_public_entry(fast_backend):
    """Allocates both outputs; no tokens gives empty ones; a matrix is refused."""
    previous = to_backend(random_bf16(np.random.default_rng(1), (2, 3, 32)), fast_backend)
    ids = to_backend(i32([1, 2]), fast_backend)
    q, kv = stack_activations(previous, 3, 1, ids, ids)
    assert (q.shape, kv.shape) == ((2, 3, 32), (2, 32))
    q, kv = stack_activations(previous[:0], 3, 1, ids[:0], ids[:0])
    assert (q.shape, kv.shape) == ((0, 3, 32), (0, 32))
    with pytest.raises(rs.errors.ArgumentError, match=r"\[T, H, D\]"):
        stack_activations(previous[0], 3, 1, ids, ids)
    with pytest.raises(rs.errors.ArgumentError, match=r"token_ids\.shape\[0\]=1"):
        stack_activations(previous, 3, 1, ids[:1].copy(), ids)
