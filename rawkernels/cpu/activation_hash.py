"""The counter hash of seeded activations on the CPU; see reference/activation_hash.py for the
formula. Every operand is an explicit unsigned type: Numba makes a float of uint64 and int64."""

import numpy as np

from .kernels import device_function

GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
MIX64_A = np.uint64(0xBF58476D1CE4E5B9)
MIX64_B = np.uint64(0x94D049BB133111EB)
GOLDEN32 = np.uint32(0x9E3779B9)
MIX32_A = np.uint32(0x7FEB352D)
MIX32_B = np.uint32(0x846CA68B)


@device_function
def splitmix64(z):
    z = z + GOLDEN64
    z = (z ^ (z >> np.uint64(30))) * MIX64_A
    z = (z ^ (z >> np.uint64(27))) * MIX64_B
    return z ^ (z >> np.uint64(31))


@device_function
def row_key(seed, layer, token_id, position):
    key = splitmix64(np.uint64(seed) ^ (np.uint64(layer) * GOLDEN64))
    key = splitmix64(key ^ (np.uint64(token_id) * GOLDEN64))
    return splitmix64(key ^ (np.uint64(position) * GOLDEN64))


@device_function
def pair_hash(key, pair):
    """32 hashed bits of a key and an index."""
    low, high = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    x = np.uint32(low + np.uint32(np.uint32(pair) * GOLDEN32))
    x = np.uint32(x ^ high)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * MIX32_A)
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * MIX32_B)
    return np.uint32(x ^ (x >> np.uint32(16)))


@device_function
def element(key, e):
    """float32 value of element e of a row."""
    x = pair_hash(key, e >> 1)
    half = np.uint32(x >> np.uint32(16)) if e & 1 else x
    total = np.int32(half & np.uint32(0xFF)) + np.int32((half >> np.uint32(8)) & np.uint32(0xFF))
    return np.float32(np.float32(total - np.int32(255)) * np.float32(1.0 / 128.0))
