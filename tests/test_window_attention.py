"""window_attention on every backend against the float64 reference by the one bound; what it must
not depend on, bit for bit; and what it refuses."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from attention_cases import (
    BF16,
    CASES,
    FP16,
    RAGGED,
    Case,
    case_inputs,
    check_attention,
    ends_of,
    run_attention,
)
from helpers import bf16, from_bf16, i32, poisoned, to_backend, to_host
from hypothesis import given, settings
from hypothesis import strategies as st

import ringslab as rs
from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.attention import attend_token


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_within_the_bound(backend, case):
    """Every shape of the table, output and lse."""
    inputs = case_inputs(case)
    check_attention(backend, inputs.arrays, sink=inputs.sink, **case.options)


def constant_case(seqlen_q, seqlen_k, heads=2, kv_heads=1, dim=64):
    """q of zeros, value i at key i: the output is the mean of the visible keys' numbers."""
    v = np.repeat(np.arange(seqlen_k, dtype=np.float32), kv_heads * dim)
    v = bf16(v.reshape(seqlen_k, kv_heads, dim))
    q = np.zeros((seqlen_q, heads, dim), np.uint16)
    return q, v, v, ends_of([seqlen_q]), ends_of([seqlen_k])


def means(backend, seqlen_q, seqlen_k, **options):
    out, lse = run_attention(
        backend, constant_case(seqlen_q, seqlen_k), softmax_scale=1.0, **options
    )
    numbers = from_bf16(out)
    assert (numbers == numbers[:, :1, :1]).all()
    return numbers[:, 0, 0].tolist(), np.exp(lse[:, 0]).round(3).tolist()


