"""The MXFP8 codec against a model that shares nothing with it: exact arithmetic in float64, the
scale from frexp, the element by search in the table of all E4M3 values."""

import ml_dtypes
import numpy as np
import pytest
from helpers import (
    bf16,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.layouts.rings import MAX_POSITION

RULES = [("ceil", 1e-4), ("ceil", 0.0), ("floor", 0.0), ("floor", 1e-4)]
# All finite E4M3 magnitudes and the points halfway between two of them; byte = index.
GRID = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
HALFWAY = (GRID[1:] + GRID[:-1]) / 2
BLOCKS_AT_ONCE = 50_000


def model_scales(amax, rule):
    """Scale bytes of block maxima, float64 and finite: the smallest power of two that keeps them at
    or below 448 = 0.875 * 2^9, or 2^(floor(log2) - 8)."""
    mantissa, exponent = np.frexp(np.maximum(amax, np.float64(np.float32(rule[1]))))
    ceil = exponent - 9 + (mantissa > 0.875)
    scale = ceil if rule[0] == "ceil" else exponent - 9
    scale = np.where(mantissa == 0, -127, scale)
    return np.clip(scale + 127, 0, 254).astype(np.uint8)


def model_elements(numbers):
    """E4M3 bytes of float64 numbers: nearest, ties to the even byte, at most 448."""
    magnitude = np.minimum(np.abs(numbers), 448.0)
    below = np.searchsorted(HALFWAY, magnitude, side="left")  # a tie goes down ...
    tie = (below < len(HALFWAY)) & (magnitude == HALFWAY[np.minimum(below, len(HALFWAY) - 1)])
    below = below + (tie & (below % 2 == 1))  # ... unless that byte is odd
    return (below + 0x80 * np.signbit(numbers)).astype(np.uint8)


def model(x, rule):
    """Values and scales of float32 blocks [n, 32]; NaN and infinities as DESIGN 4.1 says."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        numbers = x.astype(np.float64)
    has_nan, has_inf = np.isnan(numbers).any(1), np.isinf(numbers).any(1)
    finite = np.where(np.isfinite(numbers), numbers, 0)
    scales = model_scales(np.abs(finite).max(1), rule)
    scales[has_inf] = 254
    values = model_elements(numbers * np.ldexp(1.0, 127 - scales.astype(int))[:, None])
    values[has_nan], scales[has_nan] = 0x7F, 0xFF
    return values, scales


def quantize(backend, x, rule):
    values = to_backend(np.full(x.shape, 0xA5, np.uint8), backend)
    scales = to_backend(np.full((len(x), 1), 0xA5, np.uint8), backend)
    options = {"scale_rounding": rule[0], "amax_floor": rule[1]}
    operations(backend).quantize_mxfp8(to_backend(x, backend), values, scales, **options)
    return to_host(values), to_host(scales)[:, 0]


def assert_model(backend, x, rule):
    """x float32 or bf16 bits [n, 32]: bytes equal the model's; the first difference is shown."""
    bits = x.astype(np.uint32) << 16 if x.dtype == np.uint16 else x.view(np.uint32)
    numbers = bits.view(np.float32)
    found = quantize(backend, x, rule)
    for name, got, wanted in zip(("values", "scales"), found, model(numbers, rule), strict=True):
        wrong = np.argwhere(got != wanted)
        assert not len(wrong), (
            f"{rule} {name}{wrong[0]}: {got[tuple(wrong[0])]:#x}, model "
            f"{wanted[tuple(wrong[0])]:#x}; block {x[wrong[0][0]].view(np.uint8).tobytes().hex()}"
        )


def random_blocks(rng, count):
    """float32 [count, 32]: any bits; normal numbers at any exponent; a maximum at or one step
    beside 448 * 2^k; halfway points; zeros of both signs."""
    x = rng.integers(0, 2**32, (count, 32), dtype=np.uint32).view(np.float32).copy()
    kind = rng.integers(0, 8, count)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scale = np.float32(2.0) ** rng.integers(-149, 127, (count, 1)).astype(np.float32)
        normal = rng.standard_normal((count, 32), np.float32) * scale
        edges = np.float32([448, 464, 480, 0.4375, 1.75, 240])[rng.integers(0, 6, (count, 1))]
        edge = np.nextafter(edges * scale, np.float32(rng.choice([0, np.inf], (count, 1))))
        halves = HALFWAY[rng.integers(0, len(HALFWAY), (count, 32))].astype(np.float32) * scale
        most = edges * scale
    x[kind >= 2] = normal[kind >= 2]
    x[kind == 4, 0] = most[kind == 4, 0]
    x[kind == 5, 0] = edge[kind == 5, 0]
    x[kind == 6] = halves[kind == 6] * rng.choice(np.float32([-1, 1]), (count, 32))[kind == 6]
    sparse = (kind == 7)[:, None] & (rng.random((count, 32)) < 0.9)
    x[sparse] = rng.choice(np.float32([0.0, -0.0]), (count, 32))[sparse]
    return x


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_random_blocks(fast_backend, rule, fuzz_size, fuzz_rng):
    """10,000 (full: 1,000,000) blocks a rule: every byte is the model's."""
    left = fuzz_size(10_000, 1_000_000)
    while left > 0:
        x = random_blocks(fuzz_rng, min(left, BLOCKS_AT_ONCE))
        assert_model(fast_backend, x, rule)
        assert_model(fast_backend, (x.view(np.uint32) >> 16).astype(np.uint16), rule)
        left -= len(x)


def test_the_reference_is_the_model(fuzz_size, fuzz_rng):
    """The slow definition too, on 1,000 (full: 20,000) blocks a rule."""
    for rule in RULES:
        assert_model("reference", random_blocks(fuzz_rng, fuzz_size(1000, 20_000)), rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_exponent(backend, rule):
    """Every block maximum with 8 leading mantissa bits (all 65,536 bf16 values, NaN and infinities
    among them), beside elements of every E4M3 byte times its scale."""
    amax = np.arange(2**16, dtype=np.uint16)
    x = np.zeros((2**16, 32), np.uint16)
    x[:, 0] = amax
    step = 8 if backend == "reference" else 1
    assert_model(backend, x[::step].copy(), rule)
    codes = np.arange(255)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        grid = (values[None] * np.ldexp(1.0, codes - 127)[:, None]).astype(np.float32)
    assert_model(backend, grid.reshape(-1, 32)[np.isfinite(grid.reshape(-1, 32)).all(1)], rule)


def test_decoding_all_bytes_is_the_table(fast_backend):
    """All 65,536 pairs of scale and element, as float32 and as bf16 bits, against float64."""
    values = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    table = np.concatenate([GRID, [np.nan]])
    table = np.concatenate([table, -table])
    power = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
    with np.errstate(over="ignore"):
        wanted = (table[None] * power[:, None]).astype(np.float32)
    found = rs.dequantize_mxfp8(to_backend(values, fast_backend), to_backend(scales, fast_backend))
    np.testing.assert_array_equal(to_host(found), wanted)
    np.testing.assert_array_equal(np.signbit(to_host(found)[:255, :127]), False)
    np.testing.assert_array_equal(np.signbit(to_host(found)[:255, 128:255]), True)


def random_vectors(rng, count, dim):
    """bf16 [count, dim] of one random size, one in a thousand NaN, infinite or -0."""
    kv = random_bf16(rng, (count, dim), 2.0 ** int(rng.integers(-30, 30)))
    holes = rng.random(kv.shape) < 0.001
    kv[holes] = rng.choice(bf16([np.nan, np.inf, -np.inf, -0.0]), holes.sum())
    return kv


def random_rope(rng, dim):
    dims = 2 * int(rng.integers(1, dim // 2 + 1))
    pairing = str(rng.choice(["adjacent", "half"]))
    return None if rng.random() < 0.3 else rs.Rope(1e4, dims, pairing)


@pytest.mark.parametrize("plane_order", ["interleaved", "planar"])
def test_random_records(fast_backend, plane_order, fuzz_size, fuzz_rng):
    """Random vectors, rotations and positions: records, and the ring after any number of wraps, are
    the reference's, byte for byte; the history that comes back is the last records."""
    ops, reference = operations(fast_backend), operations("reference")
    for _ in range(fuzz_size(20, 5000)):
        dim = 32 * int(fuzz_rng.integers(1, 9))
        count, ring_len = (int(n) for n in fuzz_rng.integers(1, 40, 2))
        window = int(fuzz_rng.integers(1, ring_len + 1))
        fmt = record_format(dim, plane_order=plane_order)
        layout = make_layout(fmt, ring_len)
        kv, rope = random_vectors(fuzz_rng, count, dim), random_rope(fuzz_rng, dim)
        first = int(fuzz_rng.choice([0, fuzz_rng.integers(0, MAX_POSITION - count)]))
        end, positions = first + count, i32(range(first, first + count))
        note = f"{dim=} {count=} {ring_len=} {window=} {rope=} {first=}"
        records = np.zeros((count, fmt.record_bytes), np.uint8)
        reference.encode_records(kv, positions, records, record_format=fmt, rope=rope)
        wanted = poisoned_slab(layout, 2)
        reference.store_records(wanted, layout, 1, records, i32([1] * count), positions)

        place = [to_backend(x, fast_backend) for x in (kv, positions, np.zeros_like(records))]
        ops.encode_records(*place, record_format=fmt, rope=rope)
        np.testing.assert_array_equal(to_host(place[2]), records, err_msg=note)
        slab = to_backend(poisoned_slab(layout, 2), fast_backend)
        ids = to_backend(i32([1] * count), fast_backend)
        last = slice(max(0, count - ring_len), None)  # of one call, no two in one row
        ops.ring_store(slab, layout, 1, place[0][last], ids[last], place[1][last], rope=rope)
        np.testing.assert_array_equal(to_host(slab), wanted, err_msg=note)

        plan = rs.plan_prefill([1], [1], [end + 1], window=window, ring_len=ring_len,
                               swa_valid_start=first)  # fmt: skip
        history = to_host(rs.load_history(slab, layout, 1, to_backend(plan, fast_backend)))
        kept = min(window, count)
        np.testing.assert_array_equal(history[window - kept :], records[count - kept :], note)
        assert not history[: window - kept].any(), note
