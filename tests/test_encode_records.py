"""encode_records on every backend: golden bytes, and the same bytes everywhere."""

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    Guarded,
    bf16,
    from_bf16,
    i32,
    operations,
    random_bf16,
    record_format,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION
from ringslab.rawkernels.reference.quantize_mxfp8 import e4m3_bytes

YARN = rs.Yarn(factor=16, original_length=65536, beta_fast=32, beta_slow=1)
ROPES = {
    "none": None,
    "adjacent": rs.Rope(10000.0, 64, "adjacent"),
    "half": rs.Rope(10000.0, 64, "half"),
    "yarn": rs.Rope(160000.0, 64, "adjacent", YARN),
}
FORMATS = {
    "interleaved": record_format(128),
    "planar": record_format(128, plane_order="planar"),
    "bf16": record_format(128, "bf16"),
    "ocp": rs.make_record_format("mxfp8", 128, scale_rounding="floor", amax_floor=0.0),
}


def encode(backend, kv, fmt, positions=None, rope=None):
    out = Guarded((kv.shape[0], fmt.record_bytes), np.uint8, backend)
    operations(backend).encode_records(
        to_backend(kv, backend),
        to_backend(positions, backend),
        out.array,
        record_format=fmt,
        rope=rope,
    )
    return out.host()


def test_golden_record(backend):
    """64 dims: 448 and 1 in block 0, 500 in block 1. Values, then scales 127 and 128."""
    kv = np.zeros((1, 64), np.float32)
    kv[0, :2], kv[0, 32] = (448, 1), 500
    record = encode(backend, bf16(kv), record_format(64))[0]
    assert record.shape == (66,)
    wanted = np.zeros(66, np.uint8)
    wanted[[0, 1, 32, 64, 65]] = 0x7E, 0x38, 0x78, 127, 128
    np.testing.assert_array_equal(record, wanted)


def test_rotated_before_it_is_quantized(backend):
    """One unit pair at position 1000 (theta 10000, 64 dims, pair 8: cos 0.862319, sin -0.506366):
    the record holds E4M3 of bf16(cos), bf16(sin) over 2^-9, code 118."""
    kv = np.zeros((1, 64), np.float32)
    kv[0, 16] = 1
    fmt = record_format(64)
    record = encode(backend, bf16(kv), fmt, i32([1000]), rs.Rope(10000.0, 64, "adjacent"))[0]
    turned = bf16([np.cos(100.0), np.sin(100.0)])
    np.testing.assert_array_equal(
        record[16:18], e4m3_bytes(from_bf16(turned).astype(np.float64) * 2**9)
    )
    assert record[64] == 118
    record[[16, 17, 64, 65]] = 0
    assert not (record & 0x7F).any()  # all else is zero, of either sign
    plain = encode(backend, bf16(kv), record_format(64, "bf16"), i32([1000]), ROPES["adjacent"])
    np.testing.assert_array_equal(plain[0].view(np.uint16)[16:18], turned)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_same_bytes_as_the_reference(fast_backend, fmt, rope):
    """300 vectors of 128 dims over many magnitudes, zeros and infinities among them, at positions
    up to 2^31 - 2: equal byte for byte."""
    rng = np.random.default_rng(21)
    kv = bf16(rng.standard_normal((300, 128)) * 2.0 ** rng.integers(-60, 60, (300, 1)))
    kv[5] = 0
    kv[6, 7] = 0x8000
    kv[7, 9] = 0x7F80
    positions = rng.integers(0, MAX_POSITION, 300, dtype=np.int32)
    positions[:4] = 0, MAX_POSITION, 1023, -1
    found = encode(fast_backend, kv, FORMATS[fmt], positions, ROPES[rope])
    wanted = encode("reference", kv, FORMATS[fmt], positions, ROPES[rope])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rope", ["none", "adjacent"])
def test_nan_marks_its_blocks_only(backend, rope):
    """A NaN in block 0 of token 1: that block is 7f under scale ff, all else as without it."""
    kv = random_bf16(np.random.default_rng(4), (3, 128))
    positions = i32([5, 6, 7])
    clean = encode(backend, kv, FORMATS["interleaved"], positions, ROPES[rope])
    kv[1, 3] = 0xFFC0
    found = encode(backend, kv, FORMATS["interleaved"], positions, ROPES[rope])
    assert (found[1, :32] == 0x7F).all()
    assert found[1, 128] == 0xFF
    found[1, :32], found[1, 128] = clean[1, :32], clean[1, 128]
    np.testing.assert_array_equal(found, clean)


def test_records_are_exact_in_bf16(backend):
    """What a record holds is a bf16 number, so prefill and decode multiply the same operands."""
    kv = random_bf16(np.random.default_rng(8), (50, 128))
    records = encode(backend, kv, FORMATS["interleaved"])
    values = rs.dequantize_mxfp8(records[:, :128].copy(), records[:, 128:].copy())
    np.testing.assert_array_equal(values, values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_public_entry(fast_backend):
    """Both bf16 dtypes, `out` given or not, no tokens; errors name both numbers."""
    fmt = FORMATS["interleaved"]
    kv = random_bf16(np.random.default_rng(9), (4, 128))
    one = rs.encode_records(to_backend(kv, fast_backend), fmt)
    np.testing.assert_array_equal(to_host(one), encode("reference", kv, fmt))
    assert rs.encode_records(to_backend(kv[:0], fast_backend), fmt).shape == (
        0,
        132,
    )


def test_refuses_wrong_input():
    """A wrong width, a rope without positions, GQA and fp16 formats, and a short `out`."""
    fmt = FORMATS["interleaved"]
    kv = random_bf16(np.random.default_rng(9), (4, 128))
    with pytest.raises(rs.errors.ArgumentError, match=r"kv\.shape\[1\]=64 .*head_dim=128"):
        rs.encode_records(kv[:, :64].copy(), fmt)
    with pytest.raises(rs.errors.ArgumentError, match="positions=None"):
        rs.encode_records(kv, fmt, rope=ROPES["adjacent"])
    gqa = rs.make_record_format("mxfp8", 128, latent=False, num_kv_heads=2)
    with pytest.raises(rs.errors.ArgumentError, match="num_kv_heads=2"):
        rs.encode_records(kv, gqa)
    with pytest.raises(rs.errors.ArgumentError, match="fp16"):
        rs.encode_records(kv, rs.make_record_format("fp16", 128))
    with pytest.raises(rs.errors.ArgumentError, match=r"out\.shape\[1\]=131 .*132"):
        rs.encode_records(kv, fmt, out=np.zeros((4, 131), np.uint8))
    with pytest.raises(rs.errors.ArgumentError, match=r"kv\.dtype=float32"):
        rs.encode_records(np.zeros((4, 128), np.float32), fmt)
