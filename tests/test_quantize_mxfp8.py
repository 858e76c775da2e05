"""quantize_mxfp8 on every backend: worked bytes, the ends of the ranges, an independent model."""

import ml_dtypes
import numpy as np
import pytest
from helpers import Guarded, bf16, operations, to_backend

import ringslab as rs
from ringslab.rawkernels.reference.quantize_mxfp8 import e4m3_bytes

FLT_MAX = np.float32(3.4028235e38)
NEXT_448 = np.nextafter(np.float32(448), np.float32(500))
NEXT_175 = np.nextafter(np.float32(1.75), np.float32(2))
DS, FLOOR = ("ceil", 1e-4), ("floor", 0.0)

# facts of the MXFP8 table: block maximum, scale byte by FLOOR, scale byte by DS
WORKED = [
    (448.0, 127, 127),
    (NEXT_448, 127, 128),
    (450.0, 127, 128),
    (500.0, 127, 128),
    (240.0, 126, 127),
    (150.0, 126, 126),
    (6.0, 121, 121),
    (1.75, 119, 119),
    (NEXT_175, 119, 120),
    (0.0, 0, 105),
    (1e-5, 102, 105),
    (1e-4, 105, 105),
    (FLT_MAX, 246, 247),
]


def quantize(backend, x, rule=DS):
    """values and scales of x [n, D], run between sentinels."""
    x = np.asarray(x)
    blocks = -(-x.shape[1] // 32)
    values, scales = (
        Guarded(x.shape, np.uint8, backend),
        Guarded((len(x), blocks), np.uint8, backend),
    )
    operations(backend).quantize_mxfp8(
        to_backend(x, backend),
        values.array,
        scales.array,
        scale_rounding=rule[0],
        amax_floor=rule[1],
    )
    return values.host(), scales.host()


def block(*numbers, width=32):
    """One block that starts with the numbers and goes on with zeros."""
    x = np.zeros((1, width), np.float32)
    x[0, : len(numbers)] = numbers
    return x


def dequantized(values, scales):
    scale = np.ldexp(1.0, scales.astype(int) - 127)
    elements = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return elements * np.repeat(scale, 32, axis=1)[:, : values.shape[1]]


@pytest.mark.parametrize(("amax", "floor_code", "ds_code"), WORKED)
def test_worked_scales(backend, amax, floor_code, ds_code):
    """Column FLOOR and column DS of the worked table, bit for bit."""
    assert quantize(backend, block(amax), FLOOR)[1].tolist() == [[floor_code]]
    assert quantize(backend, block(amax), DS)[1].tolist() == [[ds_code]]


@pytest.mark.parametrize(
    ("numbers", "rule", "data"),
    [
        ((448.0, 1.0), DS, "7e38"),
        ((450.0,), FLOOR, "7e"),
        ((450.0,), DS, "76"),
        ((500.0,), FLOOR, "7e"),
        ((500.0,), DS, "78"),
        ((240.0,), FLOOR, "7e"),
        ((240.0,), DS, "77"),
        ((150.0,), DS, "79"),
        ((6.0, 5.3), DS, "7c7b"),
        ((0.0,), DS, "00"),
        ((FLT_MAX,), FLOOR, "7e"),
        ((FLT_MAX,), DS, "78"),
    ],
)
def test_worked_elements(backend, numbers, rule, data):
    """Block maximum 500: floor keeps scale 1 and clips to 448 (7e); ceil takes scale 2 and stores
    256 (78)."""
    values, _ = quantize(backend, block(*numbers), rule)
    assert values.tobytes().hex().startswith(data)


def test_worked_small_values(backend):
    """150 beside 0.1 and 0.003: 0.1015625 and 0.0029296875; 1e-5 beside 2e-9: DS 1.863e-9,
    FLOOR 2.095e-9."""
    values, scales = quantize(backend, block(150.0, 0.1, 0.003))
    assert dequantized(values, scales)[0, :3].tolist() == [144.0, 0.1015625, 0.0029296875]
    for rule, small in ((DS, 1.862645149230957e-09), (FLOOR, 2.0954757928848267e-09)):
        values, scales = quantize(backend, block(1e-5, 2e-9), rule)
        assert dequantized(values, scales)[0, :2].tolist() == [9.5367431640625e-06, small]


def test_bf16_before_the_scale(backend):
    """448.9 in float32 takes scale 128 by DS; in bf16 it is 448 and takes 127. 511.5 by FLOOR: 127,
    in bf16 it is 512 and takes 128."""
    assert quantize(backend, block(448.9))[1][0, 0] == 128
    assert quantize(backend, bf16(block(448.9)))[1][0, 0] == 127
    assert quantize(backend, block(511.5), FLOOR)[1][0, 0] == 127
    assert quantize(backend, bf16(block(511.5)), FLOOR)[1][0, 0] == 128


def test_q01_finite_overflow_saturates(backend):
    """Beside a scale of 1 (floor rule): 1000, 448, 464, 465, -1000 need a scale above 1, so each
    is tried with 511 as the maximum: nothing above 448 becomes NaN; and e4m3 itself saturates."""
    for number, byte in ((448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (-511.0, 0xFE)):
        values, scales = quantize(backend, block(number, 511.0), FLOOR)
        assert (values[0, 0], scales[0, 0]) == (byte, 127)
    wanted = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    assert e4m3_bytes(np.float64([1000, 448, 464, 465, -1000])).tolist() == wanted


@pytest.mark.parametrize(
    ("number", "scale", "data", "value"),
    [(957, 129, 0x77, 960), (500, 128, 0x78, 512), (448, 127, 0x7E, 448), (449, 128, 0x76, 448)],
)
def test_q02_which_way_the_scale_rounds(backend, number, scale, data, value):
    """ceil never clips: 957 is stored as 960, where floor or nearest would give 896."""
    values, scales = quantize(backend, block(number))
    assert (scales[0, 0], values[0, 0]) == (scale, data)
    assert dequantized(values, scales)[0, 0] == value


@pytest.mark.parametrize("rule", [DS, FLOOR])
def test_q04_infinity_in_a_block(backend, rule):
    """[inf, 1, -2, 0]: scale byte 254, data 7e 00 80 00; the neighbour block is unchanged."""
    x = block(np.inf, 1, -2, 0, width=64)
    x[0, 32] = 448.0
    values, scales = quantize(backend, x, rule)
    assert scales.tolist() == [[254, 127]]
    assert values[0, :4].tobytes().hex() == "7e008000"
    assert values[0, 32] == 0x7E
    assert quantize(backend, block(-np.inf))[0][0, 0] == 0xFE


@pytest.mark.parametrize("rule", [DS, FLOOR])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF])
def test_nan_poisons_its_block_only(backend, rule, bits):
    """Any NaN, quiet or signalling: scale 0xFF and all 32 elements 0x7F, also beside an infinity;
    the next block is as if alone."""
    x = block(1.0, np.inf, width=64)
    x.view(np.uint32)[0, 5] = bits
    x[0, 32] = 448.0
    values, scales = quantize(backend, x, rule)
    assert scales.tolist() == [[0xFF, 127]]
    assert (values[0, :32] == 0x7F).all()
    assert values[0, 32] == 0x7E


