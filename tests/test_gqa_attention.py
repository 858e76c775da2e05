"""window_decode and window_prefill over records of K and V apart, softcaps and pinned positions:
every backend against the reference by the one bound, and the reference against dense attention over
the contiguous keys of each sequence, which knows nothing of rings, plans and records."""

import numpy as np
import pytest
from cases import (
    GQA_DECODE_CASES,
    GQA_PREFILL_CASES,
    PINNED_DECODE_CASES,
    PINNED_PREFILL_CASES,
    Case,
    decode_inputs,
    prefill_inputs,
)
from helpers import (
    check_decode,
    check_prefill,
    encoded,
    from_bf16,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_kv,
    random_values,
    record_format,
    run_decode,
    run_prefill,
    to_backend,
    to_host,
)

import ringslab as rs


@pytest.mark.parametrize("case", [*GQA_DECODE_CASES, *PINNED_DECODE_CASES], ids=str)
def test_decode_within_the_bound(fast_backend, case):
    """Every case of the tables; the GPU refuses pinned latent records and planar rings of pairs."""
    q, slab, layout, layer, plan, options = decode_inputs(case)
    if fast_backend == "cuda" and (not case.kv_heads or case.plane_order == "planar"):
        with pytest.raises(rs.errors.ArgumentError, match=r"cpu or reference|interleaved"):
            run_decode("cuda", q, slab, layout, layer, plan, **options)
        return
    check_decode(fast_backend, q, slab, layout, layer, plan, **options)


@pytest.mark.parametrize("case", [*GQA_PREFILL_CASES, *PINNED_PREFILL_CASES], ids=str)
def test_prefill_within_the_bound(fast_backend, case):
    """Every case of the tables; the GPU refuses pinned latent records."""
    q, records, plan, fmt, options = prefill_inputs(case)
    if fast_backend == "cuda" and not case.kv_heads:
        with pytest.raises(rs.errors.ArgumentError, match="cpu or reference"):
            run_prefill("cuda", q, records, plan, fmt, **options)
        return
    check_prefill(fast_backend, q, records, plan, fmt, **options)


def values_of(records, fmt):
    """K and V, float64 [n, heads, D], of whole records, by the public codec."""
    shape = (len(records), fmt.num_kv_heads, fmt.head_dim)
    found = []
    for part in np.split(records, fmt.num_parts, axis=1):
        part = np.ascontiguousarray(part)
        if fmt.type == "mxfp8":
            split = fmt.part_value_bytes
            x = rs.dequantize_mxfp8(part[:, :split].copy(), part[:, split:].copy())
        else:
            x = part.view(np.float16) if fmt.type == "fp16" else from_bf16(part.view(np.uint16))
        found.append(x.astype(np.float64).reshape(shape))
    return found[0], found[-1]


def dense(q, keys, values, first, case, scale, sink):
    """Attention of queries at positions first, first + 1, .. over all keys under a mask: out
    float64 [T, H, D] and lse [T, H]."""
    q = (q if q.dtype == np.float16 else from_bf16(q)).astype(np.float64)
    group = case.heads // keys.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = np.einsum("thd,nhd->htn", q, k) * scale
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    query = first + np.arange(len(q))[:, None]
    key = np.arange(len(k))[None]
    seen = (key <= query) & ((key > query - case.window) | (key < case.sink_tokens))
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(axis=2)
    lse = np.log(total).T
    if sink is not None:
        total = total + np.exp(sink.astype(np.float64))[:, None]
    return np.einsum("htn,nhd->thd", weights / total[:, :, None], v), lse


DENSE_CASES = [
    Case("mxfp8", ((0, 70),), 16, 22, heads=6, head_dim=32, kv_heads=2),
    Case("softcap", ((0, 70),), 16, 22, heads=6, head_dim=32, kv_heads=2, softcap=1.5),
    Case("planar", ((0, 50),), 9, 15, heads=4, head_dim=32, kv_heads=4, plane_order="planar"),
    Case("bf16", ((0, 50),), 9, 15, 3, head_dim=32, kv_heads=1, record_type="bf16", sink=False),
    Case("fp16", ((0, 50),), 9, 15, heads=4, head_dim=32, kv_heads=2, record_type="fp16"),
    Case("pinned", ((0, 70),), 16, 26, heads=6, head_dim=32, kv_heads=2, sink_tokens=4),
    Case("pinned_capped", ((0, 50),), 3, 20, 4, 32, kv_heads=2, sink_tokens=12, softcap=1.5),
    Case("latent_pinned", ((0, 50),), 5, 15, heads=4, head_dim=32, sink_tokens=5, softcap=1.5),
]


