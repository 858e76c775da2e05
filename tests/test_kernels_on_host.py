"""The CUDA kernels of codec, rotation, records and hash, run on the CPU thread by thread through
their own launchers, byte for byte against the reference. This covers grids, tails, alignment,
bounds and shuffles where there is no GPU; the E4M3 instruction, races and speed it does not."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from helpers import Guarded, i32, make_layout, operations, poisoned_slab, random_bf16, record_format
from kernels_on_host import launchers

import ringslab as rs

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
SPECIAL = np.float32([0, -0.0, 448, 500, 1e-5, 1e-40, -3e38, 2**-9, np.inf, -np.inf, np.nan])


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """The launchers, with g++ builds below them."""
    with pytest.MonkeyPatch.context() as patch:
        yield launchers(patch, tmp_path_factory.mktemp("kernels"))


def same(run, *shapes_and_dtypes):
    """Run `run(operations, *outputs)` twice, by the kernels and by the reference, into guarded
    poisoned arrays; all bytes must agree."""

    def outputs_of(name):
        guards = [Guarded(shape, dtype, "cpu") for shape, dtype in shapes_and_dtypes]
        run(name, *(guard.array for guard in guards))
        return [guard.host() for guard in guards]

    for found, wanted in zip(outputs_of("kernel"), outputs_of("reference"), strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def chooser(cuda, name):
    reference = getattr(operations("reference"), name)
    return lambda who: cuda[name] if who == "kernel" else reference


def offset_copy(x, offset_bytes):
    """A copy that starts `offset_bytes` past a multiple of 64."""
    flat = np.empty(x.nbytes + 128, np.uint8)
    start = -flat.ctypes.data % 64 + offset_bytes
    flat[start : start + x.nbytes] = x.reshape(-1).view(np.uint8)
    return flat[start : start + x.nbytes].view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("rule", [("ceil", 1e-4), ("floor", 0.0)], ids=["ceil", "floor"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["float32", "bf16"])
@pytest.mark.parametrize("shape", [(37, 64), (70, 512), (9, 33), (5, 1), (0, 64), (3, 0)], ids=str)
def test_quantize(cuda, shape, dtype, rule):
    """Whole and ragged rows, one and several thread blocks, special values in a quarter of the
    rows, and an array that starts 4 bytes off a vector."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-40, 40, (shape[0], 1)))
    x = x.astype(np.float32)
    if x.size:
        x[::4, :: max(shape[1] // 7, 1)] = rng.choice(
            SPECIAL, x[::4, :: max(shape[1] // 7, 1)].shape
        )
    if dtype is np.uint16:
        x = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    op = chooser(cuda, "quantize_mxfp8")
    blocks = -(-shape[1] // 32)
    for offset in (0, 4):
        source = offset_copy(x, offset)

        def run(who, values, scales, source=source):
            op(who)(source, values, scales, scale_rounding=rule[0], amax_floor=rule[1])

        same(run, (shape, np.uint8), ((shape[0], blocks), np.uint8))


@pytest.mark.parametrize("shape", [(256, 64), (3, 160), (7, 45), (0, 32)], ids=str)
def test_dequantize(cuda, shape):
    """Random codes of all 256 values in elements and scales, to float32 and to bf16; NaN where the
    reference has it."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 256, shape).astype(np.uint8)
    scales = rng.integers(0, 256, (shape[0], -(-shape[1] // 32))).astype(np.uint8)
    for dtype in (np.float32, np.uint16):
        found, wanted = (Guarded(shape, dtype, "cpu") for _ in range(2))
        cuda["dequantize_mxfp8"](values, scales, found.array)
        operations("reference").dequantize_mxfp8(values, scales, wanted.array)
        np.testing.assert_array_equal(found.host(), wanted.host())


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
@pytest.mark.parametrize("case", [(512, 64, 18), (64, 64, 3), (40, 12, 5)], ids=str)
def test_apply_rope(cuda, case, pairing):
    """bf16 and float32, forwards and inverse, into another array and in place, more heads than one
    thread block takes, pairs that do not fit whole vectors."""
    dim, dims, heads = case
    rng = np.random.default_rng(3)
    rope = rs.Rope(10_000.0, dims, pairing)
    positions = i32([0, 1, 2**31 - 2, 123_456, -1])
    op = chooser(cuda, "apply_rope")
    for dtype in (np.uint16, np.float32):
        x = random_bf16(rng, (5, heads, dim))
        x = x if dtype is np.uint16 else x.view(ml_dtypes.bfloat16).astype(np.float32)

        def fresh(who, out, x=x):
            op(who)(x, positions, out, rope=rope)

        def in_place(who, out, x=x):
            out[...] = x
            op(who)(out, positions, out, rope=rope, inverse=True)

        same(fresh, (x.shape, dtype))
        same(in_place, (x.shape, dtype))


RECORDS = [
    (record_format(512), rs.Rope(160_000.0, 64, "adjacent", rs.Yarn(16, 65536, 32, 1))),
    (record_format(512, plane_order="planar"), rs.Rope(10_000.0, 64, "half")),
    (record_format(512, "bf16"), rs.Rope(10_000.0, 64, "adjacent")),
    (record_format(96), rs.Rope(10_000.0, 24, "half")),
    (record_format(32, plane_order="planar"), None),
    (record_format(20, "bf16"), rs.Rope(10_000.0, 6, "half")),
    (record_format(24, "bf16"), rs.Rope(10_000.0, 6, "adjacent")),
]


@pytest.mark.parametrize("case", RECORDS, ids=lambda c: f"{c[0].type}_{c[0].head_dim}")
def test_records(cuda, case):
    """encode_records, store_records, ring_store and load_history of 3 sequences: padding, wraps, a
    chunk longer than the ring; a NaN and an infinity among the vectors."""
    fmt, rope = case
    layout = make_layout(fmt, 11)
    rng = np.random.default_rng(4)
    state_ids = i32([2, 2, 2, -1, 7, 0] + [1] * 30)
    positions = i32([9, 10, 11, 0, 5, 2**31 - 2, *range(40, 70)])
    kv = offset_copy(random_bf16(rng, (36, fmt.head_dim)), 0)
    kv[4, 3], kv[6, 5], kv[20, fmt.head_dim - 1] = 0x7FC0, 0x7F80, 0xFF80
    records = np.empty((36, fmt.record_bytes), np.uint8)
    encode = chooser(cuda, "encode_records")

    def run_encode(who, out):
        encode(who)(kv, positions, out, record_format=fmt, rope=rope)
        records[...] = out

    same(run_encode, (records.shape, np.uint8))
    # The reference raises for id 7; the kernel skips it like padding.
    for name, source in (("store_records", records), ("ring_store", kv)):
        options = {"rope": rope} if name == "ring_store" else {}
        slab = Guarded((3 * layout.slot_bytes,), np.uint8, "cpu")
        cuda[name](slab.array, layout, 1, source, state_ids, positions, **options)
        wanted = poisoned_slab(layout, 3)
        padded = np.where(state_ids == 7, -1, state_ids).astype(np.int32)
        operations("reference").store_records(wanted, layout, 1, records, padded, positions)
        np.testing.assert_array_equal(slab.host(), wanted)
    stages = [poisoned_slab(layout, 2) for _ in range(2)]
    places = i32([0, 0, 0, -1, 0, 9] + [-1] * 6 + [1] * 15 + [-1] * 9)
    given = (records, padded, positions)
    cuda["store_records"](slab.array, layout, 1, *given, stage=(stages[0], places))
    places[5] = -1
    operations("reference").store_records(wanted, layout, 1, *given, stage=(stages[1], places))
    np.testing.assert_array_equal(slab.host(), wanted)
    np.testing.assert_array_equal(*stages)
    plan = rs.plan_prefill(i32([1, 2, 0]), i32([3, 2, 0]), i32([70, 14, 0]), window=10, ring_len=11)
    load = chooser(cuda, "load_history")
    same(
        lambda who, out: load(who)(wanted, layout, 1, plan, out),
        ((plan.history_rows + 2, fmt.record_bytes), np.uint8),
    )


@pytest.mark.parametrize("shape", [(70, 4, 128), (3, 1, 1032), (5, 3, 7), (0, 2, 8)], ids=str)
def test_activations(cuda, shape):
    """seeded_activations, stack_activations and digest_outputs: several warps and blocks a row, odd
    widths, the largest seed, digests added to what is there."""
    rng = np.random.default_rng(5)
    tokens, heads, dim = shape
    ids = rng.integers(0, 2**31, tokens).astype(np.int32)
    positions = rng.integers(0, 2**31 - 1, tokens).astype(np.int32)
    previous = random_bf16(rng, shape)
    seeded, stack, digest = (
        chooser(cuda, name)
        for name in ("seeded_activations", "stack_activations", "digest_outputs")
    )
    flat = previous.reshape(tokens, heads * dim)
    same(
        lambda who, out: seeded(who)(2**64 - 1, 42, ids, positions, out),
        ((tokens, heads * dim), np.uint16),
    )
    same(
        lambda who, q, kv: stack(who)(previous, 2**63 + 5, 3, ids, positions, q, kv),
        (shape, np.uint16),
        ((tokens, dim), np.uint16),
    )
    same(lambda who, sums: digest(who)(flat, 42, sums), ((tokens,), np.uint64))


def test_seeded_rows_shared_by_warps(cuda, monkeypatch):
    """Where rows outnumber the warps that a GPU holds, one warp makes up to 32 rows: the same
    bytes. Here the limit is lowered so that 70 rows take groups of 32."""
    module = __import__("ringslab.rawkernels.cuda.seeded_activations", fromlist=["x"])
    monkeypatch.setattr(module, "ENOUGH_WARPS", 2)
    ids = np.arange(70, dtype=np.int32)
    op = chooser(cuda, "seeded_activations")
    same(lambda who, out: op(who)(1, 2, ids, ids, out), ((70, 520), np.uint16))
