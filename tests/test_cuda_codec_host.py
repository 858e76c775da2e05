"""The CUDA codec and hash headers, built by g++ and compared with the references: the very source
that the GPU compiles, over far more inputs than a GPU test would copy back."""

import ctypes
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from host_build import build_library

from ringslab.rawkernels.reference.activation_hash import hash_values, row_keys, splitmix64
from ringslab.rawkernels.reference.bf16 import float_to_bf16
from ringslab.rawkernels.reference.quantize_mxfp8 import scale_codes

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"
SHIM = r"""
#include "mxfp8.cuh"
#include "hash.cuh"
typedef int64_t i64;
extern "C" {
void encode_range(uint32_t first, i64 step, i64 n, uint8_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = e4m3_encode(bits_float((uint32_t)(first + i * step)));
}
void decode_all(float* elements, float* scales, float* inverses) {
  for (int i = 0; i < 256; i++) {
    elements[i] = e4m3_decode(i);
    scales[i] = scale_value(i);
    if (i < 255) inverses[i] = inverse_scale(i);
  }
}
void scale_ceil(const uint32_t* amax, i64 n, uint8_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = scale_code<true>(amax[i]);
}
void scale_floor(const uint32_t* amax, i64 n, uint8_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = scale_code<false>(amax[i]);
}
void round_bf16(const float* x, i64 n, uint16_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = float_bf16(x[i]);
}
void mix(const uint64_t* z, i64 n, uint64_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = splitmix64(z[i]);
}
void keys(uint64_t seed, uint64_t layer, const int32_t* token, const int32_t* position, i64 n,
          uint64_t* out) {
  for (i64 i = 0; i < n; i++) out[i] = row_key(seed, layer, token[i], position[i]);
}
void row(uint64_t key, i64 pairs, float* out) {
  for (i64 j = 0; j < pairs; j++)
    pair_values(pair_hash(pair_key(key), j), out[2 * j], out[2 * j + 1]);
}
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The headers as a shared library."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the CUDA headers for the host")
    folder = tmp_path_factory.mktemp("codec")
    (folder / "shim.cpp").write_text(SHIM)
    flags = ("-O2", "-std=c++17", "-Wall", "-Werror", f"-I{CUDA_FOLDER}")
    return build_library(folder, "shim.cpp", (), *flags)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def encode(shim, first: int, step: int, count: int) -> np.ndarray:
    out = np.empty(count, np.uint8)
    shim.encode_range(
        ctypes.c_uint32(first), ctypes.c_int64(step), ctypes.c_int64(count), pointer(out)
    )
    return out


def expected_e4m3(bits: np.ndarray) -> np.ndarray:
    """uint8 bytes of float32 bit patterns by ml_dtypes: clip to +-448, cast; NaN is 0x7F."""
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        cast = np.clip(x, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return np.where(np.isnan(x), 0x7F, cast.view(np.uint8))


def check_encode(shim, first: int, step: int, count: int) -> None:
    bits = (first + step * np.arange(count, dtype=np.uint64)).astype(np.uint32)
    got = encode(shim, first, step, count)
    wrong = np.flatnonzero(got != expected_e4m3(bits))
    assert wrong.size == 0, f"{wrong.size} wrong, first bits={bits[wrong[0]]:#010x}"


def test_encode_strided_float32(shim):
    """Every 509th of the 2^32 float32 patterns (8.4 million, all exponents and signs) encodes as
    ml_dtypes does after a clip to +-448."""
    check_encode(shim, 0, 509, 2**32 // 509)


@pytest.mark.slow
def test_encode_all_float32(shim):
    """All 2^32 float32 patterns, 2^24 at a time."""
    for first in range(0, 2**32, 2**24):
        check_encode(shim, first, 1, 2**24)


def test_encode_all_bf16(shim):
    """All 65,536 bf16 patterns, as float32."""
    check_encode(shim, 0, 2**16, 2**16)


def test_encode_around_every_boundary(shim):
    """The 2,049 float32 patterns around each E4M3 value and each midpoint of two neighbours, both
    signs: ties go to even, 464 still gives 448 and so does everything above it."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / np.float32(2)
    edges = np.concatenate([codes, middles, np.float32([464, 480, np.inf])])
    for centre in edges.view(np.uint32).tolist():
        for sign in (0, 0x80000000):
            first = max(centre - 1024, 0) | sign
            check_encode(shim, first, 1, 2049)