@pytest.mark.parametrize("case", DENSE_CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_reference_is_dense_attention(case, chunk):
    """A sequence in chunks of 13 by the prefill operations, of 5 by prefill, then by decode steps
    of 5, or token by token: outputs and lse of the reference equal dense attention over all keys
    to 1e-12, wherever the ring has wrapped."""
    ops = operations("reference")
    count = case.sequences[0][1]
    fmt = record_format(case.head_dim, case.record_type, case.plane_order, case.kv_heads)
    rng = np.random.default_rng(10)
    kv = random_kv(rng, count, fmt)
    q = random_values(rng, (count, case.heads, case.head_dim), case.record_type)
    sink = rng.standard_normal(case.heads).astype(np.float32) if case.sink else None
    records = encoded(kv, fmt)
    rings = {"window": case.window, "ring_len": case.ring_len, "sink_tokens": case.sink_tokens}
    layout = make_layout(fmt, case.ring_len, sink_tokens=case.sink_tokens)
    slab = poisoned_slab(layout, 2)
    out, lse = np.empty(q.shape), np.empty(q.shape[:2], np.float32)
    options = {"softmax_scale": 0.2, "sink": sink, "softcap": case.softcap}
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        rows = slice(start, end)
        ids, positions = np.ones(end - start, np.int32), i32(range(start, end))
        if chunk == 13 or (chunk == 5 and start < 20):
            plan = rs.plan_prefill([1], [end - start], [end], **rings)
            joint = np.empty((plan.history_rows + end - start, fmt.record_bytes), np.uint8)
            ops.load_history(slab, layout, 1, plan, joint)
            joint[plan.history_rows :] = records[rows]
            ops.window_prefill(q[rows], joint, plan, fmt, out[rows], lse[rows], **options)
            ops.store_records(slab, layout, 1, records[rows], ids, positions)
        else:
            ops.store_records(slab, layout, 1, records[rows], ids, positions)
            plan = rs.plan_decode(ids, positions, cu_seqlens_q=[0, end - start], **rings)
            ops.window_decode(q[rows], slab, layout, 1, plan, out[rows], lse[rows], **options)
    wanted, wanted_lse = dense(q, *values_of(records, fmt), 0, case, 0.2, sink)
    np.testing.assert_allclose(out, wanted, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2**-22, atol=1e-6)


def test_query_head_reads_its_own_kv_head(backend):
    """Four query heads, two KV heads whose values are 1 and 2 everywhere: outputs 1, 1, 2, 2."""
    fmt = record_format(32, "bf16", kv_heads=2)
    layout = make_layout(fmt, 6)
    slab = poisoned_slab(layout, 1)
    k = random_values(np.random.default_rng(0), (6, 2, 32))
    v = np.empty((6, 2, 32), np.uint16)
    v[:, 0], v[:, 1] = 0x3F80, 0x4000
    operations("reference").ring_store(slab, layout, 0, (k, v), i32([0] * 6), i32(range(6)))
    plan = rs.plan_decode([0], [5], window=6, ring_len=6)
    q = random_values(np.random.default_rng(1), (1, 4, 32))
    out, _ = run_decode(backend, q, slab, layout, 0, plan, softmax_scale=0.1)
    assert from_bf16(out)[0, :, 0].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_softcap_of_one_score(backend, softcap):
    """One key with q . k = 32 and scale 0.5: lse is 16, or 3 tanh(16 / 3) = 2.99986."""
    fmt = record_format(32, "bf16", kv_heads=1)
    layout = make_layout(fmt, 6)
    slab = poisoned_slab(layout, 1)
    ones = np.full((1, 1, 32), 0x3F80, np.uint16)
    operations("reference").ring_store(slab, layout, 0, (ones, ones), i32([0]), i32([0]))
    plan = rs.plan_decode([0], [0], window=6, ring_len=6)
    options = {"softmax_scale": 0.5, **({"softcap": softcap} if softcap else {})}
    out, lse = run_decode(backend, ones, slab, layout, 0, plan, **options)
    assert lse[0, 0] == pytest.approx(3 * np.tanh(16 / 3) if softcap else 16.0, abs=1e-4)
    assert from_bf16(out)[0, 0, 0] == 1.0


def test_public_entries(fast_backend):
    """float16 queries give float16 outputs, allocated or given; softcap goes through."""
    case = next(case for case in GQA_DECODE_CASES if case.record_type == "fp16")
    q, slab, layout, layer, plan, options = decode_inputs(case)
    options.update(sink=to_backend(options["sink"], fast_backend), softcap=4.0)
    place = to_backend(plan, fast_backend)
    arrays = to_backend(q, fast_backend), to_backend(slab, fast_backend)
    out, lse = rs.window_decode(*arrays, layout, layer, place, **options)
    assert out.dtype == np.float16
    again = rs.window_decode(*arrays, layout, layer, place, out=out, lse=lse, **options)
    assert again[0] is out
    assert np.isfinite(to_host(out).astype(np.float32)).all()


def test_refuses_wrong_arguments():
    """Heads that KV heads do not divide, the other dtype, a rotation of unrotated values, a
    negative or infinite softcap, a plan without the ring's pinned positions."""
    q, slab, layout, layer, plan, _ = decode_inputs(GQA_DECODE_CASES[3])

    def refused(pattern, q=q, layout=layout, plan=plan, **options):
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.window_decode(q, slab, layout, layer, plan, softmax_scale=0.1, **options)

    refused(r"q\.shape\[1\]=5 query heads .*num_kv_heads=2", q[:, :5].copy())
    refused("float16 but must be bfloat16", q.view(np.float16))
    refused("rope_out is given", rope_out=rs.Rope(1e4, 32, "half"))
    refused("softcap=-1", softcap=-1.0)
    refused("softcap=inf", softcap=float("inf"))
    refused(r"out\.dtype=float16", out=q.view(np.float16).copy())
    pinned = rs.plan_decode([0], [0], window=100, ring_len=134, sink_tokens=4)
    refused(r"plan\.sink_tokens=4 .*sink_tokens=0", q[:1].copy(), plan=pinned)
