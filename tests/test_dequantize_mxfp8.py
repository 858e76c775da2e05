"""dequantize_mxfp8 on every backend: all 256 codes of elements and of scales."""

import ml_dtypes
import numpy as np
import pytest
from helpers import Guarded, operations, to_backend

import ringslab as rs

ALL_CODES = np.arange(256, dtype=np.uint8)


def dequantize(backend, values, scales, dtype=np.float32):
    out = Guarded(values.shape, dtype, backend)
    operations(backend).dequantize_mxfp8(
        to_backend(values, backend), to_backend(scales, backend), out.array
    )
    return out.host()


def assert_same_bits(found, wanted):
    """Equal, signs of zero included; NaN only as NaN."""
    np.testing.assert_array_equal(found, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(wanted[numbers]))


def test_q09_all_element_codes(backend):
    """Scale 1: every byte as ml_dtypes decodes it; NaN at 7f and ff; 00..7e sum to 5407.875."""
    scales = np.full((1, 8), 127, np.uint8)
    found = dequantize(backend, ALL_CODES[None], scales)[0]
    assert_same_bits(found, ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.flatnonzero(np.isnan(found)).tolist() == [0x7F, 0xFF]
    assert found[:0x7F].sum() == 5407.875
    assert (found[1], found[7], found[8]) == (0.001953125, 0.013671875, 0.015625)
    assert found[0x80] == 0
    assert np.signbit(found[0x80])


def test_q07_all_scale_codes(backend):
    """Element 1.0 (byte 38) under every scale byte, as ml_dtypes decodes E8M0; 0 is 2^-127, a
    subnormal; 134 is 128; only 255 is NaN."""
    values = np.full((256, 32), 0x38, np.uint8)
    found = dequantize(backend, values, ALL_CODES[:, None])[:, 0]
    assert_same_bits(found, ALL_CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ends = [float(np.float32(x)) for x in (5.877472e-39, 1.175494e-38, 1, 128, 1.701412e38)]
    np.testing.assert_allclose(found[[0, 1, 127, 134, 254]], ends, rtol=1e-6)
    assert np.isnan(found[255])


def test_every_pair_is_exact(backend):
    """All 65,536 (scale, element) pairs against float64, rounded once to float32: products are
    exact but where they pass FLT_MAX and become inf."""
    values = np.tile(ALL_CODES, (256, 1))
    scales = np.repeat(ALL_CODES[:, None], 8, axis=1)
    elements = ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    powers = np.ldexp(1.0, ALL_CODES.astype(int) - 127)
    powers[255] = np.nan
    with np.errstate(over="ignore"):
        wanted = (powers[:, None] * elements[None]).astype(np.float32)
    assert_same_bits(dequantize(backend, values, scales), wanted)


def test_every_pair_to_bf16(backend):
    """All 65,536 pairs as bf16 bits: the float32 products, exact but for bf16's subnormals, which
    are rounded to nearest even; signs of zero are kept; every NaN is 7fc0."""
    values = np.tile(ALL_CODES, (256, 1))
    scales = np.repeat(ALL_CODES[:, None], 8, axis=1)
    exact = dequantize("reference", values, scales)
    with np.errstate(invalid="ignore"):
        wanted = exact.astype(ml_dtypes.bfloat16)
    normal = (np.abs(exact) >= 2.0**-126) & np.isfinite(exact)
    assert (wanted[normal].astype(np.float32) == exact[normal]).all()
    bits = np.where(np.isnan(exact), np.uint16(0x7FC0), wanted.view(np.uint16))
    np.testing.assert_array_equal(dequantize(backend, values, scales, np.uint16), bits)


def test_short_last_block(backend):
    """D = 80: elements 64..79 take the third scale."""
    values = np.full((3, 80), 0x38, np.uint8)
    scales = np.array([[127, 128, 129]] * 3, np.uint8)
    numbers = [1.0] * 32 + [2.0] * 32 + [4.0] * 16
    assert dequantize(backend, values, scales)[2].tolist() == numbers
    bits = dequantize(backend, values, scales, np.uint16)
    assert bits[2].view(ml_dtypes.bfloat16).tolist() == numbers


def test_public_entry(fast_backend):
    """Leading axes are kept; shapes that do not belong together are refused with both."""
    values = to_backend(np.full((2, 3, 40), 0x38, np.uint8), fast_backend)
    scales = to_backend(np.full((2, 3, 2), 127, np.uint8), fast_backend)
    out = rs.dequantize_mxfp8(values, scales)
    assert out.shape == (2, 3, 40)
    assert float(out.sum()) == 240.0
    with pytest.raises(rs.errors.ArgumentError, match=r"\(2, 3, 2\)"):
        rs.dequantize_mxfp8(values, scales[:, :, :1].copy())
    with pytest.raises(rs.errors.ArgumentError, match="float32"):
        rs.dequantize_mxfp8(values.astype(np.float32), scales)