def test_window_counts_the_query(backend):
    """n = 8, W = 3: rows see 1, 2, 3, 3, 3, 3, 3, 3 keys, and the newest ones: means 0, 0.5, 1, 2,
    3, 4, 5, 6. W = 1: each its own value."""
    assert means(backend, 8, 8, window=3) == (
        [0, 0.5, 1, 2, 3, 4, 5, 6],
        [1, 2, 3, 3, 3, 3, 3, 3],
    )
    assert means(backend, 8, 8, window=1)[0] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_queries_are_the_last_positions(backend):
    """3 queries over 10 keys, W = 4: positions 7, 8, 9 give 5.5, 6.5, 7.5; with 12 queries over 10
    keys the first two stand before all keys: 0 and no key, then 0, 0.5, 1, 1.5, 2.5 .. 7.5."""
    assert means(backend, 3, 10, window=4)[0] == [5.5, 6.5, 7.5]
    found, keys = means(backend, 12, 10, window=4)
    assert found == [0, 0, 0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    assert keys == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_first_keys_stay_visible(backend):
    """W = 2, two first keys kept: position 9 sees 0, 1, 8, 9 (mean 4.5), position 2 sees 0, 1, 2
    once each (mean 1), position 0 itself."""
    found, keys = means(backend, 10, 10, window=2, sink_tokens=2)
    assert (found[0], found[2], found[9]) == (0, 1, 4.5)
    assert keys == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_softcap_comes_after_the_scale_and_before_the_mask(backend):
    """Two keys with s = 8 * 0.5 = 4 and 0, softcap 2: 2 tanh 2 = 1.928; the lse is ln(e^1.928 + 1)
    = 2.064, and a key outside the window of 2 adds nothing."""
    q = bf16(np.full((1, 1, 64), 0.125))
    k = bf16(np.stack([np.full((1, 64), 7.0), np.zeros((1, 64)), np.ones((1, 64))]))
    arrays = (q, k, k, ends_of([1]), ends_of([3]))
    options = {"softmax_scale": 0.5, "window": 2, "softcap": 2.0}
    _, lse = run_attention(backend, arrays, **options)
    wanted = math.log(1 + math.exp(2 * math.tanh(2)))
    assert lse[0, 0] == pytest.approx(wanted, abs=1e-5)


def test_sink_is_in_the_denominator_only(backend):
    """Scores 0 and ln 2, values 1 and 4: 3.0 without a sink, 2.25 with a sink of 0; the lse is ln 3
    with and without."""
    q = np.zeros((1, 1, 64), np.float32)
    q[..., 0] = 1
    k = np.zeros((2, 1, 64), np.float32)
    k[1, 0, 0] = math.log(2)
    v = np.stack([np.full((1, 64), 1.0), np.full((1, 64), 4.0)])
    arrays = (bf16(q), bf16(k), bf16(v), ends_of([1]), ends_of([2]))
    plain, plain_lse = run_attention(backend, arrays, softmax_scale=1.0)
    sunk, sunk_lse = run_attention(backend, arrays, softmax_scale=1.0, sink=np.zeros(1, np.float32))
    assert from_bf16(plain)[0, 0, 0] == pytest.approx(3.0, abs=0.02)
    assert from_bf16(sunk)[0, 0, 0] == pytest.approx(2.25, abs=0.02)
    assert plain_lse[0, 0] == sunk_lse[0, 0] == pytest.approx(math.log(3), abs=2e-3)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_wide_window_is_causal_bit_for_bit(backend, dtype, head_dim):
    """W = n, n + 1 and 2^40 give the bits of no window; W = n - 1 differs."""
    case = Case("wide", ((150, 150), (20, 150)), heads=4, kv_heads=2, dtype=dtype)
    inputs = case_inputs(dataclasses.replace(case, head_dim=head_dim))

    def bits(window):
        options = case.options | {"window": window}
        return run_attention(backend, inputs.arrays, **options)

    out, lse = bits(None)
    for window in (150, 151, 2**40):
        found, found_lse = bits(window)
        np.testing.assert_array_equal(found, out)
        np.testing.assert_array_equal(found_lse, lse)
    assert (bits(149)[0] != out).any()


def function_of(backend):
    """The operation, on a GPU by the portable kernel, whose bits depend on a row's keys alone."""
    function = operation(backend, "window_attention")
    return functools.partial(function, variant="portable") if backend == "cuda" else function


def test_chunks_are_the_whole_bit_for_bit(backend):
    """A prompt of 200 in chunks of 1, 63, 64, 70 and 2: each chunk has the very bits of the whole,
    with a window, first keys and a sink."""
    function = function_of(backend)
    case = Case("whole", ((200, 200),), window=50, heads=4, kv_heads=2, sink=True, sink_tokens=5)
    inputs = case_inputs(case)
    q, k, v = inputs.arrays[:3]
    options = {"sink": inputs.sink, "function": function, **case.options}
    whole, whole_lse = run_attention(backend, inputs.arrays, **options)
    done = 0
    for length in (1, 63, 64, 70, 2):
        end = done + length
        arrays = (q[done:end].copy(), k[:end].copy(), v[:end].copy())
        ends = (ends_of([length]), ends_of([end]))
        out, lse = run_attention(backend, (*arrays, *ends), **options)
        np.testing.assert_array_equal(out, whole[done:end])
        np.testing.assert_array_equal(lse, whole_lse[done:end])
        done = end


def test_batch_does_not_change_bits(backend):
    """Each sequence of a ragged batch alone has the bits that it has in the batch."""
    case = Case("batch", RAGGED, window=40, heads=6, kv_heads=2, sink=True, sink_tokens=5)
    inputs = case_inputs(case)
    options = {"sink": inputs.sink, **case.options}
    out, lse = run_attention(backend, inputs.arrays, **options)
    ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    for i, (seqlen_q, seqlen_k) in enumerate(case.sequences):
        rows, keys = (slice(*end[i : i + 2]) for end in ends)
        parts = (inputs.q[rows].copy(), inputs.k[keys].copy(), inputs.v[keys].copy())
        alone = (*parts, ends_of([seqlen_q]), ends_of([seqlen_k]))
        found, found_lse = run_attention(backend, alone, **options)
        np.testing.assert_array_equal(found, out[rows])
        np.testing.assert_array_equal(found_lse, lse[rows])


def test_neighbours_do_not_leak(backend):
    """NaN keys and values of the sequences before and behind change nothing."""
    case = Case("clean", ((70, 170),), window=33, heads=4, kv_heads=2)
    inputs = case_inputs(case)
    out, lse = run_attention(backend, inputs.arrays, **case.options)
    q, k, v = inputs.arrays[:3]
    k, v = k[:170], v[:170]
    nan = np.full((40, *k.shape[1:]), np.nan).astype(k.dtype)
    arrays = (
        np.concatenate([q[:20], q, q[:20]]),
        np.concatenate([nan, k, nan]),
        np.concatenate([nan, v, nan]),
        ends_of([20, 70, 20]),
        ends_of([40, 170, 40]),
    )
    found, found_lse = run_attention(backend, arrays, **case.options)
    np.testing.assert_array_equal(found[20:90], out)
    np.testing.assert_array_equal(found_lse[20:90], lse)
    assert np.isnan(found_lse[:20]).all()


def test_what_no_window_holds_does_not_leak(backend):
    """NaN in keys and values that left the window of every query, and are no first keys, change
    nothing."""
    case = Case("clean", ((40, 200),), window=20, heads=4, kv_heads=2, sink_tokens=3)
    inputs = case_inputs(case)
    options = {"function": function_of(backend), **case.options}
    out, lse = run_attention(backend, inputs.arrays, **options)
    q, k, v, *ends = inputs.arrays
    k, v = k.copy(), v.copy()
    k[3:141], v[3:141] = np.nan, np.nan
    found, found_lse = run_attention(backend, (q, k, v, *ends), **options)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(found_lse, lse)


def test_a_row_is_unlike_its_poison(backend):
    """Rows of sequences without keys are written: 0 and -inf over poison."""
    arrays = (*case_inputs(Case("none", ((5, 0), (2, 1)))).arrays,)
    out, lse = run_attention(backend, arrays, softmax_scale=1.0, window=3)
    assert not out[:6].any()
    assert np.isneginf(lse[:6]).all()
    assert np.isfinite(lse[6:]).all()


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.uint16), FP16], ids=str)
def test_public_entry(fast_backend, dtype):
    """Outputs are allocated beside q or filled; lists of ends are taken on the host."""
    case = Case("public", ((3, 40), (20, 20)), window=9, heads=4, kv_heads=2)
    inputs = case_inputs(dataclasses.replace(case, dtype=FP16 if dtype == FP16 else BF16))
    wanted, wanted_lse = run_attention(fast_backend, inputs.arrays, **case.options)
    view = np.dtype(np.uint16) if dtype == np.uint16 else dtype
    q, k, v = (to_backend(x.view(view), fast_backend) for x in inputs.arrays[:3])
    ends = {
        "cu_seqlens_q": to_backend(inputs.cu_seqlens_q, fast_backend),
        "cu_seqlens_k": to_backend(inputs.cu_seqlens_k, fast_backend),
    }
    if fast_backend == "cpu":
        ends = {name: list(map(int, value)) for name, value in ends.items()}
    out, lse = rs.window_attention(q, k, v, **ends, **case.options)
    np.testing.assert_array_equal(to_host(out).view(np.uint16), wanted.view(np.uint16))
    np.testing.assert_array_equal(to_host(lse), wanted_lse)
    given = poisoned(q.shape, out.dtype, fast_backend)
    again, _ = rs.window_attention(q, k, v, **ends, **case.options, out=given)
    assert again is given
    np.testing.assert_array_equal(to_host(given).view(np.uint16), wanted.view(np.uint16))


