"""window_decode on every backend against the float64 reference on dequantized records, by the one
bound; exact small cases; what must not leak."""

import math

import ml_dtypes
import numpy as np
import pytest
from cases import DECODE_CASES, decode_inputs
from helpers import (
    bf16,
    check_decode,
    constant_keys,
    from_bf16,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    run_decode,
    store,
    to_backend,
    to_host,
)

import ringslab as rs

DIM = 32
FORMATS = {"mxfp8": record_format(DIM), "bf16": record_format(DIM, "bf16")}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def mean_of_visible(backend, fmt, stored, queries, *, window, ring_len, valid_start=0):
    """Zero scores: the output of each query is the plain mean of its visible keys. `stored` is a
    list of (position, value), written in order; `queries` are positions, each its own sequence."""
    layout = make_layout(fmt, ring_len, num_layers=1)
    slab = poisoned_slab(layout, 2)
    for position, value in stored:
        store(slab, layout, 0, constant_keys([value], DIM), 1, [position])
    plan = rs.plan_decode(
        np.ones(len(queries), np.int32),
        i32(queries),
        window=window,
        ring_len=ring_len,
        swa_valid_start=valid_start,
    )
    q = np.zeros((len(queries), 3, DIM), np.uint16)
    out, lse = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=1.0)
    numbers = from_bf16(out)
    assert (numbers == numbers[:, :1, :1]).all()  # the same in every head and dim
    np.testing.assert_allclose(lse, np.log(plan.offset_len[:, 1:] + np.zeros(3)), rtol=1e-6)
    return numbers[:, 0, 0].tolist()


def counting(n):
    return [(position, position) for position in range(n)]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_shapes_within_the_bound(backend, case):
    """Every shape of the shared table, output and lse."""
    q, slab, layout, layer, plan, options = decode_inputs(case)
    out, lse = check_decode(backend, q, slab, layout, layer, plan, **options)
    empty = plan.offset_len[:, 1] == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -np.inf).all()


def test_m01_m02_window_counts_the_query(backend, fmt):
    """W = 3, six keys of value i: means of 1, 2, 3, 3, 3, 3 keys, row 5 gives 4.0; W = 4,
    position 5: 3.5."""
    found = mean_of_visible(backend, fmt, counting(6), range(6), window=3, ring_len=6)
    assert found == [0, 0.5, 1, 2, 3, 4]
    assert mean_of_visible(backend, fmt, counting(6), [5], window=4, ring_len=6) == [3.5]


def test_m03_m04_decode_masks_by_position(backend, fmt):
    """W = 4, ten keys: queries at 7, 8, 9 give 5.5, 6.5, 7.5."""
    found = mean_of_visible(backend, fmt, counting(10), [7, 8, 9], window=4, ring_len=12)
    assert found == [5.5, 6.5, 7.5]


def test_m07_window_of_one(backend, fmt):
    """W = 1, p = 7, random scores: exactly the value of position 7 after its round trip."""
    rng = np.random.default_rng(1)
    layout = make_layout(fmt, 4, num_layers=1)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, constant_keys(range(8), DIM), 0, range(8))
    plan = rs.plan_decode([0], [7], window=1, ring_len=4)
    q = random_bf16(rng, (1, 5, DIM), 3.0)
    out, _ = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=0.2)
    assert (from_bf16(out) == 7.0).all()


def test_r01_s01_each_query_of_a_step_has_its_own_window(backend, fmt):
    """W = 4, a step writes 10, 11, 12 into a ring of 6 first; then its queries give 8.5, 9.5,
    10.5: the ring of W + T - 1 rows still holds position 7."""
    found = mean_of_visible(backend, fmt, counting(13), [10, 11, 12], window=4, ring_len=6)
    assert found == [8.5, 9.5, 10.5]


def test_r04_the_step_where_the_length_equals_w(backend, fmt):
    """W = R = 8: at p = 6, 7, 8, 9 there are 7, 8, 8, 8 keys, one step after the other."""
    for p, wanted in ((6, 3.0), (7, 3.5), (8, 4.5), (9, 5.5)):
        assert mean_of_visible(backend, fmt, counting(p + 1), [p], window=8, ring_len=8) == [wanted]


def test_r08_reused_slot_shows_nothing_old(backend, fmt):
    """W = 4, R = 6: A wrote ten tokens of 100; B's v = [0, 1] at p = 1 gives 0.5, and so it does
    over 0xFF bytes."""
    old = [(position, 100) for position in range(10)]
    for before in (old, []):
        stored = [*before, (0, 0), (1, 1)]
        assert mean_of_visible(backend, fmt, stored, [1], window=4, ring_len=6) == [0.5]


def test_r09_mask_is_not_wider_than_the_sequence(backend, fmt):
    """W = 4, p = 1, v = [8, 4], all other rows 0: 6.0."""
    stored = [(2, 0), (3, 0), (4, 0), (0, 8), (1, 4)]
    assert mean_of_visible(backend, fmt, stored, [1], window=4, ring_len=5) == [6.0]


