"""Ring arithmetic: how long a ring must be, and where a position lives."""

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import LayoutError
from ringslab.layouts.rings import MAX_POSITION, ring_index


def test_required_ring_len():
    """128 + 6 - 1 = 133; window 1 with one token needs 1; R01: window 4, 3 tokens needs 6; pinned
    tokens come on top."""
    assert rs.required_ring_len(128, 6) == 133
    assert rs.required_ring_len(1, 1) == 1
    assert rs.required_ring_len(4, 3) == 6
    assert rs.required_ring_len(128, 6, sink_tokens=4) == 137


@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (4, 3), (5, 1), (1, 6), (32, 4), (128, 6)])
def test_required_ring_len_is_the_smallest(window, tokens):
    """D7: with the required length no token of a step lands on a key that its first query still
    reads; with one less, one does (for the steps where the ring wraps)."""

    def collides(ring_len: int) -> bool:
        for p in range(window, window + 3 * ring_len):
            keys = {ring_index(k, ring_len) for k in range(p - window + 1, p + 1)}
            newer = {ring_index(k, ring_len) for k in range(p + 1, p + tokens)}
            if keys & newer or len(keys) < window:
                return True
        return False

    needed = rs.required_ring_len(window, tokens)
    assert not collides(needed)
    assert needed == 1 or collides(needed - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 6), "window=0 but must be at least 1"),
        ((-1, 6), "window=-1"),
        ((128, 0), "tokens_per_step=0"),
        ((128, 6, -1), "sink_tokens=-1"),
    ],
)
def test_required_ring_len_refuses(arguments, message):
    """M05: a window of 0 or below never means "all keys"."""
    with pytest.raises(LayoutError, match=message):
        rs.required_ring_len(*arguments)


def test_ring_index():
    """Position 873 of a ring of 134 lives at 69, position 1,000 at 62, the last int32 position at
    (2^31 - 2) % 134 = 44; arrays keep their shape."""
    assert [ring_index(p, 134) for p in (0, 133, 134, 873, 1000)] == [0, 133, 0, 69, 62]
    assert ring_index(MAX_POSITION, 134) == (2**31 - 2) % 134
    positions = np.array([[0, 134], [873, MAX_POSITION]], np.int32)
    assert ring_index(positions, 134).tolist() == [[0, 0], [69, (2**31 - 2) % 134]]


def test_k11_pinned_tokens():
    """K11: with 2 pinned tokens and a ring of 6, positions 1, 2, 5, 6, 9, 12 live at 1, 2, 5, 2, 5,
    4; the naive `p % 6` gives 1, 2, 5, 0, 3, 0."""
    positions = [1, 2, 5, 6, 9, 12]
    expected = [1, 2, 5, 2, 5, 4]
    assert [ring_index(p, 6, sink_tokens=2) for p in positions] == expected
    assert ring_index(np.array(positions, np.int32), 6, sink_tokens=2).tolist() == expected