def test_q05_zero_block_keeps_signs(backend):
    """31 zeros and one -0.0: data 00 x31 and 80; scale 105 under amax_floor 1e-4, 0 under 0."""
    x = np.zeros((1, 32), np.float32)
    x[0, 31] = -0.0
    for rule, code in ((DS, 105), (FLOOR, 0), (("ceil", 0.0), 0), (("floor", 1e-4), 105)):
        values, scales = quantize(backend, x, rule)
        assert scales[0, 0] == code
        assert values[0].tolist() == [0] * 31 + [0x80]


def test_q10_ties_subnormals_and_sign_of_zero(backend):
    """Scale 1 through a 448 beside them; ties go to even, subnormals are kept, so is -0."""
    numbers = [4.25, 4.75, 1.0625, 1.1875, 232, 232.0368, 2**-10, 1.5 * 2**-9, -(2**-10), -0.0]
    values, scales = quantize(backend, block(*numbers, 448.0))
    assert scales[0, 0] == 127
    assert values[0, :10].tobytes().hex(" ") == "48 4a 38 3a 76 77 00 02 80 80"
    above = np.nextafter(np.float32(2**-10), np.float32(1))
    values, _ = quantize(backend, block(248, 17, 18, 19, above, 448.0))
    assert values[0, :5].tobytes().hex(" ") == "78 58 59 5a 01"


def test_q13_width_not_a_multiple_of_32(backend):
    """D = 80, 64 ones and 16 values of 1000: scales 119, 119, 129; the last value is 1024; every
    scale byte is written. Records refuse D = 500."""
    x = np.ones((2, 80), np.float32)
    x[:, 64:] = 1000
    values, scales = quantize(backend, x)
    assert scales.tolist() == [[119, 119, 129]] * 2
    assert dequantized(values, scales)[0, -1] == 1024
    with pytest.raises(rs.errors.LayoutError, match="500"):
        rs.make_record_format("mxfp8", 500)