def test_r14_read_across_the_wrap(backend):
    """State 3, R = 134, W = 128, p = 1000: only position 938 (row 402, the first behind the wrap)
    is not zero; the mean is 1 / 128. State 4, where a straight read would go on, is poisoned."""
    fmt = FORMATS["bf16"]
    layout = make_layout(fmt, 134, num_layers=1)
    slab = poisoned_slab(layout, 5)
    values = np.zeros((128, DIM), np.float32)
    values[938 - 873] = 1
    store(slab, layout, 0, bf16(values), 3, range(873, 1001))
    plan = rs.plan_decode([3], [1000], window=128, ring_len=134)
    q = np.zeros((1, 2, DIM), np.uint16)
    out, _ = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=1.0)
    assert (from_bf16(out) == 1 / 128).all()


def test_s02_rejected_drafts_are_not_seen(backend, fmt):
    """W = 4, R = 9: a step writes 10..15, two drafts are accepted, then one query at 13 gives
    11.5: 14 and 15 are in the ring but never read."""
    assert mean_of_visible(backend, fmt, counting(16), [13], window=4, ring_len=9) == [11.5]


def keys_with_scores(scores, dims=DIM):
    """kv whose dim 0 is the score (for q = [1, 0, ...], scale 1) and whose dim 1 is set later."""
    kv = np.zeros((len(scores), dims), np.float32)
    kv[:, 0] = scores
    return kv


def sink_case(backend, fmt, num_keys, sink):
    """K01's numbers in dim 1: scores [0, ln 2] (bf16: 0.6953), v = [1, 4], further keys far below.
    Returns the output of dim 1 and the lse."""
    kv = keys_with_scores([-200.0] * (num_keys - 2) + [0.0, math.log(2)])
    kv[-2:, 1] = 1, 4
    layout = make_layout(fmt, num_keys, num_layers=1)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, bf16(kv), 0, range(num_keys))
    plan = rs.plan_decode([0], [num_keys - 1], window=num_keys, ring_len=num_keys)
    q = np.zeros((1, 1, DIM), np.float32)
    q[..., 0] = 1
    sink = None if sink is None else np.float32([sink])
    out, lse = check_decode(backend, bf16(q), slab, layout, 0, plan, softmax_scale=1.0, sink=sink)
    return from_bf16(out)[0, 0, 1], lse[0, 0]


@pytest.mark.parametrize("num_keys", [2, 3, 300])
def test_k01_k02_k10_sink_counts_once_in_the_denominator(backend, fmt, num_keys):
    """Scores 0 and ln 2, v = [1, 4], sink 0: 2.25 against 3.0 without it, lse 1.0986 both times;
    for 2, 3 and 300 keys, mxfp8 and bf16 records (ln 2 rounds to 0.6953 in bf16, 0.6875 in E4M3;
    the tolerance is that rounding)."""
    with_sink, lse = sink_case(backend, fmt, num_keys, 0.0)
    without, lse_without = sink_case(backend, fmt, num_keys, None)
    assert with_sink == pytest.approx(2.25, abs=0.25)
    assert without == pytest.approx(3.0, abs=0.1)
    assert lse == lse_without == pytest.approx(math.log(3), abs=0.03)
    sigmoid = 1 / (1 + math.exp(0.0 - lse))
    assert with_sink == pytest.approx(without * sigmoid, rel=2**-7)


@pytest.mark.parametrize("sink", [1.5, -np.inf, 1000.0])
def test_k06_sink_and_no_key(backend, sink):
    """No visible key: output 0 and lse -inf, whatever the sink."""
    layout = make_layout(FORMATS["mxfp8"], 6, num_layers=1)
    plan = rs.plan_decode([-1, -1], [0, 0], window=4, ring_len=6)
    q = random_bf16(np.random.default_rng(0), (2, 3, DIM))
    sinks = np.full(3, sink, np.float32)
    slab = poisoned_slab(layout, 1)
    out, lse = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=1.0, sink=sinks)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_huge_sink_gives_zero_not_nan(backend, fmt):
    """Sink 1000 above all scores: output 0, the lse unchanged and finite."""
    out, lse = sink_case(backend, fmt, 3, 1000.0)
    assert out == 0
    assert np.isfinite(lse)


def test_large_scores_stay_finite(backend):
    """Scores of +-30,000: the largest key wins, no overflow; against the reference."""
    fmt = FORMATS["bf16"]
    layout = make_layout(fmt, 9, num_layers=1)
    slab = poisoned_slab(layout, 1)
    kv = random_bf16(np.random.default_rng(2), (9, DIM), 30.0)
    store(slab, layout, 0, kv, 0, range(9))
    plan = rs.plan_decode([0, 0], [8, 2], window=9, ring_len=9)
    q = random_bf16(np.random.default_rng(3), (2, 4, DIM), 100.0)
    check_decode(backend, q, slab, layout, 0, plan, softmax_scale=1.0)


