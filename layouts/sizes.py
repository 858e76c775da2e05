"""Integer arithmetic on sizes, with the rounding in the name; and which values of a caller are
numbers, flags and words. The questions can be asked of any object: an array has no truth value."""

from typing import Any

import numpy as np


def div_ceil(size: int, step: int) -> int:
    """Number of steps of `step` that cover `size`, the last one perhaps in part."""
    return -(-size // step)


def div_exact(size: int, step: int) -> int:
    """`size / step`, where a remainder is our own mistake."""
    assert size % step == 0, f"{size} is no multiple of {step}"
    return size // step


def align_up(size: int, step: int) -> int:
    """The smallest multiple of `step` at or above `size`."""
    return div_ceil(size, step) * step


def align_down(size: int, step: int) -> int:
    """The largest multiple of `step` at or below `size`, which is not negative."""
    assert size >= 0, size
    return size // step * step


def is_count(value: object) -> bool:
    """Whether a value is an integer, Python's or NumPy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_flag(value: object) -> bool:
    """Whether a value is True or False, Python's or NumPy's."""
    return isinstance(value, (bool, np.bool_))


def is_word(value: object, words: Any) -> bool:
    """Whether a value is text, and one of `words`."""
    return isinstance(value, str) and value in words
