"""Public cases about masks, empty rows and sinks whose numbers no other test has exactly;
docs/public-cases.md says what broke elsewhere. Scores and values are exact in every format here: a
key is 0 or 1 in dim 0, the scale is ln 2, and the values stand in dim 1."""

import math

import numpy as np
import pytest
from helpers import (
    bf16,
    check_prefill,
    encoded,
    from_bf16,
    i32,
    make_layout,
    poisoned_slab,
    record_format,
    run_decode,
    run_prefill,
    store,
    to_backend,
)

import ringslab as rs
from ringslab.errors import ArgumentError, PlanError

DIM, LN2 = 32, math.log(2)
FORMATS = {"mxfp8": record_format(DIM), "bf16": record_format(DIM, "bf16")}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def keys(scores, values):
    """kv bf16 [n, DIM]: score / ln 2 in dim 0, value in dim 1."""
    kv = np.zeros((len(scores), DIM), np.float32)
    kv[:, 0], kv[:, 1] = scores, values
    return bf16(kv)


def unit_queries(count, heads=1):
    q = np.zeros((count, heads, DIM), np.float32)
    q[..., 0] = 1
    return bf16(q)


def decode(backend, fmt, kv, *, window, sink=None):
    """Value and lse of the last position of a sequence, one decode step over its ring."""
    count = len(kv)
    layout = make_layout(fmt, max(window, count), num_layers=1)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, kv, 0, range(count))
    plan = rs.plan_decode([0], [count - 1], window=window, ring_len=max(window, count))
    sink = None if sink is None else np.float32([sink])
    out, lse = run_decode(
        backend, unit_queries(1), slab, layout, 0, plan, softmax_scale=LN2, sink=sink
    )
    return from_bf16(out)[0, 0, 1], lse[0, 0]


def prefill(backend, fmt, kv, *, window, sink=None):
    """Values and lses of all rows of one prefill from position 0."""
    count = len(kv)
    plan = rs.plan_prefill([0], [count], [count], window=window, ring_len=window)
    records = np.full((window + count, fmt.record_bytes), 0xFF, np.uint8)
    records[window:] = encoded(kv, fmt)
    sink = None if sink is None else np.float32([sink])
    out, lse = run_prefill(
        backend, unit_queries(count), records, plan, fmt, softmax_scale=LN2, sink=sink
    )
    return from_bf16(out)[:, 0, 1], lse[:, 0]


def test_m02_prefill_and_decode_see_the_same_keys(backend, fmt):
    """W = 4, position 5, v = i: 3.5 as row 5 of a prefill, and after a prefill of 5 whose records
    went into the ring, as one decode step; the same bits."""
    layout = make_layout(fmt, 5, num_layers=1)
    slab = to_backend(poisoned_slab(layout, 1), backend)
    kv = keys([0] * 6, range(6))
    whole, _ = prefill(backend, fmt, kv, window=4)
    plan = rs.plan_prefill([0], [5], [5], window=4, ring_len=5)
    records = to_backend(encoded(kv[:5], fmt), backend)
    ids, positions = (to_backend(x, backend) for x in (plan.token_state_ids, plan.positions))
    rs.store_records(slab, layout, 0, records, ids, positions)
    one = [to_backend(i32([n]), backend) for n in (0, 5)]
    rs.ring_store(slab, layout, 0, to_backend(kv[5:], backend), *one)
    step = rs.plan_decode(*one, window=4, ring_len=5)
    q = to_backend(unit_queries(1), backend)
    out, _ = rs.window_decode(q, slab, layout, 0, step, softmax_scale=LN2)
    host = out if isinstance(out, np.ndarray) else out.get()
    assert whole[5] == from_bf16(host.view(np.uint16))[0, 0, 1] == 3.5


@pytest.mark.parametrize("window", [0, -1, -(2**31), None, True, 1.0, "4"])
def test_m05_plans_take_no_window_below_one(window):
    """0, negatives, null, booleans, floats and text are refused by both plans, never read as
    "every key" or "none"; window 1 is the query's own key."""
    for plan in (
        lambda **sizes: rs.plan_decode([0], [3], **sizes),
        lambda **sizes: rs.plan_prefill([0], [4], [4], **sizes),
    ):
        with pytest.raises(PlanError, match="window="):
            plan(window=window, ring_len=8)
    assert rs.plan_decode([0], [3], window=1, ring_len=8).offset_len.tolist() == [[3, 1]]
    ones = rs.plan_prefill([0], [4], [4], window=1, ring_len=8).pivots
    assert (ones[:, 1] + ones[:, 3]).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("count", "window"), [(8, 3), (40, 3), (200, 5), (200, 64)])
