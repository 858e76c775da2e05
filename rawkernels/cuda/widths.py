"""The widest pieces, in bytes, in which a kernel may move a record."""

import math
from typing import Any

from ..device.module import device_pointer

MAX_PIECE_BYTES = 16  # one instruction moves at most this much


def piece_bytes(*multiples: int) -> int:
    """The largest of 16, 8, 4, 2, 1 that divides every address, stride and size given (0 divides
    by all)."""
    return math.gcd(MAX_PIECE_BYTES, *multiples)


def is_vector_aligned(*arrays: Any) -> bool:
    """Whether every array starts at a multiple of 16 bytes."""
    return all(device_pointer(array) % MAX_PIECE_BYTES == 0 for array in arrays)
