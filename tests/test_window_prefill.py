"""window_prefill on every backend against the float64 reference on dequantized records, by the one
bound; exact small cases, and the value that decode will read."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from cases import PREFILL_CASES, prefill_inputs
from helpers import (
    bf16,
    check_prefill,
    constant_keys,
    encoded,
    from_bf16,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    run_decode,
    run_prefill,
    store,
    to_backend,
)

import ringslab as rs

DIM = 32
FORMATS = {"mxfp8": record_format(DIM), "bf16": record_format(DIM, "bf16")}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def means(backend, fmt, cached, new, *, window, ring_len, pivots=None):
    """Zero scores, value i at position i: outputs and lse of a chunk of `new` tokens after
    `cached` ones. The history comes out of a ring that holds them, over poison."""
    layout = make_layout(fmt, ring_len, num_layers=1)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, constant_keys(range(cached), DIM), 0, range(cached))
    plan = rs.plan_prefill([0], [new], [cached + new], window=window, ring_len=ring_len)
    if pivots is not None:
        plan = dataclasses.replace(plan, pivots=i32(pivots))
    records = np.full((window + new, fmt.record_bytes), 0xFF, np.uint8)
    operations("reference").load_history(slab, layout, 0, plan, records)
    records[window:] = encoded(constant_keys(range(cached, cached + new), DIM), fmt)
    q = np.zeros((new, 3, DIM), np.uint16)
    out, lse = run_prefill(backend, q, records, plan, fmt, softmax_scale=1.0)
    numbers = from_bf16(out)
    assert (numbers == numbers[:, :1, :1]).all()
    return numbers[:, 0, 0].tolist(), lse[:, 0].tolist()


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_shapes_within_the_bound(backend, case):
    """Every shape of the shared table, output and lse."""
    q, records, plan, fmt, options = prefill_inputs(case)
    check_prefill(backend, q, records, plan, fmt, **options)


def test_m01_m02_window_counts_the_query(backend, fmt):
    """W = 3, six keys of value i: means of 1, 2, 3, 3, 3, 3 keys, row 5 gives 4.0; W = 4: row 5
    gives 3.5, as decode does."""
    assert means(backend, fmt, 0, 6, window=3, ring_len=6)[0] == [0, 0.5, 1, 2, 3, 4]
    assert means(backend, fmt, 0, 6, window=4, ring_len=6)[0][5] == 3.5


def test_m04_chunk_is_aligned_at_the_end(backend, fmt):
    """Queries 7, 8, 9 on 10 keys, W = 4: 5.5, 6.5, 7.5."""
    assert means(backend, fmt, 7, 3, window=4, ring_len=12)[0] == [5.5, 6.5, 7.5]


def test_m07_window_of_one(backend, fmt):
    """W = 1, positions 3..7, random scores: exactly the value of each position."""
    keys = constant_keys(range(3, 8), DIM)
    plan = rs.plan_prefill([0], [5], [8], window=1, ring_len=4)
    records = np.concatenate([np.full((1, fmt.record_bytes), 0xFF, np.uint8), encoded(keys, fmt)])
    q = random_bf16(np.random.default_rng(1), (5, 5, DIM), 3.0)
    out, _ = run_prefill(backend, q, records, plan, fmt, softmax_scale=0.2)
    assert from_bf16(out)[:, 0, 0].tolist() == [3, 4, 5, 6, 7]


def test_m11_m12_every_row_of_a_long_chunk(backend, fmt):
    """n = 10, W = 4 in one call: 1, 2, 3, 4, 4 ... keys, no row left as it was."""
    found, lse = means(backend, fmt, 0, 10, window=4, ring_len=6)
    assert found == [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    np.testing.assert_allclose(np.exp(lse), [1, 2, 3, 4, 4, 4, 4, 4, 4, 4], rtol=1e-5)


def test_r02_r05_history_is_read_before_the_chunk_overwrites_it(backend, fmt):
    """W = 4, R = 8, chunk 8..15 after 0..7: query 8 gives 6.5. W = R = 8, 0..9 kept, chunk of 3:
    query 10 sees 3..10, 6.5."""
    assert means(backend, fmt, 8, 8, window=4, ring_len=8)[0][0] == 6.5
    assert means(backend, fmt, 10, 3, window=8, ring_len=8)[0][0] == 6.5


def test_n03_rows_that_see_no_key(backend, fmt):
    """Keys 1 and 3; rows see none, none, the first, both: 0, 0, 1, 2; lse -inf, -inf, 0, 0.693.
    Empty ranges may point anywhere."""
    pivots = [[0, 0, 0, 0], [3, 0, 4, 0], [4, 0, 5, 1], [5, 1, 7, 1]]
    found, lse = means(backend, fmt, 0, 4, window=4, ring_len=8, pivots=pivots)
    assert found == [0, 0, 1, 2]
    assert lse[:2] == [-np.inf, -np.inf]
    np.testing.assert_allclose(lse[2:], [0, math.log(2)], atol=1e-5)


def test_n04_empty_sequences_in_a_batch(backend):
    """Lengths 2, 0, 1: three rows, the third belongs to the third sequence; all empty: no rows."""
    fmt = FORMATS["bf16"]
    plan = rs.plan_prefill([0, 1, 2], [2, 0, 1], [2, 0, 1], window=4, ring_len=6)
    zeros = np.zeros((12, fmt.record_bytes), np.uint8)
    records = np.concatenate([zeros, encoded(constant_keys([1, 2, 8], DIM), fmt)])
    q = np.zeros((3, 2, DIM), np.uint16)
    out, _ = run_prefill(backend, q, records, plan, fmt, softmax_scale=1.0)
    assert from_bf16(out)[:, 0, 0].tolist() == [1, 1.5, 8]
    plan = rs.plan_prefill([0, 1, 2], [0, 0, 0], [0, 5, 0], window=4, ring_len=6)
    out, lse = run_prefill(backend, q[:0], zeros, plan, fmt, softmax_scale=1.0)
    assert (out.shape, lse.shape) == ((0, 2, DIM), (0, 2))


def test_q16_prefill_sees_the_rounded_value(backend):
    """A block with maximum 448 and one value 17, attention over that one key: 16 in prefill and in
    decode, bit for bit."""
    fmt = FORMATS["mxfp8"]
    kv = np.zeros((1, DIM), np.float32)
    kv[0, :2] = 448, 17
    q = np.zeros((1, 2, DIM), np.uint16)
    plan = rs.plan_prefill([0], [1], [1], window=1, ring_len=2)
    records = np.concatenate([np.zeros((1, fmt.record_bytes), np.uint8), encoded(bf16(kv), fmt)])
    prefill, _ = run_prefill(backend, q, records, plan, fmt, softmax_scale=1.0)
    layout = make_layout(fmt, 2, num_layers=1)
    slab = poisoned_slab(layout, 1)
    store(slab, layout, 0, bf16(kv), 0, [0])
    decode_plan = rs.plan_decode([0], [0], window=1, ring_len=2)
    decode, _ = run_decode(backend, q, slab, layout, 0, decode_plan, softmax_scale=1.0)
    assert from_bf16(prefill)[0, 0, 1] == 16
    np.testing.assert_array_equal(prefill, decode)


@pytest.mark.parametrize("num_keys", [2, 3, 300])
def test_k01_k02_k10_sink_counts_once_in_the_denominator(backend, fmt, num_keys):
    """The last query: scores 0 and ln 2, v = [1, 4], other keys far below; sink 0 gives 2.25, no
    sink 3.0, the lse is 1.0986 with and without it."""
    kv = np.zeros((num_keys, DIM), np.float32)
    kv[:, 0] = [-200.0] * (num_keys - 2) + [0.0, math.log(2)]
    kv[-2:, 1] = 1, 4
    plan = rs.plan_prefill([0], [num_keys], [num_keys], window=num_keys, ring_len=num_keys)
    records = np.zeros((2 * num_keys, fmt.record_bytes), np.uint8)
    records[num_keys:] = encoded(bf16(kv), fmt)
    q = np.zeros((num_keys, 1, DIM), np.float32)
    q[..., 0] = 1
    found = {}
    for name, sink in (("sink", np.zeros(1, np.float32)), ("none", None)):
        out, lse = check_prefill(backend, bf16(q), records, plan, fmt, softmax_scale=1.0, sink=sink)
        found[name] = from_bf16(out)[-1, 0, 1], lse[-1, 0]
    assert found["sink"][0] == pytest.approx(2.25, abs=0.25)
    assert found["none"][0] == pytest.approx(3.0, abs=0.1)
    assert found["sink"][1] == found["none"][1] == pytest.approx(math.log(3), abs=0.03)


def test_public_entry(fast_backend):
    """Outputs are allocated or filled; the joint buffer may have spare rows."""
    q, records, plan, fmt, options = prefill_inputs(PREFILL_CASES[5])  # without a sink
    wanted, _ = run_prefill("reference", q, records, plan, fmt, **options)
    spare = np.concatenate([records, np.full((5, fmt.record_bytes), 0xFF, np.uint8)])
    arrays = to_backend(q, fast_backend), to_backend(spare, fast_backend)
    plan = to_backend(plan, fast_backend)
    out, lse = rs.window_prefill(*arrays, plan, fmt, **options)
    again = rs.window_prefill(*arrays, plan, fmt, out=out, lse=lse, **options)
    assert again[0] is out
    assert again[1] is lse
    if fast_backend == "cpu":
        assert out.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(out.astype(np.float32), from_bf16(wanted), atol=0.02)


def test_refuses_wrong_arguments():
    """Numbers of both sides in the message."""
    q, records, plan, fmt, _ = prefill_inputs(PREFILL_CASES[1])

    def refused(pattern, *arguments, **options):
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.window_prefill(*arguments, **{"softmax_scale": 0.1, **options})

    refused(r"records\.shape\[0\]=257 but .*=258", q, records[:-1], plan, fmt)
    refused(r"records\.shape\[1\]=66 .*=128", q, records, plan, record_format(64, "bf16"))
    refused(r"q\.shape\[2\]=32", q[:, :, :32].copy(), records, plan, fmt)
    refused(r"q\.dtype=float32", q.astype(np.float32), records, plan, fmt)
    refused("not a RecordFormat", q, records, plan, "mxfp8")
    refused(r"sink\.shape", q, records, plan, fmt, sink=np.zeros((1, 1), np.float32))
    gqa = rs.make_record_format("mxfp8", 64, latent=False, num_kv_heads=1)
    refused(r"records\.shape\[1\]=66 .*=132", q, records, plan, gqa)  # K and V: twice as long
    outside = dataclasses.replace(plan, pivots=plan.pivots + i32([0, 0, 0, 1]))
    refused("section-2 starts", q, records, outside, fmt)