def nearest_e4m3(x):
    """Independent model: the nearest finite E4M3 value by search, ties to the even byte."""
    finite = np.arange(0x7F, dtype=np.uint8)
    grid = finite.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    distance = np.abs(np.abs(x)[..., None] - grid)
    best = distance.min(axis=-1, keepdims=True)
    tied = distance == best
    even = tied & (finite % 2 == 0)
    chosen = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
    return (chosen + 0x80 * np.signbit(x)).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("rule", [DS, FLOOR, ("ceil", 0.0), ("floor", 1e-4)])
def test_random_blocks_against_a_search(backend, rule, dtype):
    """400 rows of 96 over all float32 exponents, subnormals included, against scales by search
    over all 255 codes and elements by search over all E4M3 values."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((400, 96)) * 2.0 ** rng.integers(-149, 126, (400, 1))
    x = x.astype(np.float32)
    x[:100] = rng.standard_normal((100, 96)) * 300
    if dtype == "bf16":
        x = bf16(x)
    numbers = (x if dtype == "float32" else x.view(ml_dtypes.bfloat16)).astype(np.float64)
    blocks = numbers.reshape(-1, 32)
    amax = np.maximum(np.abs(blocks).max(1), np.float32(rule[1]))
    powers = np.ldexp(1.0, np.arange(255) - 127)
    if rule[0] == "ceil":
        codes = (amax[:, None] <= 448 * powers).argmax(1)
    else:
        codes = np.maximum((256 * powers <= amax[:, None]).sum(1) - 1, 0)
    values, scales = quantize(backend, x, rule)
    np.testing.assert_array_equal(scales.ravel(), codes)
    wanted = nearest_e4m3(blocks / powers[codes][:, None])
    np.testing.assert_array_equal(values.reshape(-1, 32), wanted)


def test_second_pass_keeps_values(backend):
    """quantize(dequantize(r)) gives the same values on 2,000 bf16 blocks, though some scale codes
    change (amax just above 224 * 2^k); ceil's error stays below 0.0589 of the block maximum."""
    x = bf16(np.random.default_rng(3).standard_normal((2000, 32)))
    first = dequantized(*quantize(backend, x))
    again = dequantized(*quantize(backend, first.astype(np.float32)))
    np.testing.assert_array_equal(first, again)
    numbers = x.view(ml_dtypes.bfloat16).astype(np.float64)
    assert (np.abs(first - numbers).max(1) / np.abs(numbers).max(1)).max() <= 0.0589
    np.testing.assert_array_equal(first, first.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_public_entry_shapes(fast_backend):
    """Leading axes are kept, empty input gives empty output, bf16 comes as either dtype."""
    x = np.random.default_rng(1).standard_normal((2, 3, 40), np.float32)
    values, scales = rs.quantize_mxfp8(to_backend(x, fast_backend))
    assert values.shape == (2, 3, 40)
    assert scales.shape == (2, 3, 2)
    values, scales = rs.quantize_mxfp8(to_backend(x[:0], fast_backend))
    assert (values.shape, scales.shape) == ((0, 3, 40), (0, 3, 2))
    one = rs.quantize_mxfp8(x.astype(ml_dtypes.bfloat16))
    two = rs.quantize_mxfp8(bf16(x))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


def test_refuses_wrong_input():
    """float64, scalars, a strided view and unknown rules are errors that name the argument."""
    with pytest.raises(rs.errors.ArgumentError, match=r"x\.dtype=float64"):
        rs.quantize_mxfp8(np.zeros((2, 32)))
    with pytest.raises(rs.errors.ArgumentError, match="scalar"):
        rs.quantize_mxfp8(np.float32(1))
    with pytest.raises(rs.errors.ArgumentError, match="ascontiguousarray"):
        rs.quantize_mxfp8(np.zeros((4, 64), np.float32)[:, ::2])
    with pytest.raises(rs.errors.ArgumentError, match="nearest"):
        rs.quantize_mxfp8(np.zeros((2, 32), np.float32), scale_rounding="nearest")
    with pytest.raises(rs.errors.ArgumentError, match="amax_floor"):
        rs.quantize_mxfp8(np.zeros((2, 32), np.float32), amax_floor=-1.0)
