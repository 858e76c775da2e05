"""The silent bugs of windowed attention, each as a kernel that has it: the test that every backend
passes fails on it. Numbers are those that were published for these shapes."""

import numpy as np
import pytest
from attention_cases import BF16, check_attention, ends_of
from helpers import bf16, from_bf16, i32

import ringslab as rs
from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.attention import narrow, wide

TILE = 64


def tiled_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    out,
    lse,
    *,
    softmax_scale,
    window=None,
    sink=None,
    guard=True,
    extra_keys=0,
    top_left=False,
    stream=None,
):
    """The operation as a tiled kernel, left to right, in float64, with a switch for each bug: no
    guard against exp(-inf - -inf), windows of `extra_keys` more, queries aligned at the first key.
    One sequence."""
    group = q.shape[1] // k.shape[1]
    (_, rows), (_, keys) = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    offset = 0 if top_left else keys - rows
    window = (keys if window is None else window) + extra_keys
    for head in range(q.shape[1]):
        parts = (wide(q[:, head]), wide(k[:keys, head // group]), wide(v[:keys, head // group]))
        for first in range(0, rows, TILE):
            queries = np.arange(first, min(first + TILE, rows))
            found = _query_tile(*parts, queries, offset, softmax_scale, window, guard)
            out[queries, head] = narrow(found[0], out.dtype)
            lse[queries, head] = found[1]


def _query_tile(q, k, v, queries, offset, softmax_scale, window, guard):
    maximum, total = np.full(len(queries), -np.inf), np.zeros(len(queries))
    acc = np.zeros((len(queries), v.shape[1]))
    positions = offset + queries[:, None]
    start = max(0, int(positions[0, 0]) - window + 1) // TILE * TILE
    for first in range(start, min(int(positions[-1, 0]) + 1, len(k)), TILE):
        tile = np.arange(first, min(first + TILE, len(k)))
        sees = (tile <= positions) & (positions - tile < window)
        scores = np.where(sees, q[queries] @ k[tile].T * softmax_scale, -np.inf)
        new = np.maximum(maximum, scores.max(axis=1))
        base = np.where(np.isneginf(new), 0.0, new) if guard else new
        with np.errstate(invalid="ignore"):
            weights, old = np.exp(scores - base[:, None]), np.exp(maximum - base)
        acc = acc * old[:, None] + weights @ v[tile]
        total = total * old + weights.sum(axis=1)
        maximum = new
    with np.errstate(divide="ignore", invalid="ignore"):
        return acc / total[:, None], maximum + np.log(total)


def buggy(**switches):
    def kernel(*arrays, **options):
        tiled_attention(*arrays, **options, **switches)

    return kernel


@pytest.fixture(params=["reference", "cpu", "tiled", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel(request):
    """(backend whose arrays it takes, the kernel): those that must pass."""
    if request.param == "tiled":
        return "cpu", tiled_attention
    return request.param, operation(request.param, "window_attention")


def random_arrays(seqlen_q, seqlen_k, seed):
    """q, k, v bf16 of one head of 64, and the ends of one sequence."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((seqlen_q, 1, 64)).astype(BF16)
    kv = rng.standard_normal((2, seqlen_k, 1, 64)).astype(BF16)
    return q, *kv, ends_of([seqlen_q]), ends_of([seqlen_k])


def check(kernel, arrays, **options):
    """The test: within the bound of the definition. Returns (out, lse)."""
    backend, function = kernel
    return check_attention(backend, arrays, function=function, softmax_scale=0.125, **options)


def run_buggy(function, arrays, **options):
    """(out as numbers, lse) of a kernel that the test refuses."""
    with pytest.raises(AssertionError, match="window_attention on cpu"):
        check(("cpu", function), arrays, **options)
    q = arrays[0]
    out, lse = np.zeros(q.shape, np.uint16), np.zeros(q.shape[:2], np.float32)
    function(*arrays, out, lse, softmax_scale=0.125, **options)
    return from_bf16(out), lse


GUARD = {100: (382, 163), 128: (13, 191), 300: (210, 363)}


@pytest.mark.parametrize("window", [None, *GUARD])
def test_a_first_tile_may_be_masked_whole(kernel, window):
    """n = 1,000: no NaN, although a row's first tile may hold none of its keys."""
    out, _ = check(kernel, random_arrays(1000, 1000, 1), window=window)
    assert np.isfinite(from_bf16(out.view(np.uint16))).all()


@pytest.mark.parametrize(("window", "rows"), GUARD.items())
def test_no_guard_is_caught(window, rows):
    """Without the guard 382, 13 and 210 rows are NaN, the first at row 163, 191 and 363; a causal
    test would not see it."""
    arrays = random_arrays(1000, 1000, 1)
    out, lse = run_buggy(buggy(guard=False), arrays, window=window)
    wrong = np.isnan(out).any(axis=(1, 2))
    assert (wrong.sum(), np.flatnonzero(wrong)[0]) == rows
    assert np.isnan(lse[wrong]).all()
    check(("cpu", buggy(guard=False)), arrays, window=None)


def test_window_counts_the_query_itself(kernel):
    """n = 1,024, W = 128: each row sees 128 keys, not 129."""
    check(kernel, random_arrays(1024, 1024, 2), window=128)


def test_one_key_too_many_is_caught():
    """(W, 0) in place of (W - 1, 0): 896 of 1,024 rows change, all but the first 128."""
    arrays = random_arrays(1024, 1024, 2)
    _, lse = run_buggy(buggy(extra_keys=1), arrays, window=128)
    _, right = check(("cpu", tiled_attention), arrays, window=128)
    changed = (lse != right)[:, 0]
    assert changed.sum() == 896
    assert changed[128:].all()


@pytest.mark.parametrize("seqlen_q", [256, 1])
def test_queries_end_at_the_last_key(kernel, seqlen_q):
    """256 queries, and one, over 1,024 keys, W = 128: the last rows of the whole; the same bits on
    the host."""
    q, k, v, _, ends = random_arrays(1024, 1024, 2)
    whole, _ = check(kernel, (q, k, v, ends, ends), window=128)
    part = (q[-seqlen_q:].copy(), k, v, ends_of([seqlen_q]), ends)
    out, _ = check(kernel, part, window=128)
    if kernel[0] != "cuda" and kernel[1] is not tiled_attention:  # NumPy's products vary in order
        np.testing.assert_array_equal(out, whole[-seqlen_q:])


def test_top_left_alignment_is_caught():
    """A chunk of 256 queries over 1,024 keys masked as if it began at position 0: off by about
    2.5; a decode step that sees 1 key in place of 128."""
    q, k, v, _, ends = random_arrays(1024, 1024, 2)
    part = (q[-256:].copy(), k, v, ends_of([256]), ends)
    out, _ = run_buggy(buggy(top_left=True), part, window=128)
    right, _ = check(("cpu", tiled_attention), part, window=128)
    assert np.abs(out - from_bf16(right)).max() > 2
    step = (np.zeros_like(q[-1:]), k, v, ends_of([1]), ends)  # all scores 0: exp(lse) counts keys
    _, lse = run_buggy(buggy(top_left=True), step, window=128)
    _, right_lse = check(("cpu", tiled_attention), step, window=128)
    assert np.exp([lse[0, 0], right_lse[0, 0]]).round(3).tolist() == [1, 128]


def ring_errors(backend, rotate_at_read):
    """Largest error of each decode step of 40 over a ring of 8, W = 8, against the whole sequence
    with rotated keys."""
    rng = np.random.default_rng(3)
    tokens, ring_len, rope = 40, 8, rs.Rope(10_000.0, 64, "half")
    q, k, v = (bf16(rng.standard_normal((tokens, 1, 64))) for _ in range(3))
    positions = np.arange(tokens, dtype=np.int32)
    turned_q, turned_k = (rs.apply_rope(x, positions, rope).view(np.uint16) for x in (q, k))
    ends, options = ends_of([tokens]), {"softmax_scale": 0.125}
    arrays = (turned_q, turned_k, v, ends, ends)
    whole, _ = check_attention(backend, arrays, window=ring_len, **options)
    ring_k, ring_v, errors = np.zeros_like(k[:ring_len]), np.zeros_like(v[:ring_len]), []
    for t in range(tokens):
        slot, live = t % ring_len, min(t + 1, ring_len)
        ring_k[slot], ring_v[slot] = (k if rotate_at_read else turned_k)[t], v[t]
        keys = ring_k[:live]
        if rotate_at_read:
            keys = rs.apply_rope(keys, i32(range(live)), rope).view(np.uint16)
        step = (turned_q[t : t + 1], keys, ring_v[:live], ends_of([1]), ends_of([live]))
        out, _ = check_attention(backend, step, **options)
        errors.append(np.abs(from_bf16(out) - from_bf16(whole[t : t + 1])).max())
    return np.array(errors)


def test_keys_are_rotated_before_they_are_cached(fast_backend):
    """Order in the ring does not matter: 40 steps over a ring of 8 agree with the whole sequence
    to the rounding of bf16."""
    assert ring_errors(fast_backend, rotate_at_read=False).max() < 2.0**-6


def test_rotation_at_read_by_ring_index_is_caught():
    """Exact for the 8 steps before the first wrap, wrong by tenths and more after it."""
    errors = ring_errors("cpu", rotate_at_read=True)
    assert errors[:8].max() < 2.0**-6
    assert errors[8:].max() > 0.5
    assert (errors[8:] > 2.0**-6).all()
