"""Ring arithmetic: how many records a ring must hold, and where a position lives in it."""

from .errors import LayoutError
from .sizes import is_count

# Largest position a plan can hold: arrays are int32, and one step past it must still fit.
MAX_POSITION = 2**31 - 2


def required_ring_len(window: int, tokens_per_step: int, sink_tokens: int = 0) -> int:
    """Smallest ring length that is safe for decode steps of `tokens_per_step` query tokens.

    A step stores all its tokens before its first query reads its oldest key, so `window` keys of
    the first query and `tokens_per_step - 1` newer ones must be there at once. Pinned first tokens
    (`sink_tokens`) never move and come on top. `required_ring_len(128, 6)` is 133.

    Raises LayoutError for a window or tokens_per_step below 1, sink_tokens below 0, or what is no
    integer.
    """
    for name, value, least in (
        ("window", window, 1),
        ("tokens_per_step", tokens_per_step, 1),
        ("sink_tokens", sink_tokens, 0),
    ):
        if not is_count(value):
            raise LayoutError(f"required_ring_len: {name}={value!r} but must be an integer")
        if value < least:
            raise LayoutError(f"required_ring_len: {name}={value} but must be at least {least}")
    return window + tokens_per_step - 1 + sink_tokens


def ring_index(position, ring_len: int, sink_tokens: int = 0):
    """Ring index of a position >= 0 (an int or an integer array): `position % ring_len`, but
    positions below `sink_tokens` stay where they are and the rest share what is left."""
    if sink_tokens == 0:
        return position % ring_len
    moved = sink_tokens + (position - sink_tokens) % (ring_len - sink_tokens)
    pinned = position < sink_tokens
    return pinned * position + (1 - pinned) * moved