def test_n01_first_key_tile_masked_for_a_row(backend, fmt, count, window):
    """n = 8, W = 3: rows 6 and 7 see nothing of the first keys that their tile visits. Zero scores,
    v = i: the plain means, no NaN, as dense attention has them; longer chunks put the edge of the
    window into every place of a tile. Random scores agree with the dense result."""
    found, lse = prefill(backend, fmt, keys([0] * count, np.arange(count) % 8), window=window)
    seen = [np.arange(max(0, p - window + 1), p + 1) % 8 for p in range(count)]
    wanted = np.array([rows.mean() for rows in seen])
    np.testing.assert_allclose(found, wanted, rtol=2**-8)
    np.testing.assert_allclose(lse, np.log([len(rows) for rows in seen]), atol=1e-5)
    rng = np.random.default_rng(count + window)
    kv = bf16(rng.standard_normal((count, DIM)))
    q = bf16(3 * rng.standard_normal((count, 2, DIM)))
    plan = rs.plan_prefill([0], [count], [count], window=window, ring_len=window)
    records = np.full((window + count, fmt.record_bytes), 0xFF, np.uint8)
    records[window:] = encoded(kv, fmt)
    check_prefill(backend, q, records, plan, fmt, softmax_scale=0.3)


def assert_k01(found, lse, sink, rel):
    wanted = 2.25 if sink is not None else 3.0
    assert found == pytest.approx(wanted, rel=rel)
    assert lse == pytest.approx(1.098612, abs=1e-5)


@pytest.mark.parametrize("sink", [0.0, None])
def test_k01_sink_counts_in_the_denominator_only(backend, fmt, sink):
    """Scores [0, ln 2], v = [1, 4], sink 0: exactly 2.25, and 3.0 without it; lse 1.098612 both
    times; the output without it times sigmoid(lse - sink) is the same number."""
    kv = keys([0, 1], [1, 4])
    assert_k01(*decode(backend, fmt, kv, window=2, sink=sink), sink, rel=1e-7)
    found, lse = prefill(backend, fmt, kv, window=2, sink=sink)
    assert_k01(found[1], lse[1], sink, rel=1e-7)
    assert found[0] == (0.5 if sink is not None else 1.0)
    assert 3.0 / (1 + math.exp(-1.098612289)) == pytest.approx(2.25, rel=1e-9)


@pytest.mark.parametrize("sink", [0.0, None])
@pytest.mark.parametrize("num_keys", [3, 300, 1100])
def test_k02_k10_sink_once_in_the_quantized_path(backend, num_keys, sink):
    """K01's two keys at the end of 3, 300 and 1,100 MXFP8 records, the others far below (scores of
    -310), in prefill and in decode: the sink changes all of them the same way, however many splits
    a kernel makes. Once a split would give 1.8."""
    kv = keys([-448.0] * (num_keys - 2) + [0, 1], [0] * (num_keys - 2) + [1, 4])
    fmt = FORMATS["mxfp8"]
    assert_k01(*decode(backend, fmt, kv, window=num_keys, sink=sink), sink, rel=1e-6)
    found, lse = prefill(backend, fmt, kv, window=num_keys, sink=sink)
    assert_k01(found[-1], lse[-1], sink, rel=1e-6)


@pytest.mark.parametrize("sink", [1.5, -np.inf, 1000.0])
def test_k06_sink_and_no_key_in_prefill(backend, fmt, sink):
    """A padding sequence sees no key: output 0 and lse -inf beside a sequence that sees its own,
    whatever the sink."""
    plan = rs.plan_prefill([-1, 0], [2, 1], [2, 1], window=4, ring_len=5)
    records = np.full((plan.history_rows + 3, fmt.record_bytes), 0xFF, np.uint8)
    records[plan.history_rows + 2] = encoded(keys([0], [4]), fmt)[0]
    sinks = np.full(3, sink, np.float32)
    q = unit_queries(3, heads=3)
    out, lse = run_prefill(backend, q, records, plan, fmt, softmax_scale=LN2, sink=sinks)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -np.inf).all()
    assert (lse[2] == 0).all()
    wanted = {1.5: 4 / (1 + math.exp(1.5)), -np.inf: 4.0, 1000.0: 0.0}[sink]
    np.testing.assert_allclose(from_bf16(out)[2, :, 1], wanted, rtol=2**-8)


def test_o04_slabs_and_layouts_off_their_boundary():
    """528 = 33 x 16: records may start at any multiple of 16, so no wider load is safe. A layout
    with another alignment is refused; on the host a slab may start anywhere, because its kernels
    read bytes: 8 bytes in gives the same answer."""
    fmt = record_format(512)
    assert fmt.record_bytes % 16 == 0
    assert fmt.record_bytes % 32 == 16
    layout = make_layout(fmt, 5, num_layers=1)
    assert all(ring.offset % 16 == 0 for ring in layout.rings)
    spare = np.full(2 * layout.slot_bytes + 8, 0xFF, np.uint8)
    views = [spare[start : start + layout.slot_bytes] for start in (0, 8)]
    assert views[0].ctypes.data % 16 != views[1].ctypes.data % 16
    kv = bf16(np.random.default_rng(4).standard_normal((3, 512)))
    q = bf16(np.random.default_rng(5).standard_normal((1, 4, 512)))
    plan = rs.plan_decode([0], [2], window=4, ring_len=5)
    outs = []
    for slab in views:
        rs.ring_store(slab, layout, 0, kv, i32([0] * 3), i32(range(3)))
        outs.append(rs.window_decode(q, slab, layout, 0, plan, softmax_scale=0.04)[0])
    np.testing.assert_array_equal(outs[0].view(np.uint16), outs[1].view(np.uint16))