BASE = {
    "q": np.zeros((5, 4, 64), np.uint16),
    "k": np.zeros((9, 2, 64), np.uint16),
    "v": np.zeros((9, 2, 64), np.uint16),
    "cu_seqlens_q": i32([0, 2, 5]),
    "cu_seqlens_k": i32([0, 4, 9]),
    "softmax_scale": 0.125,
}
WRONG = {
    "dtype": ({"q": np.zeros((5, 4, 64), np.float32)}, r"q\.dtype=float32"),
    "mixed": ({"k": np.zeros((9, 2, 64), np.float16)}, r"k\.dtype=float16"),
    "axes": ({"q": np.zeros((5, 256), np.uint16)}, "must have 3 axes"),
    "head_dim": ({"k": np.zeros((9, 2, 32), np.uint16)}, r"k\.shape\[2\]=32"),
    "v_rows": ({"v": np.zeros((8, 2, 64), np.uint16)}, r"v\.shape\[0\]=8"),
    "group": ({"q": np.zeros((5, 3, 64), np.uint16)}, "num_q_heads=3 is no multiple of"),
    "strides": ({"q": np.zeros((5, 4, 128), np.uint16)[..., ::2]}, "not C-contiguous"),
    "out": ({"out": np.zeros((5, 4, 32), np.uint16)}, r"out\.shape\[2\]=32"),
    "out_dtype": ({"out": np.zeros((5, 4, 64), np.float16)}, r"out\.dtype=float16"),
    "lse": ({"lse": np.zeros((5, 4), np.float64)}, r"lse\.dtype=float64"),
    "cu_dtype": ({"cu_seqlens_q": np.int64([0, 2, 5])}, r"cu_seqlens_q\.dtype=int64"),
    "cu_shape": ({"cu_seqlens_k": i32([0, 9])}, r"cu_seqlens_k\.shape\[0\]=2"),
    "cu_empty": ({"cu_seqlens_q": i32([]), "cu_seqlens_k": i32([])}, "is empty"),
    "cu_first": ({"cu_seqlens_q": i32([1, 2, 5])}, r"cu_seqlens_q\[0\]=1"),
    "cu_falls": ({"cu_seqlens_k": i32([0, 9, 4])}, r"cu_seqlens_k\[2\]=4"),
    "cu_short": ({"cu_seqlens_q": i32([0, 2, 4])}, r"cu_seqlens_q\[-1\]=4"),
    "cu_long": ({"cu_seqlens_k": i32([0, 4, 10])}, r"cu_seqlens_k\[-1\]=10"),
    "sink": ({"sink": np.zeros(3, np.float32)}, r"sink\.shape\[0\]=3"),
    "window_0": ({"window": 0}, "window=0 but must be"),
    "window_real": ({"window": 4.0}, "window=4.0 but must be"),
    "sink_tokens": ({"sink_tokens": -1}, "sink_tokens=-1 but must be"),
    "softcap": ({"softcap": -1.0}, "softcap=-1.0 but must be"),
    "softcap_nan": ({"softcap": math.nan}, "softcap=nan"),
    "scale": ({"softmax_scale": math.inf}, "softmax_scale=inf"),
}


