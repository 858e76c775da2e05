"""Damage to stored bytes, 1,000 times: never a wrong value, always counted and removed."""

import random

import pytest
from store_cases import LAYOUT_A, LAYOUT_B

import ringslab as rs
from ringslab.engine.store_redis import KEY_PREFIX
from ringslab.engine.store_seal import MAGIC, seal, sealed_bytes, view_value

ROUNDS = 1000
NUM_KEYS = 20


def key_of(n: int) -> bytes:
    return b"block-%03d" % n


def value_of(n: int, version: int = 0) -> bytes:
    """Of a length of its own, so that swapped values differ in length too, every fifth equal."""
    return random.Random(n * 1000 + version).randbytes(700 if n % 5 == 0 else 400 + 37 * n)


class Raw:
    """The stored bytes themselves, past the store."""

    def __init__(self, store) -> None:
        self.shelf = store.shelf
        self.kind = type(store.shelf).__name__

    def read(self, key: bytes) -> bytes:
        data = self.shelf.fetch(key)
        return None if data is None else bytes(data)

    def write(self, key: bytes, data: bytes) -> None:
        if self.kind == "MemoryShelf":
            self.shelf._values[key] = data
        elif self.kind == "RedisShelf":
            self.shelf._client.set(KEY_PREFIX + key, data)
        else:
            with self.shelf._env.begin(write=True) as txn:
                txn.put(key, data, db=self.shelf._values)


def sealed(n, value, layout=LAYOUT_A) -> bytes:
    return bytes(seal(key_of(n), view_value(value), layout))


def flip_bits(rng, good, n):
    bad = bytearray(good)
    for _ in range(rng.randint(1, 8)):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def torn(rng, good, n):
    """The first bytes of one version and the rest of another of the same length, cut behind the
    first byte of the checksum: before it the two versions are equal."""
    other = sealed(n, value_of(n, 1))
    cut = rng.randrange(33, len(good))
    return good[:cut] + other[cut:]


def zero_pages(rng, good, n):
    """Blocks of 512 bytes that never reached the disk."""
    bad = bytearray(good)
    start = 512 * rng.randrange(len(bad) // 512 + 1)
    size = min(512 * rng.randint(1, 3), len(bad) - start)
    bad[start : start + size] = bytes(size)
    return bytes(bad)


def other_key(rng, good, n):
    other = (n + rng.randrange(1, NUM_KEYS)) % NUM_KEYS
    return sealed(other, value_of(other))


DAMAGE = [
    flip_bits,
    torn,
    zero_pages,
    other_key,
    lambda rng, good, n: good[: rng.randrange(1, len(good))],
    lambda rng, good, n: good + rng.randbytes(rng.randint(1, 600)),
    lambda rng, good, n: rng.randbytes(len(good)),
    lambda rng, good, n: sealed(n, value_of(n), LAYOUT_B),
]


def test_a_thousand_damaged_values(store_url):
    """1,000 times flipped bits, torn, cut, zeroed, lengthened, replaced or swapped: get gives the
    value (where the damage changed nothing) or None; every None is one corrupt, one miss and a
    removed key, and the same key can be put again."""
    rng = random.Random(7)
    with rs.open_store(store_url, layout=LAYOUT_A, sync=False) as store:
        raw = Raw(store)
        for n in range(NUM_KEYS):
            assert store.put(key_of(n), value_of(n))
        unchanged = 0
        for round_ in range(ROUNDS):
            n = rng.randrange(NUM_KEYS)
            good = raw.read(key_of(n))
            bad = DAMAGE[round_ % len(DAMAGE)](rng, good, n)
            raw.write(key_of(n), bad)
            value = store.get(key_of(n))
            if bad == good:
                unchanged += 1
                assert value == value_of(n)
            else:
                assert value is None, (round_, n)
                assert raw.read(key_of(n)) is None
                assert store.put(key_of(n), value_of(n))
        assert store.stats.corrupt == store.stats.misses == ROUNDS - unchanged
        assert unchanged < ROUNDS // 10
        assert [store.get(key_of(n)) for n in range(NUM_KEYS)] == list(map(value_of, range(20)))


def test_bits_flipped_in_the_file_of_lmdb(tmp_path):
    """1,000 single bits flipped in the file, in the bytes of 200 values of 5,000 to 5,199 bytes,
    while it is closed: every value that was hit is a miss, every other one is whole."""
    pytest.importorskip("lmdb")
    url, file = f"lmdb:{tmp_path / 's'}", tmp_path / "s" / "data.mdb"
    values = {key_of(n): random.Random(n).randbytes(5000 + n) for n in range(200)}
    with rs.open_store(url, layout=LAYOUT_A, sync=False) as store:
        assert all(store.put(key, value) for key, value in values.items())
    data = bytearray(file.read_bytes())
    rng, hit = random.Random(3), set()
    places = {key: data.index(MAGIC + seal_tail(key, value)) for key, value in values.items()}
    for _ in range(1000):
        key = rng.choice(list(values))
        at = places[key] + rng.randrange(sealed_bytes(key, len(values[key])))
        data[at] ^= 1 << rng.randrange(8)
        hit.add(key)
    file.write_bytes(data)
    with rs.open_store(url, layout=LAYOUT_A) as store:
        found = {key: store.get(key) for key in values}
        assert store.stats.corrupt > 150
        assert all(found[key] == value for key, value in values.items() if key not in hit)
        assert all(found[key] in (None, value) for key, value in values.items())
        assert store.stats.corrupt == sum(value is None for value in found.values())


def seal_tail(key: bytes, value: bytes) -> bytes:
    return bytes(seal(key, view_value(value), LAYOUT_A))[len(MAGIC) :]


def test_damage_is_not_removed_once_replaced(store_url):
    """Between reading a damaged value and removing it another writer puts a good one: that one
    stays."""
    with rs.open_store(store_url, layout=LAYOUT_A) as store:
        assert store.put(b"k", b"good")
        assert not store.shelf.remove(b"k", b"what was read before")
        assert store.get(b"k") == b"good"


def test_redis_value_of_another_type(redis_server):
    """A list under the key: get is a miss and an error, put replaces it, and other keys work."""
    with redis_server.client() as client:
        client.rpush(KEY_PREFIX + b"k", b"x")
    with rs.open_store(redis_server.url) as store:
        with pytest.warns(RuntimeWarning, match="WRONGTYPE"):
            assert store.get(b"k") is None
        assert store.stats.errors == 1
        assert store.put(b"other", b"v")
        assert store.put(b"k", b"v")
        assert store.get(b"k") == b"v"
