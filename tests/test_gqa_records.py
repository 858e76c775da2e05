"""Records of K and V apart (grouped-query heads) in encode_records, ring_store, store_records and
load_history on every backend: golden bytes, and the bytes of a model that quantizes head by head.
The CUDA kernels are played on the CPU at the end of the file, where there is g++."""

import shutil

import numpy as np
import pytest
from helpers import (
    Guarded,
    bf16,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    to_backend,
)
from kernels_on_host import launchers

import ringslab as rs
from ringslab.layouts.formats import make_record_format
from ringslab.layouts.rings import MAX_POSITION

HEADS, DIM = 3, 64
ROPES = {
    "none": None,
    "adjacent": rs.Rope(10_000.0, 32, "adjacent"),
    "half": rs.Rope(10_000.0, 64, "half"),
}


def gqa_format(record_type="mxfp8", heads=HEADS, dim=DIM, **options):
    return make_record_format(record_type, dim, latent=False, num_kv_heads=heads, **options)


FORMATS = {
    "mxfp8": gqa_format(),
    "planar": gqa_format(plane_order="planar"),
    "ocp": gqa_format(scale_rounding="floor", amax_floor=0.0),
    "bf16": gqa_format("bf16"),
    "fp16": gqa_format("fp16"),
}


def random_kv(rng, tokens, fmt, spread=20):
    """(k, v) of many magnitudes with zeros, infinities and a NaN, in the dtype of the format."""
    shape = (tokens, fmt.num_kv_heads, fmt.head_dim)
    spread = min(spread, 6) if fmt.type == "fp16" else spread
    parts = []
    for _ in range(2):
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, (*shape[:2], 1))
        x[::5, 0, 1] = 0
        x[1::7, -1, 2] = -np.inf
        x[2::9, 0, -1] = np.nan
        parts.append(x.astype(np.float16) if fmt.type == "fp16" else bf16(x))
    return tuple(parts)


def to_place(kv, backend):
    return tuple(to_backend(part, backend) for part in kv)


def encode(backend, kv, fmt, positions=None, rope=None):
    out = Guarded((kv[0].shape[0], fmt.record_bytes), np.uint8, backend)
    operations(backend).encode_records(
        to_place(kv, backend),
        to_backend(positions, backend),
        out.array,
        record_format=fmt,
        rope=rope,
    )
    return out.host()


def modelled(kv, fmt, positions=None, rope=None):
    """Independent model: each head's vector by the public codec and apply_rope, joined by hand."""
    if fmt.type == "fp16":
        assert rope is None
        return np.concatenate([p.reshape(len(p), -1).view(np.uint8) for p in kv], axis=1)
    k, v = kv
    if rope is not None:
        k = rs.apply_rope(k, positions, rope).view(np.uint16)
    runs = []
    for part in (k, v):
        if fmt.type == "bf16":
            runs.append(part.reshape(len(part), -1).view(np.uint8))
            continue
        rule = {"scale_rounding": fmt.scale_rounding, "amax_floor": fmt.amax_floor}
        by_head = [rs.quantize_mxfp8(part[:, h].copy(), **rule) for h in range(fmt.num_kv_heads)]
        runs += [np.concatenate([pair[i] for pair in by_head], axis=1) for i in (0, 1)]
    return np.concatenate(runs, axis=1)


def test_golden_record(backend):
    """2 heads of 32: K is 448 in head 0 and 500 in head 1, V is 1 and 2: value bytes 7e and 78 with
    scales 127 and 128, then 78 (256 over 2^-8) with scales 119 and 120."""
    fmt = gqa_format(heads=2, dim=32)
    k, v = np.zeros((1, 2, 32), np.float32), np.zeros((1, 2, 32), np.float32)
    k[0, 0, 0], k[0, 1, 1], v[0, 0, 2], v[0, 1, 3] = 448, 500, 1, 2
    record = encode(backend, (bf16(k), bf16(v)), fmt)[0]
    wanted = np.zeros(132, np.uint8)
    wanted[[0, 32 + 1, 64, 65]] = 0x7E, 0x78, 127, 128
    wanted[[66 + 2, 66 + 32 + 3, 130, 131]] = 0x78, 0x78, 119, 120
    np.testing.assert_array_equal(record, wanted)