def test_p07_key_turned_by_position(backend):
    """W = 5, R = 6, query 9, key 5, unit vectors, frequency 1: the score is cos(4) = -0.653644, not
    cos(3 - 5). The other four keys are zero: lse = ln(4 + exp(cos 4))."""
    fmt = FORMATS["bf16"]
    rope = rs.Rope(10000.0, 2, "adjacent")
    layout = make_layout(fmt, 6, num_layers=1)
    slab = to_backend(poisoned_slab(layout, 1), backend)
    unit = np.zeros((1, DIM), np.float32)
    unit[0, DIM - 2] = 1
    kv = np.concatenate([bf16(unit), np.zeros((4, DIM), np.uint16)])
    ops = operations(backend)
    positions = to_backend(i32(range(5, 10)), backend)
    states = to_backend(np.zeros(5, np.int32), backend)
    ops.ring_store(slab, layout, 0, to_backend(kv, backend), states, positions, rope=rope)
    q = to_backend(bf16(unit)[None], backend)
    ops.apply_rope(q, to_backend(i32([9]), backend), q, rope=rope)
    plan = rs.plan_decode([0], [9], window=5, ring_len=6)
    host_q, host_slab = to_host(q), to_host(slab)
    _, lse = check_decode(backend, host_q, host_slab, layout, 0, plan, softmax_scale=1.0)
    assert lse[0, 0] == pytest.approx(math.log(4 + math.exp(math.cos(4))), abs=2e-3)


def test_rope_out_undoes_the_rotation_of_the_values(backend):
    """All keys are one vector turned by one position p: the output, turned back by p, is that
    vector again, within bf16."""
    fmt = FORMATS["bf16"]
    rope = rs.Rope(10000.0, DIM, "half")
    layout = make_layout(fmt, 4, num_layers=1)
    vector = random_bf16(np.random.default_rng(4), (1, DIM))
    turned = rs.apply_rope(vector, [1003], rope).view(np.uint16)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, np.repeat(turned, 4, axis=0), 0, range(1000, 1004))
    plan = rs.plan_decode([0], [1003], window=4, ring_len=4)
    q = random_bf16(np.random.default_rng(5), (1, 2, DIM))
    out, _ = check_decode(backend, q, slab, layout, 0, plan, softmax_scale=0.1, rope_out=rope)
    np.testing.assert_allclose(from_bf16(out)[0, 0], from_bf16(vector)[0], atol=0.02, rtol=0.02)


def test_public_entry(fast_backend):
    """Outputs are allocated or filled, bf16 of either dtype, read-only inputs are fine."""
    case = DECODE_CASES[0]
    q, slab, layout, layer, plan, options = decode_inputs(case)
    options["sink"] = to_backend(options["sink"], fast_backend)
    place = to_backend(plan, fast_backend)
    arrays = to_backend(q, fast_backend), to_backend(slab, fast_backend)
    out, lse = rs.window_decode(*arrays, layout, layer, place, **options)
    again = rs.window_decode(*arrays, layout, layer, place, out=out, lse=lse, **options)
    assert again[0] is out
    if fast_backend == "cpu":
        assert out.dtype == ml_dtypes.bfloat16
        q.flags.writeable = slab.flags.writeable = False
        rs.window_decode(q.view(ml_dtypes.bfloat16), slab, layout, layer, plan, **options)


def test_refuses_wrong_arguments():
    """Numbers of both sides in the message, before anything is written."""
    q, slab, layout, layer, plan, _ = decode_inputs(DECODE_CASES[0])
    scale = {"softmax_scale": 0.1}

    def refused(pattern, *arguments, **options):
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.window_decode(*arguments, **{**scale, **options})

    refused(
        r"q\.shape\[2\]=32 but the layout's head_dim=64", q[:, :, :32].copy(), slab, layout, 1, plan
    )
    refused(r"q\.shape\[0\]=2", np.concatenate([q, q]), slab, layout, layer, plan)
    refused("C-contiguous", q[:, :, ::2], slab, layout, layer, plan)
    refused("int8", q.view(np.int8), slab, layout, layer, plan)
    refused("slot_bytes", q, slab[:-1], layout, layer, plan)
    refused(r"sink\.shape\[0\]=3", q, slab, layout, layer, plan, sink=np.zeros(3, np.float32))
    refused("float64", q, slab, layout, layer, plan, sink=np.zeros(4))
    refused("softmax_scale=nan", q, slab, layout, layer, plan, softmax_scale=float("nan"))
    refused(r"lse\.shape\[1\]=2", q, slab, layout, layer, plan, lse=np.zeros((1, 2), np.float32))
    refused(r"rope_out\.dims=128", q, slab, layout, layer, plan, rope_out=rs.Rope(1e4, 128, "half"))
    other = rs.plan_decode([0], [0], window=128, ring_len=135)
    refused("ring_len=135", q, slab, layout, layer, other)
    beyond = rs.plan_decode([2], [0], window=128, ring_len=134)
    refused("offsets", q, slab, layout, layer, beyond)