@pytest.mark.parametrize(("changed", "pattern"), WRONG.values(), ids=WRONG)
def test_mistakes_are_named(changed, pattern):
    """Shapes, dtypes, strides, sequence ends and scalars: an ArgumentError with the number."""
    arguments = BASE | changed
    arrays = [arguments.pop(name) for name in ("q", "k", "v")]
    with pytest.raises(rs.errors.ArgumentError, match=pattern):
        rs.window_attention(*arrays, **arguments)


@pytest.mark.parametrize("name", ["softmax_scale", "cu_seqlens_q", "cu_seqlens_k"])
def test_there_are_no_silent_defaults(name):
    """The scale and the sequence ends are never guessed."""
    arguments = BASE | {}
    del arguments[name]
    arrays = [arguments.pop(x) for x in ("q", "k", "v")]
    with pytest.raises(TypeError, match=name):
        rs.window_attention(*arrays, **arguments)


@settings(max_examples=40)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=4),
    window=st.none() | st.integers(1, 70),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    sink_tokens=st.integers(0, 30),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
    dtype=st.sampled_from([BF16, FP16]),
    sink=st.booleans(),
)
def test_any_shape_on_the_host(sequences, window, group, kv_heads, dtype, **options):
    """Any batch, empty ones included: the CPU kernel within the bound of the reference."""
    heads = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": 16}
    case = Case("any", tuple(sequences) or ((0, 0),), window, **heads, dtype=dtype, **options)
    inputs = case_inputs(case, seed=len(sequences))
    check_attention("cpu", inputs.arrays, sink=inputs.sink, **case.options)


@pytest.mark.parametrize(("heads", "head_dim"), [(0, 8), (2, 0)])
def test_nothing_to_attend_with(heads, head_dim):
    """Three tokens of no heads give an empty lse; of two heads without dims every score is 0, so
    token i, which sees i + 1 keys, has lse = ln(i + 1)."""
    q, kv = np.zeros((3, heads, head_dim)), np.zeros((3, 1, head_dim))
    for i in range(3):
        options = {"softmax_scale": 1.0, "sink": None, "rounded_to": np.dtype(np.float16)}
        out, lse = attend_token(q[i], kv[: i + 1], kv[: i + 1], **options)
        assert out.shape == (heads, head_dim)
        assert lse.tolist() == pytest.approx([np.log(i + 1)] * heads)
