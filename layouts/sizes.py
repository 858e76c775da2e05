"""Integer arithmetic on sizes, with the rounding in the name."""


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