@pytest.mark.parametrize("record_type", ["bf16", "fp16"])
def test_golden_plain_record(backend, record_type):
    """2 heads of 4: K bits, then V bits, low bytes first; 1.0 is 3f80 in bf16 and 3c00 in fp16."""
    fmt = gqa_format(record_type, heads=2, dim=4)
    one, two = (0x3F80, 0x4000) if record_type == "bf16" else (0x3C00, 0x4000)
    bits = np.zeros((2, 1, 2, 4), np.uint16)
    bits[0, 0, 1, 2], bits[1, 0, 0, 3] = one, two
    k, v = bits if record_type == "bf16" else bits.view(np.float16)
    record = encode(backend, (k.copy(), v.copy()), fmt)[0].view(np.uint16)
    assert record.tolist() == [0] * 6 + [one, 0] + [0, 0, 0, two] + [0] * 4


@pytest.mark.parametrize("name", ["mxfp8", "ocp", "bf16", "fp16"])
def test_record_is_heads_of_k_then_of_v(backend, name):
    """40 tokens of 3 heads, zeros, infinities and NaNs among them: the model's bytes."""
    fmt = FORMATS[name]
    kv = random_kv(np.random.default_rng(1), 40, fmt)
    np.testing.assert_array_equal(encode(backend, kv, fmt), modelled(kv, fmt))


@pytest.mark.parametrize("rope", ["adjacent", "half"])
@pytest.mark.parametrize("name", ["mxfp8", "bf16"])
def test_only_keys_are_rotated(backend, name, rope):
    """With a rotation K's bytes are those of apply_rope, at positions from 0 to 2^31 - 2 and for
    -1 (as 0); V's are those without one."""
    fmt, rng = FORMATS[name], np.random.default_rng(2)
    kv = random_kv(rng, 20, fmt)
    positions = rng.integers(0, MAX_POSITION, 20, dtype=np.int32)
    positions[:4] = 0, MAX_POSITION, 1023, -1
    found = encode(backend, kv, fmt, positions, ROPES[rope])
    np.testing.assert_array_equal(found, modelled(kv, fmt, positions, ROPES[rope]))
    plain = encode(backend, kv, fmt)
    np.testing.assert_array_equal(found[:, fmt.part_bytes :], plain[:, fmt.part_bytes :])


@pytest.mark.parametrize("rope", ["adjacent", "half"])
def test_fp16_keys_are_rotated_in_float32(backend, rope):
    """fp16 keys after a rotation are the float32 rotation of their values, rounded once; dims
    before the rotated ones keep their bits; a NaN is 7e00 and an overflow an infinity."""
    fmt, rope = FORMATS["fp16"], ROPES[rope]
    kv = random_kv(np.random.default_rng(3), 20, fmt)
    kv[0][3, 1, -1], kv[0][3, 1, -2] = 65504, -65504
    positions = i32(range(1000, 1020))
    found = encode(backend, kv, fmt, positions, rope)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = rs.apply_rope(kv[0].astype(np.float32), positions, rope).astype(np.float16)
    wanted = np.where(np.isnan(exact), 0x7E00, exact.view(np.uint16)).astype(np.uint16)
    wanted[:, :, : DIM - rope.dims] = kv[0].view(np.uint16)[:, :, : DIM - rope.dims]
    np.testing.assert_array_equal(found[:, : fmt.part_bytes], wanted.reshape(20, -1).view(np.uint8))


def expected_slab(layout, num_slots, layer, records, state_ids, positions):
    """Independent model of a store: byte ranges of each record by hand, token after token."""
    slab = poisoned_slab(layout, num_slots)
    ring = layout.ring(layer)
    fmt = ring.record_format
    for record, state_id, position in zip(records, state_ids, positions, strict=True):
        if state_id < 0:
            continue
        start = state_id * layout.slot_bytes + ring.offset
        index = position % ring.ring_len
        if fmt.plane_order == "interleaved":
            at = start + index * fmt.record_bytes
            slab[at : at + fmt.record_bytes] = record
            continue
        halves = record.reshape(2, -1)
        split = fmt.part_value_bytes
        at = start + index * fmt.value_bytes
        slab[at : at + fmt.value_bytes] = halves[:, :split].reshape(-1)
        at = start + ring.ring_len * fmt.value_bytes + index * fmt.scale_bytes
        slab[at : at + fmt.scale_bytes] = halves[:, split:].reshape(-1)
    return slab


