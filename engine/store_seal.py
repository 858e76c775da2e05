"""The seal around a stored value: what must be true before its bytes are believed.

    bytes   field
    4       magic
    2       format version
    2       bytes of the key
    8       bytes of the value
    16      digest of the layout
    16      BLAKE2b of all of the above, the key and the value
    ...     key
    ...     value

All integers are little-endian. A value that was cut off, torn, altered, stored under another key or
written for another layout or by another format version does not pass.
"""

import hashlib
import struct
from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError

MAGIC = b"RSLB"
FORMAT_VERSION = 1  # a change of this table, or of what any record's bytes mean, is a new version
CHECKSUM_BYTES = 16
MAX_KEY_BYTES = 511  # LMDB's bound; the same for every store

Sealed = bytes | memoryview  # as `seal` makes it, or as it was read

_HEAD = struct.Struct("<4sHHQ16s")
_KEY_AT = _HEAD.size + CHECKSUM_BYTES
assert _HEAD.size == 32


def check_key(key: Any) -> bytes:
    """The key. Raises ArgumentError unless it is bytes, 1 to 511 of them."""
    if not isinstance(key, bytes):
        raise ArgumentError(f"key={key!r} but must be bytes")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ArgumentError(f"key has {len(key)} bytes but must have 1 to {MAX_KEY_BYTES}")
    return key


def view_value(value: Any) -> memoryview:
    """The value's bytes, not copied. Raises ArgumentError unless it is a C-contiguous buffer:
    bytes, bytearray, memoryview or a NumPy array."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError) as error:  # ValueError: a dtype that buffers cannot name
        raise ArgumentError(f"value: {error}; give bytes or a uint8 array") from None
    if not view.c_contiguous:
        raise ArgumentError(f"value: shape={view.shape} strides={view.strides} is not contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def seal(key: bytes, value: memoryview, layout: bytes) -> Sealed:
    """The sealed copy of a value, read-only; later changes to `value` do not reach it.

    A thread that seals megabytes lets the others run meanwhile: NumPy's copies and hashlib's sums
    release the interpreter, those of bytes and bytearray do not.
    """
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, len(key), value.nbytes, layout)
    sealed = np.empty(sealed_bytes(key, value.nbytes), np.uint8)
    first = memoryview(sealed)[: head_bytes(key)]
    first[: len(head)] = head
    first[_KEY_AT:] = key
    sealed[head_bytes(key) :] = np.frombuffer(value, np.uint8)  # copied before it is summed
    first[len(head) : _KEY_AT] = _checksum(memoryview(sealed))
    sealed.flags.writeable = False
    return memoryview(sealed)


def sealed_bytes(key: bytes, value_bytes: int) -> int:
    """Bytes of a sealed value."""
    return _KEY_AT + len(key) + value_bytes


def head_bytes(key: bytes) -> int:
    """Bytes of a sealed value before the value: what `is_head` needs."""
    return _KEY_AT + len(key)


def is_head(head: Sealed, total_bytes: int, key: bytes, layout: bytes) -> bool:
    """Whether the first bytes of a sealed value of `total_bytes` are right but for the checksum."""
    if len(head) < head_bytes(key):
        return False
    expected = _HEAD.pack(
        MAGIC, FORMAT_VERSION, len(key), max(total_bytes - head_bytes(key), 0), layout
    )
    return (
        total_bytes >= head_bytes(key)
        and head[: _HEAD.size] == expected
        and head[_KEY_AT : _KEY_AT + len(key)] == key
    )


def unseal(sealed: Sealed, key: bytes, layout: bytes) -> bytes | None:
    """The value, or None where the seal does not hold for this key and layout."""
    view = memoryview(sealed)
    if not is_head(bytes(view[: head_bytes(key)]), len(view), key, layout):
        return None
    if bytes(view[_HEAD.size : _KEY_AT]) != _checksum(view):
        return None
    return bytes(view[head_bytes(key) :])


def _checksum(sealed: memoryview) -> bytes:
    digest = hashlib.blake2b(sealed[: _HEAD.size], digest_size=CHECKSUM_BYTES)
    digest.update(sealed[_KEY_AT:])
    return digest.digest()
