"""Tiles, keys and reach of a causal window: the published numbers, and a count by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringslab as rs
from ringslab.layouts.tiles import count_scores, key_tiles, stacked_reach, visible_keys


def mask(seqlen_q, seqlen_k, window, sink_tokens=0):
    """bool [seqlen_q, seqlen_k] from the definition."""
    query = seqlen_k - seqlen_q + np.arange(seqlen_q)[:, None]
    key = np.arange(seqlen_k)[None]
    near = True if window is None else query - key < window
    return (key <= query) & (near | (key < sink_tokens))


def counts(n, window, block_m, block_n, sink_tokens=0):
    found = rs.count_tiles(
        n, n, window=window, block_m=block_m, block_n=block_n, sink_tokens=sink_tokens
    )
    assert found.empty == 0
    return found.full, found.partial


def test_keys_per_query():
    """n = 8, W = 3: 1, 2, 3, 3, 3, 3, 3, 3; with n = 100 and W = 7 all rows past the first 6 see
    7 keys; a position before all keys sees none."""
    assert [visible_keys(p, window=3) for p in range(8)] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert {visible_keys(p, window=7) for p in range(6, 100)} == {7}
    assert visible_keys(9, window=None) == 10
    assert visible_keys(9, window=3, sink_tokens=4) == 7
    assert visible_keys(-1, window=3, sink_tokens=4) == 0


@pytest.mark.parametrize(
    ("window", "full", "partial"),
    [(None, 120, 16), (1, 0, 16), (100, 0, 45), (128, 15, 30), (300, 43, 38)],
)
def test_1000_tokens_in_tiles_of_64(window, full, partial):
    """n = 1,000, 64 x 64: the kinds, and no EMPTY tile."""
    assert counts(1000, window, 64, 64) == (full, partial)


@pytest.mark.parametrize(
    ("n", "visited"),
    [
        (8_192, (2_080, 540, 1_584)),
        (32_768, (32_896, 2_268, 7_920)),
        (131_072, (524_800, 9_180, 33_264)),
    ],
)
def test_visited_tiles_of_128(n, visited):
    """Causal, W = 1,024 and W = 4,096: linear in n where there is a window."""
    for window, wanted in zip((None, 1024, 4096), visited, strict=True):
        assert rs.count_tiles(n, n, window=window, block_m=128, block_n=128).visited == wanted


@pytest.mark.parametrize(
    ("n", "causal", "windowed", "with_sinks"),
    [
        (4_096, (496, 32, 48.44), (196, 56, 75.39), (196, 79, 73.14)),
        (8_192, (2_016, 64, 49.22), (420, 120, 86.82), (420, 175, 85.47)),
        (16_384, (8_128, 128, 49.61), (868, 248, 93.19), (868, 367, 92.46)),
    ],
)
def test_kinds_and_sparsity_of_128(n, causal, windowed, with_sinks):
    """Causal, W = 1,024, and W = 1,024 with 4 first tokens: FULL, PARTIAL, sparsity in percent."""
    for (window, sink_tokens), wanted in {
        (None, 0): causal,
        (1024, 0): windowed,
        (1024, 4): with_sinks,
    }.items():
        found = rs.count_tiles(
            n, n, window=window, block_m=128, block_n=128, sink_tokens=sink_tokens
        )
        assert (found.full, found.partial, round(found.sparsity, 2)) == wanted


def test_narrow_key_tiles():
    """BN = 32, BM = 64, W = 100: 5 PARTIAL and 1 FULL a query tile inside; 75 and 15 of 1,000."""
    assert counts(1000, 100, 64, 32) == (15, 75)
    inside = rs.count_tiles(64, 512, window=100, block_m=64, block_n=32)
    assert (inside.full, inside.partial) == (1, 5)


def test_reach():
    """n = 64, W = 4: 13 tokens after 4 layers, 25 after 8, all 64 with one global layer; 32 layers
    of W = 4,096 reach 131,040 tokens back; and the same by powers of the mask."""
    assert stacked_reach((4,) * 4, 64) == 13
    assert stacked_reach((4,) * 8, 64) == 25
    assert stacked_reach((4, 4, 4, None), 64) == 64
    assert stacked_reach((4096,) * 32, 10**6) - 1 == 131_040
    for windows in ((4,) * 4, (4,) * 8, (1, 9, 2), (4, 4, 4, None)):
        sees = np.eye(64, dtype=bool)
        for window in windows:
            sees = mask(64, 64, window).astype(int) @ sees > 0
        assert stacked_reach(windows, 64) == 64 - np.flatnonzero(sees[-1])[0]


@pytest.mark.parametrize(
    ("window", "scores"),
    [(64, 30_752), (256, 98_432), (512, 131_328), (513, 131_328), (None, 131_328)],
)
def test_scores_of_512_tokens(window, scores):
    """n = 512: W = 64 needs 30,752 of 131,328 scores; W >= 512 needs all."""
    assert count_scores(512, 512, window=window) == scores


SHAPES = {
    "seqlen_q": st.integers(0, 70),
    "seqlen_k": st.integers(0, 70),
    "window": st.none() | st.integers(1, 80),
    "block_m": st.integers(1, 33),
    "block_n": st.integers(1, 33),
    "sink_tokens": st.integers(0, 40),
}


@given(**SHAPES)
def test_counts_are_those_of_the_mask(seqlen_q, seqlen_k, window, block_m, block_n, sink_tokens):
    """Any shape, more queries than keys included: FULL, PARTIAL and EMPTY are those of the boolean
    mask cut into tiles, the loop bounds visit each tile with a visible key once, in order, and no
    other; scores are its sum."""
    sees = mask(seqlen_q, seqlen_k, window, sink_tokens)
    full = partial = 0
    for first in range(0, seqlen_q, block_m):
        rows = sees[first : first + block_m]
        wanted = []
        for tile, key in enumerate(range(0, seqlen_k, block_n)):
            part = rows[:, key : key + block_n]
            full += part.all()
            partial += part.any() and not part.all()
            wanted += [tile] if part.any() else []
        position = seqlen_k - seqlen_q + first
        bounds = key_tiles(position, position + len(rows) - 1, window, block_n, sink_tokens)
        assert [*range(bounds.sink_end), *range(bounds.start, bounds.end)] == wanted
        assert bounds.visited == len(wanted)
    found = rs.count_tiles(
        seqlen_q,
        seqlen_k,
        window=window,
        block_m=block_m,
        block_n=block_n,
        sink_tokens=sink_tokens,
    )
    assert (found.full, found.partial, found.empty) == (full, partial, 0)
    options = {"window": window, "sink_tokens": sink_tokens}
    assert count_scores(seqlen_q, seqlen_k, **options) == sees.sum()
    positions = seqlen_k - seqlen_q + np.arange(seqlen_q)
    assert [visible_keys(int(p), **options) for p in positions] == sees.sum(axis=1).tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 0),
        ("window", -1),
        ("window", 1.5),
        ("window", True),
        ("block_m", 0),
        ("block_n", 0),
        ("sink_tokens", -1),
        ("sink_tokens", 0.5),
    ],
)
def test_wrong_numbers_are_named(name, value):
    """A window or tile below 1, a negative count and what is no integer are errors."""
    shape = {"window": 4, "block_m": 8, "block_n": 8, "sink_tokens": 0} | {name: value}
    with pytest.raises(rs.errors.ArgumentError, match=f"{name}={value!r} but must be"):
        rs.count_tiles(8, 8, **shape)
    with pytest.raises(rs.errors.ArgumentError, match="seqlen_q=-1"):
        rs.count_tiles(-1, 8, window=4, block_m=8, block_n=8)


def test_what_would_take_forever_is_refused():
    """A length past the last position, and 2^20 + 1 query tiles; 1,024 large ones are counted."""
    with pytest.raises(rs.errors.ArgumentError, match="seqlen_k=4611686018427387904 but must be"):
        rs.count_tiles(8, 2**62, window=4, block_m=8, block_n=8)
    with pytest.raises(rs.errors.ArgumentError, match="more than 1048576 query tiles"):
        rs.count_tiles(2**20 + 1, 2**30, window=4, block_m=1, block_n=8)
    assert rs.count_tiles(2**20, 2**20, window=1, block_m=2**10, block_n=2**10).visited == 2**10
