"""Names of prefixes: one key for each whole block of tokens, chained from the start of a sequence.

The key of block k names the first (k + 1) * block_size tokens, not the block alone, so that two
prompts share a key only where they share everything before it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16


def root_key(*words: str | bytes) -> bytes:
    """The key of the empty prefix. What a cached byte depends on beside the tokens goes in here:
    other words give other keys for the same tokens."""
    mixed = hashlib.blake2b(digest_size=KEY_BYTES)
    for word in words:
        part = word.encode(errors="surrogatepass") if isinstance(word, str) else word
        mixed.update(len(part).to_bytes(8, "little") + part)
    return mixed.digest()


def keys_of_hash_ids(root: bytes, hash_ids: Sequence[int], num_blocks: int) -> list[bytes]:
    """Keys of the first `num_blocks` blocks from a trace's own ids. An id of a Mooncake trace
    stands for its block and all that comes before it already, so ids are not chained again."""
    return [
        hashlib.blake2b(
            b"hash_id" + root + int(block).to_bytes(8, "little"), digest_size=KEY_BYTES
        ).digest()
        for block in hash_ids[:num_blocks]
    ]


def extend_keys(keys: list[bytes], root: bytes, tokens: np.ndarray, block_size: int) -> None:
    """Appends the keys of the whole blocks of `tokens`, int32 [n], that `keys` lacks."""
    for block in range(len(keys), len(tokens) // block_size):  # whole blocks: rounded down
        before = keys[-1] if keys else root
        words = np.ascontiguousarray(tokens[block * block_size : (block + 1) * block_size], "<i4")
        keys.append(hashlib.blake2b(before + words.tobytes(), digest_size=KEY_BYTES).digest())
