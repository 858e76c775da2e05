"""apply_rope on every backend: worked angles, both pairings, equal bits at every position."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from helpers import Guarded, bf16, i32, operations, random_bf16, to_backend, to_host

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION
from ringslab.layouts.rope import rope_frequencies

YARN = rs.Yarn(factor=16, original_length=65536, beta_fast=32, beta_slow=1)
ROPES = [
    rs.Rope(10000.0, 64, "adjacent"),
    rs.Rope(10000.0, 64, "half"),
    rs.Rope(160000.0, 64, "adjacent", YARN),
    rs.Rope(500000.0, 2, "half"),
]
POSITIONS = [0, 1, 2, 1023, 1024, 1025, 65535, 2**20 - 1, 2**20, 123456789, MAX_POSITION]


def rotate(backend, x, positions, rope, inverse=False):
    out = Guarded(x.shape, x.dtype, backend)
    operations(backend).apply_rope(
        to_backend(x, backend),
        to_backend(positions, backend),
        out.array,
        rope=rope,
        inverse=inverse,
    )
    return out.host()


def unit_pair(rope, pair, dim):
    """float32 [1, 1, dim]: 1 in the first dim of a pair, so that its cosine and sine come out."""
    x = np.zeros((1, 1, dim), np.float32)
    x[0, 0, dim - rope.dims + (2 * pair if rope.pairing == "adjacent" else pair)] = 1
    return x


def test_p01_theta_belongs_to_the_layer_type(backend):
    """Position 1000, 64 dims, pair 8: theta 10000 turns by 100.0, cos 0.862319; theta 160000 by
    50.0, cos 0.964966."""
    for theta, cos in ((10000.0, 0.862319), (160000.0, 0.964966)):
        rope = rs.Rope(theta, 64, "adjacent")
        out = rotate(backend, unit_pair(rope, 8, 64), i32([1000]), rope)
        assert out[0, 0, 16] == pytest.approx(cos, abs=1e-6)


def test_p04_positions_are_never_rounded(backend):
    """Position 15962 at pair 0: cos -0.908016 (15936, its bf16, gives -0.267950). Position 4095
    with frequency 0.1 (theta 100, 4 dims, pair 1): the angle is 409.5."""
    rope = rs.Rope(10000.0, 64, "adjacent")
    out = rotate(backend, unit_pair(rope, 0, 64), i32([15962]), rope)
    assert out[0, 0, 0] == pytest.approx(-0.908016, abs=1e-6)
    rope = rs.Rope(100.0, 4, "half")
    out = rotate(backend, unit_pair(rope, 1, 4), i32([4095]), rope)
    assert out[0, 0, 1] == pytest.approx(np.cos(409.5), abs=1e-6)
    assert out[0, 0, 3] == pytest.approx(np.sin(409.5), abs=1e-6)


def test_p09_pairings(backend):
    """x = [1, 2, 3, 4], frequencies [1, 0.01] (theta 10000, 4 dims), position 1; at position 0 both
    pairings give x back."""
    wanted = {
        "adjacent": [-1.142640, 1.922076, 2.959851, 4.029800],
        "half": [-1.984111, 1.959901, 2.462378, 4.019800],
    }
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    for pairing, numbers in wanted.items():
        rope = rs.Rope(10000.0, 4, pairing)
        np.testing.assert_allclose(rotate(backend, x, i32([1]), rope)[0, 0], numbers, atol=1e-6)
        np.testing.assert_array_equal(rotate(backend, x, i32([0]), rope), x)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_angles_against_float64(backend, rope):
    """Cosines and sines at positions up to 2^31 - 2 are within 2 units of 2^-24 of those of the
    float64 angle, whose own error there is below 2^31 * 2^-53 * 2^8."""
    dim = rope.dims
    positions = i32(POSITIONS)
    angles = positions[:, None].astype(np.float64) * rope_frequencies(rope)
    x = np.zeros((len(positions), 1, dim), np.float32)
    first = slice(0, None, 2) if rope.pairing == "adjacent" else slice(0, dim // 2)
    second = slice(1, None, 2) if rope.pairing == "adjacent" else slice(dim // 2, None)
    x[:, :, first] = 1
    out = rotate(backend, x, positions, rope)[:, 0]
    tolerance = 2.0**-23 + positions[:, None].astype(np.float64) * 2.0**-50
    assert (np.abs(out[:, first] - np.cos(angles)) <= tolerance).all()
    assert (np.abs(out[:, second] - np.sin(angles)) <= tolerance).all()


@pytest.mark.parametrize(
    ("rope", "inverse"), list(itertools.product(ROPES, (False, True))), ids=str
)
@pytest.mark.parametrize("dtype", ["bf16", "float32"])
def test_same_bits_as_the_reference(fast_backend, rope, inverse, dtype):
    """Random vectors of 96 dims and 3 heads at edge positions, random ones and -1 (padding, which
    counts as 0): equal bit for bit, and the dims before the rotary ones are copied, NaN payloads
    too."""
    rng = np.random.default_rng(11)
    drawn = rng.integers(0, MAX_POSITION, 50, dtype=np.int64)
    positions = i32([*POSITIONS, -1, *drawn])
    x = rng.standard_normal((len(positions), 3, 96), np.float32)
    x = x if dtype == "float32" else bf16(x)
    x.view(np.uint16).reshape(len(positions), 3, -1)[:, :, :2] = 0x7FA3
    found = rotate(fast_backend, x, positions, rope, inverse)
    wanted = rotate("reference", x, positions, rope, inverse)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))
    kept = 96 - rope.dims
    np.testing.assert_array_equal(
        found.view(np.uint8).reshape(len(positions), 3, 96, -1)[:, :, :kept],
        x.view(np.uint8).reshape(len(positions), 3, 96, -1)[:, :, :kept],
    )


def test_inverse_undoes(backend):
    """Rotation and its inverse give x back within two float32 roundings."""
    rope = rs.Rope(10000.0, 32, "half")
    x = np.random.default_rng(2).standard_normal((20, 2, 32), np.float32)
    positions = np.arange(0, 2000, 100, dtype=np.int32)
    back = rotate(backend, rotate(backend, x, positions, rope), positions, rope, inverse=True)
    np.testing.assert_allclose(back, x, atol=2e-6)


def test_bf16_is_rounded_once(backend):
    """The bf16 result is the float32 result rounded to nearest even; a NaN becomes 7fc0."""
    rope = rs.Rope(10000.0, 64, "adjacent")
    x = random_bf16(np.random.default_rng(5), (30, 4, 64))
    positions = np.arange(1000, 1030, dtype=np.int32)
    single = rotate(backend, x.view(ml_dtypes.bfloat16).astype(np.float32), positions, rope)
    np.testing.assert_array_equal(rotate(backend, x, positions, rope), bf16(single))
    x[3, 1, 10] = 0xFFC1
    assert (rotate(backend, x, positions, rope)[3, 1, 10:12] == 0x7FC0).all()


def test_in_place_and_empty(backend):
    """`out` may be `x`; no tokens is nothing to do."""
    rope = rs.Rope(10000.0, 32, "adjacent")
    x = random_bf16(np.random.default_rng(6), (7, 2, 64))
    positions = np.arange(50, 57, dtype=np.int32)
    wanted = rotate("reference", x, positions, rope)
    same = to_backend(x.copy(), backend)
    operations(backend).apply_rope(same, to_backend(positions, backend), same, rope=rope)
    np.testing.assert_array_equal(to_host(same), wanted)
    assert rotate(backend, x[:0], positions[:0], rope).shape == (0, 2, 64)


def test_public_entry():
    """[T, D] and [T, H, D], bfloat16 out for bfloat16 in; wrong shapes name both sides."""
    rope = rs.Rope(10000.0, 32, "adjacent")
    x = random_bf16(np.random.default_rng(6), (7, 64)).view(ml_dtypes.bfloat16)
    out = rs.apply_rope(x, list(range(7)), rope)
    assert out.dtype == ml_dtypes.bfloat16
    assert out.shape == (7, 64)
    assert rs.apply_rope(x, list(range(7)), rope, out=x) is x
    np.testing.assert_array_equal(x, out)
    with pytest.raises(rs.errors.ArgumentError, match=r"rope\.dims=32 but the vectors have 16"):
        rs.apply_rope(np.zeros((2, 1, 16), np.float32), [0, 1], rope)
    with pytest.raises(rs.errors.ArgumentError, match=r"positions\.shape\[0\]=3"):
        rs.apply_rope(x, [0, 1, 2], rope)
    with pytest.raises(rs.errors.ArgumentError, match="int64"):
        rs.apply_rope(x, np.arange(7), rope)
