"""Which keys of an LMDB store were used longest ago, and how many bytes all of them take."""

import struct
from collections.abc import Iterable
from typing import Any

_ENTRY = struct.Struct("<QQ")  # turn, bytes
_TURN = struct.Struct(">Q")  # big-endian: LMDB sorts keys as bytes
_USED = struct.Struct("<Q")
_USED_KEY = b"used"


class UseOrder:
    """The tables `index`, `order` and `totals` within one write transaction. `save` ends it.

    An entry of another length than ours is damage: it counts as 0 bytes and is removed.
    """

    def __init__(self, txn: Any, index: Any, turns: Any, totals: Any) -> None:
        self.txn, self.index, self.turns, self.totals = txn, index, turns, totals
        used = txn.get(_USED_KEY, db=totals)
        self.used_bytes = _USED.unpack(used)[0] if used and len(used) == _USED.size else 0
        with txn.cursor(db=turns) as cursor:
            last = cursor.key() if cursor.last() else b""
        self.next_turn = _TURN.unpack(last)[0] + 1 if len(last) == _TURN.size else 0

    def append(self, key: bytes, size: int) -> None:
        """A key that is not there becomes the one used last."""
        self.txn.put(key, _ENTRY.pack(self.next_turn, size), db=self.index)
        self.txn.put(_TURN.pack(self.next_turn), key, db=self.turns)
        self.used_bytes += size
        self.next_turn += 1

    def remove(self, key: bytes) -> int | None:
        """Forgets a key: its bytes, or None where it is not there."""
        entry = self.txn.pop(key, db=self.index)
        if entry is None or len(entry) != _ENTRY.size:
            return None
        turn, size = _ENTRY.unpack(entry)
        self.txn.delete(_TURN.pack(turn), db=self.turns)
        self.used_bytes = max(self.used_bytes - size, 0)
        return size

    def renew(self, keys: Iterable[bytes]) -> None:
        """Keys that were used, in the order of their use; those no longer there are skipped."""
        for key in keys:
            size = self.remove(key)
            if size is not None:
                self.append(key, size)

    def pop_oldest(self) -> bytes | None:
        """Forgets the key used longest ago; None where there is none."""
        with self.txn.cursor(db=self.turns) as cursor:
            if not cursor.first():
                self.used_bytes = 0
                return None
            key = cursor.value()
            cursor.delete()
        entry = self.txn.pop(key, db=self.index)
        if entry is not None and len(entry) == _ENTRY.size:
            self.used_bytes = max(self.used_bytes - _ENTRY.unpack(entry)[1], 0)
        return key

    def save(self) -> None:
        self.txn.put(_USED_KEY, _USED.pack(self.used_bytes), db=self.totals)