def test_decode_all_codes(shim):
    """All 256 E4M3 and E8M0 codes decode as ml_dtypes does; 2^(127 - c) times 2^(c - 127) is 1."""
    elements, scales, inverses = (np.zeros(256, np.float32) for _ in range(3))
    shim.decode_all(pointer(elements), pointer(scales), pointer(inverses))
    every = np.arange(256, dtype=np.uint8)
    expected = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(elements, expected)
    np.testing.assert_array_equal(np.signbit(elements[128]), True)  # 0x80 is -0
    expected = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(inverses[:255].astype(np.float64) * scales[:255], 1.0)


@pytest.mark.parametrize("rounding", ["ceil", "floor"])
def test_scale_codes(shim, rounding):
    """Every exponent with mantissas around 0, 1.75 (0x600000) and the top: the code of the
    reference, which works in float64. 448 gives 127, the next float 128 under ceil."""
    near = [m + d for m in (0, 0x600000, 0x7FFFFF) for d in range(-3, 4)]
    mantissas = np.uint32(
        sorted({m for m in near if 0 <= m < 2**23} | set(range(1, 2**23, 65_537)))
    )
    amax = (np.arange(256, dtype=np.uint32)[:, None] << 23 | mantissas[None]).reshape(-1)
    got = np.empty(amax.size, np.uint8)
    function = shim.scale_ceil if rounding == "ceil" else shim.scale_floor
    function(pointer(amax), ctypes.c_int64(amax.size), pointer(got))
    with np.errstate(invalid="ignore"):  # signalling NaNs among the patterns
        values = amax.view(np.float32).astype(np.float64)
    expected = np.where(np.isnan(values), 255, scale_codes(values, rounding, 0.0))
    np.testing.assert_array_equal(got, expected)
    edge = np.float32([448.0, np.nextafter(np.float32(448), np.float32(449)), 0.0, np.inf, np.nan])
    codes = np.empty(5, np.uint8)
    function(pointer(edge), ctypes.c_int64(5), pointer(codes))
    assert codes.tolist() == [127, 128 if rounding == "ceil" else 127, 0, 254, 255]


def test_round_bf16(shim):
    """Every 1,021st float32 pattern rounds to bf16 as the reference does, NaN to 0x7FC0."""
    x = np.arange(0, 2**32, 1021, dtype=np.uint64).astype(np.uint32).view(np.float32)
    got = np.empty(x.size, np.uint16)
    shim.round_bf16(pointer(x), ctypes.c_int64(x.size), pointer(got))
    np.testing.assert_array_equal(got, float_to_bf16(x))


def test_hash_agrees_with_the_reference(shim):
    """splitmix64, row keys and row values of 1,000 rows, extreme ids and seeds among them."""
    rng = np.random.default_rng(11)
    z = rng.integers(0, 2**64, 1000, np.uint64)
    mixed = np.empty_like(z)
    shim.mix(pointer(z), ctypes.c_int64(z.size), pointer(mixed))
    np.testing.assert_array_equal(mixed, splitmix64(z))

    tokens = rng.integers(0, 2**31, 1000).astype(np.int32)
    positions = rng.integers(0, 2**31 - 1, 1000).astype(np.int32)
    tokens[:2], positions[:2] = (0, 2**31 - 1), (0, 2**31 - 2)
    for seed, layer in ((0, 0), (7, 42), (2**64 - 1, 1)):
        keys = np.empty(tokens.size, np.uint64)
        shim.keys(
            ctypes.c_uint64(seed),
            ctypes.c_uint64(layer),
            pointer(tokens),
            pointer(positions),
            ctypes.c_int64(tokens.size),
            pointer(keys),
        )
        np.testing.assert_array_equal(keys, row_keys(seed, layer, tokens, positions))
        row = np.empty((4, 512), np.float32)
        for i in range(4):
            shim.row(ctypes.c_uint64(int(keys[i])), ctypes.c_int64(256), pointer(row[i]))
        np.testing.assert_array_equal(row, hash_values(seed, layer, tokens[:4], positions[:4], 512))