STATE_IDS = i32([2, 2, 2, -1, 0] + [1] * 30)
POSITIONS = i32([9, 10, 11, 0, MAX_POSITION, *range(40, 70)])  # a chunk longer than the ring


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", FORMATS)
def test_ring_store_is_encode_then_store(backend, name, rope):
    """A step with wraps and padding, a chunk of 30 into a ring of 11, layer 1 of 2: ring_store, and
    store_records of the encoded bytes, both fill the slab like the model and nothing else."""
    fmt = FORMATS[name]
    layout = make_layout(fmt, 11)
    kv = random_kv(np.random.default_rng(4), 35, fmt)
    records = encode("reference", kv, fmt, POSITIONS, ROPES[rope])
    wanted = expected_slab(layout, 3, 1, records, STATE_IDS, POSITIONS)
    places = (to_backend(STATE_IDS, backend), to_backend(POSITIONS, backend))
    slab = Guarded((3 * layout.slot_bytes,), np.uint8, backend)
    arguments = (slab.array, layout, 1, to_place(kv, backend), *places)
    operations(backend).ring_store(*arguments, rope=ROPES[rope])
    np.testing.assert_array_equal(slab.host(), wanted)
    slab = Guarded((3 * layout.slot_bytes,), np.uint8, backend)
    arguments = (slab.array, layout, 1, to_backend(records, backend), *places)
    operations(backend).store_records(*arguments)
    np.testing.assert_array_equal(slab.host(), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_history_comes_back_whole(backend, name):
    """Records of positions 40..69 in a ring of 11: the history of a chunk at 70 with window 10 is
    records 60..69, whole even where the ring is planar; a new prompt has zeros."""
    fmt = FORMATS[name]
    layout = make_layout(fmt, 11)
    rng = np.random.default_rng(5)
    records = rng.integers(0, 256, (30, fmt.record_bytes)).astype(np.uint8)
    slab = expected_slab(layout, 3, 1, records, [1] * 30, range(40, 70))
    plan = rs.plan_prefill([1, 0], [3, 2], [73, 2], window=10, ring_len=11)
    out = Guarded((plan.history_rows + 1, fmt.record_bytes), np.uint8, backend)
    operations(backend).load_history(
        to_backend(slab, backend), layout, 1, to_backend(plan, backend), out.array
    )
    found = out.host()
    np.testing.assert_array_equal(found[:10], records[20:])
    assert not found[10:20].any()
    assert (found[20] == 0xFF).all()


def test_public_entries(fast_backend):
    """A pair as tuple or list, `out` given or not, no tokens; ring_store on the same pair."""
    fmt = FORMATS["mxfp8"]
    kv = random_kv(np.random.default_rng(6), 4, fmt)
    placed = to_place(kv, fast_backend)
    one = rs.encode_records(list(placed), fmt)
    two = rs.encode_records(placed, fmt, out=one)
    assert two is one
    wanted = encode("reference", kv, fmt)
    np.testing.assert_array_equal(one if isinstance(one, np.ndarray) else one.get(), wanted)
    empty = tuple(part[:0] for part in placed)
    assert rs.encode_records(empty, fmt).shape == (0, fmt.record_bytes)
    layout = make_layout(fmt, 11)
    slab = to_backend(poisoned_slab(layout, 1), fast_backend)
    ids = to_backend(i32([0, 0, 0, 0]), fast_backend)
    rs.ring_store(slab, layout, 0, placed, ids, to_backend(i32([3, 4, 5, 6]), fast_backend))
    host = slab if isinstance(slab, np.ndarray) else slab.get()
    np.testing.assert_array_equal(layout.view(host, 0)[0, 3:7, 0], wanted)


def test_refuses_wrong_input():
    """One array for a pair, a pair for a latent format, three arrays, wrong heads, unequal
    lengths, the other dtype, a rope without positions."""
    fmt = FORMATS["mxfp8"]
    k = random_bf16(np.random.default_rng(7), (4, HEADS, DIM))
    half = k.view(np.float16)

    def refused(pattern, kv, fmt=fmt, **options):
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.encode_records(kv, fmt, **options)

    refused(r"num_kv_heads=3 apart; pass kv=\(k, v\)", k)
    refused(
        "is latent; pass one array",
        (k[:, 0].copy(), k[:, 0].copy()),
        make_record_format("mxfp8", DIM),
    )
    refused("kv has 3 members", (k, k, k))
    refused(r"k\.shape\[1\]=2 .*num_kv_heads=3", (k[:, :2].copy(), k[:, :2].copy()))
    refused(r"v\.shape\[0\]=3 but k\.shape\[0\]=4", (k, k[:3]))
    refused("float16 but must be bfloat16", (half, half))
    refused("uint16 but must be float16", (k, k), FORMATS["fp16"])
    refused("positions=None", (k, k), rope=ROPES["half"])
    layout = make_layout(fmt, 11)
    ids = i32([0, 0, 0, 0])
    with pytest.raises(rs.errors.ArgumentError, match=r"pass kv=\(k, v\)"):
        rs.ring_store(poisoned_slab(layout, 1), layout, 0, k, ids, ids)


# The CUDA kernels by g++.


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        yield launchers(patch, tmp_path_factory.mktemp("gqa_kernels"))


def aligned(x):
    """A copy at a multiple of 16 bytes, as CuPy's arrays are."""
    flat = np.empty(x.nbytes + 16, np.uint8)
    start = -flat.ctypes.data % 16
    flat[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return flat[start : start + x.nbytes].view(x.dtype).reshape(x.shape)


ON_HOST = [
    (gqa_format(heads=8, dim=128), rs.Rope(1e6, 128, "half")),
    (gqa_format(heads=3, dim=64, plane_order="planar"), rs.Rope(1e4, 32, "adjacent")),
    (gqa_format(heads=1, dim=32), None),  # records at odd bytes
    (gqa_format("bf16", heads=5, dim=96), rs.Rope(1e4, 96, "adjacent")),
    (gqa_format("bf16", heads=2, dim=20), rs.Rope(1e4, 6, "half")),  # one lane an element
    (gqa_format("fp16", heads=10, dim=256), rs.Rope(1e4, 256, "half")),  # a part in many turns
    (gqa_format("fp16", heads=3, dim=40), rs.Rope(1e4, 12, "adjacent")),
    (gqa_format("fp16", heads=3, dim=9), rs.Rope(1e4, 4, "adjacent")),
]


@pytest.mark.parametrize(
    ("fmt", "rope"), ON_HOST, ids=lambda x: f"{x.type}_{x.head_dim}" if hasattr(x, "fields") else ""
)
def test_cuda_kernels_on_the_host(kernels, fmt, rope):
    """encode_records, ring_store, store_records and load_history by their launchers and sources:
    the reference's bytes, padding, wraps, ids of no slot and a chunk longer than the ring."""
    layout = make_layout(fmt, 11)
    kv = tuple(aligned(x) for x in random_kv(np.random.default_rng(8), 35, fmt))
    records = np.empty((35, fmt.record_bytes), np.uint8)
    out = Guarded(records.shape, np.uint8, "cpu")
    kernels["encode_records"](kv, POSITIONS, out.array, record_format=fmt, rope=rope)
    records = encode("reference", kv, fmt, POSITIONS, rope)
    np.testing.assert_array_equal(out.host(), records)
    wanted = expected_slab(layout, 3, 1, records, STATE_IDS, POSITIONS)
    ids = np.where(STATE_IDS < 0, 7, STATE_IDS).astype(np.int32)  # no slot: skipped like padding
    for name, source in (("store_records", aligned(records)), ("ring_store", kv)):
        options = {"rope": rope} if name == "ring_store" else {}
        slab = Guarded((3 * layout.slot_bytes,), np.uint8, "cpu")
        kernels[name](slab.array, layout, 1, source, ids, POSITIONS, **options)
        np.testing.assert_array_equal(slab.host(), wanted)
    plan = rs.plan_prefill(i32([1, 2, 0]), i32([3, 2, 0]), i32([70, 14, 0]), window=10, ring_len=11)
    found, loaded = (
        Guarded((plan.history_rows + 2, fmt.record_bytes), np.uint8, "cpu") for _ in range(2)
    )
    kernels["load_history"](wanted, layout, 1, plan, found.array)
    operations("reference").load_history(wanted, layout, 1, plan, loaded.array)
    np.testing.assert_array_equal(found.host(), loaded.host())
