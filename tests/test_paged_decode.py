"""paged_decode: with block tables that are a permutation of the pool, every backend gives plain
attention over the contiguous keys that were stored."""

from importlib.util import find_spec

import numpy as np
import pytest
from helpers import from_bf16, guarded_outputs, i32, random_values, to_backend
from paged_cases import CASES, LAYER, Case, expected_decode, make_pages

import ringslab as rs
from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.bound import assert_within_bound

GROUP = 3  # query heads of a KV head
CASES = (*(case for case in CASES if case.head_dim % 32 == 0), Case("long", (700,), head_dim=32))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def decoder(request):
    """A backend that has the operation."""
    if not find_spec(f"ringslab.rawkernels.{request.param}.paged_decode"):
        pytest.skip(f"{request.param} has no paged_decode")
    return request.param


def queries(pages, rng):
    """(q, seq_ids, positions): the last three tokens of each sequence, its first one, padding."""
    seq_ids, positions = [], []
    for seq in range(len(pages.tables)):
        length = int((pages.seq_ids == seq).sum())
        chosen = sorted({0, *range(max(length - 3, 0), length)}) if length else []
        seq_ids += [seq] * len(chosen)
        positions += chosen
    seq_ids, positions = i32([*seq_ids, -1, -1]), i32([*positions, 0, -5])
    shape = (len(seq_ids), GROUP * pages.fmt.num_kv_heads, pages.fmt.head_dim)
    return random_values(rng, shape, pages.fmt.type, 2.0), seq_ids, positions


def run(backend, q, pool, layout, tables, seq_ids, positions, *, sink=None, **options):
    out, lse = guarded_outputs(q, backend)
    arrays = [to_backend(x, backend) for x in (tables, seq_ids, positions)]
    operation(backend, "paged_decode")(
        to_backend(q, backend),
        to_backend(pool, backend),
        layout,
        LAYER,
        *arrays,
        out.array,
        lse.array,
        sink=to_backend(sink, backend),
        **options,
    )
    return out.host(), lse.host()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_bound(decoder, case, softcap):
    """Every case with and without a softcap, with sinks; padding gives 0 and -inf."""
    pages, rng = make_pages(case), np.random.default_rng(1)
    q, *places = queries(pages, rng)
    sink = rng.standard_normal(q.shape[1]).astype(np.float32)
    pool = pages.stored()
    options = {"softmax_scale": 0.2, "softcap": softcap, "sink": sink}
    out, lse = run(decoder, q, pool, pages.layout, pages.tables, *places, **options)
    arguments = (pool, pages.layout, LAYER, pages.tables, *places)
    assert_within_bound(out, lse, expected_decode(q, *arguments, **options), case.name)
    assert not out[-2:].any()
    assert np.isneginf(lse[-2:]).all()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_plain_attention(case, softcap):
    """The reference's outputs and lse are those of a softmax over each sequence's contiguous keys,
    loaded by paged_load, to 1e-12: where the blocks lie makes no difference."""
    pages, rng = make_pages(case), np.random.default_rng(2)
    q, seq_ids, positions = queries(pages, rng)
    pool = pages.stored()
    shape = (len(pages.seq_ids), pages.fmt.num_kv_heads, pages.fmt.head_dim)
    dtype = np.float16 if case.record_type == "fp16" else np.uint16
    k, v = np.zeros(shape, dtype), np.zeros(shape, dtype)
    rs.paged_load(pool, pages.layout, LAYER, pages.tables, pages.cu_seqlens, k, v)
    k, v, wide = (
        x.astype(np.float64) if x.dtype == np.float16 else from_bf16(x).astype(np.float64)
        for x in (k, v, q)
    )
    out, lse = np.empty(q.shape), np.empty(q.shape[:2], np.float32)
    arguments = (q, pool, pages.layout, LAYER, pages.tables, seq_ids, positions, out, lse)
    operation("reference", "paged_decode")(*arguments, softmax_scale=0.2, softcap=softcap)
    for t in range(len(seq_ids) - 2):
        first = pages.cu_seqlens[seq_ids[t]]
        rows = slice(first, first + positions[t] + 1)
        for h in range(q.shape[1]):
            scores = k[rows, h // GROUP] @ wide[t, h] * 0.2
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores)
            wanted = weights @ v[rows, h // GROUP] / weights.sum()
            np.testing.assert_allclose(out[t, h], wanted, atol=1e-12)
            assert lse[t, h] == pytest.approx(np.log(weights.sum()), rel=2**-22, abs=1e-6)


def test_blocks_may_lie_anywhere(decoder):
    """The same sequences under another permutation of blocks: bit for bit the same outputs; and a
    sequence alone in its batch as well."""
    case = Case("mixed", (37, 1, 90))
    one, two = make_pages(case), make_pages(case)
    order = np.random.default_rng(5).permutation(two.num_blocks)
    two.tables[...] = np.where(two.tables < 0, -1, order[two.tables])
    q, *places = queries(one, np.random.default_rng(3))
    first = run(decoder, q, one.stored(), one.layout, one.tables, *places, softmax_scale=0.3)
    second = run(decoder, q, two.stored(), two.layout, two.tables, *places, softmax_scale=0.3)
    alone = [x[-3:-2].copy() for x in (q, *places)]
    third = run(
        decoder, alone[0], one.stored(), one.layout, one.tables, *alone[1:], softmax_scale=0.3
    )
    for a, b, c in zip(first, second, third, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[-3:-2], c)


def test_public_entry_and_its_errors(decoder):
    """Outputs are allocated; wrong heads, ids and positions are named on the host."""
    pages = make_pages(CASES[0])
    q, *places = queries(pages, np.random.default_rng(4))
    pool = pages.stored()
    arrays = [to_backend(x, decoder) for x in (pages.tables, *places)]
    out, lse = rs.paged_decode(
        to_backend(q, decoder),
        to_backend(pool, decoder),
        pages.layout,
        LAYER,
        *arrays,
        softmax_scale=0.2,
    )
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]

    def refused(pattern, q=q, seq_ids=places[0], positions=places[1], **options):
        options = {"softmax_scale": 0.2, **options}
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.paged_decode(
                q, pool, pages.layout, LAYER, pages.tables, seq_ids, positions, **options
            )

    refused(r"q\.shape\[1\]=5 query heads", q[:, :5].copy())
    refused(r"seq_ids\[0\]=9", seq_ids=i32([9, *places[0][1:]]))
    refused(r"positions\[0\]=112", positions=i32([112, *places[1][1:]]))
    refused(r"positions\.shape\[0\]=1", positions=i32([1]))
    refused("softcap=nan", softcap=float("nan"))
    refused(r"sink\.shape\[0\]=1", sink=np.zeros(1, np.float32))