@pytest.mark.parametrize("name", ["q", "slab", "out", "lse", "sink"])
def test_o05_views_of_every_argument(backend, name):
    """A strided view, a Fortran-ordered array and a broadcast one in the place of each array of
    window_decode: refused by name before anything is read or written, on every backend."""
    fmt = FORMATS["bf16"]
    layout = make_layout(fmt, 5, num_layers=1)
    plan = to_backend(rs.plan_decode([0, 0], [0, 1], window=4, ring_len=5), backend)
    arrays = {
        "q": unit_queries(2, heads=2),
        "slab": poisoned_slab(layout, 2),
        "out": unit_queries(2, heads=2),
        "lse": np.zeros((2, 2), np.float32),
        "sink": np.zeros(2, np.float32),
    }
    good = arrays[name]
    doubled = np.repeat(good, 2, axis=-1)
    views = [doubled[..., ::2], np.broadcast_to(good[:1], good.shape)]
    views += [np.asfortranarray(good)] if good.ndim > 1 else [good[::-1]]
    for view in views:
        if backend == "cuda":
            import cupy

            view = cupy.asarray(np.ascontiguousarray(doubled))[..., ::2]
        placed = {key: to_backend(x, backend) for key, x in arrays.items()} | {name: view}
        with pytest.raises(ArgumentError, match=name):
            rs.window_decode(
                placed["q"], placed["slab"], layout, 0, plan, softmax_scale=1.0,
                sink=placed["sink"], out=placed["out"], lse=placed["lse"],
            )  # fmt: skip
    assert (arrays["slab"] == 0xFF).all()


def dense(q_rows, kv, *, scale=1.0, **options):
    """window_attention of one sequence on the host: values in dim 1 and lse, of each query."""
    kv = kv[:, None]
    out, lse = rs.window_attention(
        unit_queries(q_rows), kv, kv, cu_seqlens_q=i32([0, q_rows]),
        cu_seqlens_k=i32([0, len(kv)]), softmax_scale=scale, **options,
    )  # fmt: skip
    return from_bf16(out.view(np.uint16))[:, 0, 1], lse[:, 0]


def test_m05_null_is_every_key():
    """n = 4: no window sees 1, 2, 3, 4 keys, a window of 1 one key each; 0 and -1 are refused."""
    kv = keys([0] * 4, range(4))
    for window, seen in ((None, [1, 2, 3, 4]), (1, [1] * 4), (4, [1, 2, 3, 4])):
        np.testing.assert_allclose(np.exp(dense(4, kv, window=window)[1]), seen, rtol=1e-6)
    for window in (0, -1):
        with pytest.raises(ArgumentError, match=f"window={window}"):
            dense(4, kv, window=window)


def test_n03_more_queries_than_keys():
    """4 queries on 2 keys, aligned at the end, v = [1, 3]: 0, 0, 1, 2; lse -inf, -inf, 0,
    0.693147, with a window, without one, and beside a sink, which takes no key's place."""
    kv = keys([0, 0], [1, 3])
    for window in (None, 2, 3):
        found, lse = dense(4, kv, window=window)
        assert found.tolist() == [0, 0, 1, 2]
        np.testing.assert_allclose(lse, [-np.inf, -np.inf, 0, 0.693147], atol=1e-6)
    found, lse = dense(4, kv, sink=np.float32([0]))
    assert found[:3].tolist() == [0, 0, 0.5]
    assert (lse[:2] == -np.inf).all()


@pytest.mark.parametrize("window", [1, None])
def test_k07_cap_first_and_mask_after(window):
    """Cap 1: a visible key of score 0 (v = 1), another (v = 9) that the mask hides, by the window
    or by causality: 1.0, where tanh of a masked score gives 3.151531. Cap 50 on a score of 100 is
    48.201379. The sink is not capped."""
    if window == 1:
        found, _ = dense(1, keys([1, 0], [9, 1]), softcap=1.0, window=1)
    else:
        found = dense(2, keys([0, 1], [1, 9]), softcap=1.0)[0][:1]
    assert found.tolist() == [1.0]
    _, lse = dense(1, keys([1], [1]), scale=100.0, softcap=50.0)
    assert lse[0] == pytest.approx(48.201379, abs=1e-4)
    assert 50 * math.tanh(2) == pytest.approx(48.201379, abs=1e-6)
    found, _ = dense(1, keys([0], [1]), softcap=1.0, sink=np.float32([5]))
    assert found[0] == pytest.approx(1 / (1 + math.exp(5)), rel=2**-8)


@pytest.mark.parametrize("softcap", [-1.0, math.inf, math.nan, None, True])
def test_k08_caps_that_are_no_caps(softcap):
    """0 turns the cap off in Python (null does in YAML); all else that is not positive and finite
    is refused, so 0 * tanh(x / 0) never runs."""
    with pytest.raises(ArgumentError, match="softcap="):
        dense(1, keys([1], [1]), softcap=softcap)
    _, lse = dense(1, keys([1], [1]), scale=100.0, softcap=0.0)
    assert lse[0] == 100.0
