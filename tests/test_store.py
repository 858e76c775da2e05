"""The store in memory, and the seal that every store puts around a value."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_cases import LAYOUT_A, LAYOUT_B

import ringslab as rs
from ringslab.engine.store_seal import head_bytes, is_head, seal, sealed_bytes, unseal, view_value
from ringslab.errors import ArgumentError, StoreError
from ringslab.layouts.digest import layout_digest

VALUES = [b"", b"\0", b"x" * 47, bytes(range(256)) * 300]


def sealed(key: bytes, value: bytes, layout: bytes = LAYOUT_A) -> bytes:
    return bytes(seal(key, view_value(value), layout))


@pytest.mark.parametrize("value", VALUES, ids=len)
def test_unseal_gives_the_value_back(value):
    """48 bytes and the key come before the value; the same key and layout give it back, another
    key or layout gives None."""
    data = sealed(b"key", value)
    assert len(data) == 51 + len(value) == sealed_bytes(b"key", len(value))
    assert unseal(data, b"key", LAYOUT_A) == value
    assert unseal(data, b"kez", LAYOUT_A) is None
    assert unseal(data, b"ke", LAYOUT_A) is None
    assert unseal(data, b"key", LAYOUT_B) is None
    assert is_head(data[: head_bytes(b"key")], len(data), b"key", LAYOUT_A)


def test_golden_seal():
    """The bytes of format version 1 are fixed: a change of them is a new version."""
    assert sealed(b"key", b"value").hex() == GOLDEN_SEAL


GOLDEN_SEAL = (
    "52534c42"
    + "0100"
    + "0300"
    + "0500000000000000"
    + "41" * 16
    + "56dd0a8e778240a048b98a10f1b1ee01"
    + b"keyvalue".hex()
)


def test_every_flipped_bit_is_seen():
    """Each of the 8 x 78 bits of a sealed value, flipped alone: unseal gives None."""
    data = sealed(b"key", b"0123456789" * 2 + b"abcdefg")
    assert len(data) == 78
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8  # bit of a byte
        assert unseal(bytes(bad), b"key", LAYOUT_A) is None, bit


def test_every_other_length_is_seen():
    """A sealed value cut at any byte, or with bytes behind it, gives None."""
    data = sealed(b"key", b"0123456789")
    for size in range(len(data)):
        assert unseal(data[:size], b"key", LAYOUT_A) is None, size
    for more in (b"\0", data, bytes(100)):
        assert unseal(data + more, b"key", LAYOUT_A) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_no_value(data):
    """Bytes that no store wrote give None, whatever they are."""
    assert unseal(data, b"key", LAYOUT_A) is None
    assert unseal(b"RSLB" + data, b"key", LAYOUT_A) is None


def test_what_is_sealed_stays():
    """A shelf may keep a sealed value as it is: nobody can write to it, and the value it was made
    of is not part of it."""
    value = bytearray(b"abc" * 100)
    sealed = seal(b"key", view_value(value), LAYOUT_A)
    value[:] = bytes(300)
    assert unseal(sealed, b"key", LAYOUT_A) == b"abc" * 100
    assert memoryview(sealed).readonly


def test_put_copies():
    """A value changed after put returned is stored as it was."""
    with rs.open_store("memory:", layout=LAYOUT_A) as store:
        value = np.arange(1000, dtype=np.uint8)
        assert store.put(b"k", value)
        value[:] = 0
        assert store.get(b"k") == bytes(np.arange(1000, dtype=np.uint8))


def test_buffers_that_are_taken():
    """bytes, bytearray, memoryview and C-contiguous arrays of any dtype and shape, an empty one
    too, are stored as their bytes."""
    with rs.open_store("memory:") as store:
        for value in (
            b"abc",
            bytearray(b"abc"),
            memoryview(b"abc"),
            np.arange(12, dtype=np.float32).reshape(3, 4),
            np.zeros((0, 5), np.uint8),
        ):
            assert store.put(b"k", value)
            assert store.get(b"k") == bytes(memoryview(value))


@pytest.mark.parametrize("key", [b"", b"x" * 512, "text", None, bytearray(b"k"), 5])
def test_keys_that_are_refused(key):
    """A key is bytes, 1 to 511: the others are an ArgumentError of every call."""
    with rs.open_store("memory:") as store:
        for call in (store.get, store.contains, store.delete, lambda k: store.put(k, b"v")):
            with pytest.raises(ArgumentError):
                call(key)
        assert store.put(b"x" * 511, b"v")
        assert store.get(b"x" * 511) == b"v"


@pytest.mark.parametrize("value", ["text", None, 5, np.zeros((4, 4))[:, ::2]])
def test_values_that_are_refused(value):
    """A value that is no C-contiguous buffer is an ArgumentError and nothing is stored."""
    with rs.open_store("memory:") as store:
        with pytest.raises(ArgumentError):
            store.put(b"k", value)
        assert not store.contains(b"k")


@pytest.mark.parametrize(
    "kw", [{"budget_bytes": 0}, {"budget_bytes": True}, {"budget_bytes": 1.5}, {"layout": b"short"}]
)
def test_options_that_are_refused(kw):
    """A budget is a positive integer, a digest has 16 bytes."""
    with pytest.raises(ArgumentError):
        rs.open_store("memory:", **kw)


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "file:x", "lmdb:", None, 5])
def test_addresses_that_are_refused(url):
    """Any other address is an ArgumentError."""
    with pytest.raises(ArgumentError):
        rs.open_store(url)


def test_stats_count():
    """Two puts of 3 and 5 bytes, a hit, a miss, a delete: each is counted once."""
    with rs.open_store("memory:") as store:
        store.put(b"a", b"123")
        store.put(b"b", b"12345")
        assert store.get(b"b") == b"12345"
        assert store.get(b"c") is None
        assert store.contains(b"a")
        assert not store.contains(b"c")
        assert store.delete(b"a")
        assert not store.delete(b"a")
        counts = store.stats.as_dict()
    wanted = {"puts": 2, "bytes_in": 8, "hits": 1, "misses": 1, "bytes_out": 5}
    assert {name: count for name, count in counts.items() if count} == wanted


def test_memory_budget_is_lru():
    """Room for two values of 100 bytes (148 + 1 each sealed, key b"a" twice): the third put removes
    the one not used for longest; a value above the budget is refused and removes nothing."""
    one = sealed_bytes(b"a", 100) + 1
    with rs.open_store("memory:", budget_bytes=2 * one) as store:
        store.put(b"a", bytes(100))
        store.put(b"b", bytes(100))
        assert store.get(b"a") is not None
        store.put(b"c", bytes(100))
        assert [store.contains(key) for key in (b"a", b"b", b"c")] == [True, False, True]
        assert store.stats.evicted == 1
        assert not store.put(b"d", bytes(2 * one))
        assert store.stats.refused == 1
        assert store.contains(b"a")
        assert store.shelf.used_bytes == 2 * one


def test_closed_store_is_an_error():
    """After close every call but close is a StoreError."""
    store = rs.open_store("memory:")
    store.close()
    store.close()
    for call in (store.get, store.contains, store.delete):
        with pytest.raises(StoreError, match="closed"):
            call(b"k")


def test_memory_with_many_threads():
    """8 threads put and get 40 keys within a budget of about 10: every value read is the one of
    its key, and the bytes used add up."""
    bad = []
    with rs.open_store("memory:", budget_bytes=10_000) as store:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(300):
                n = int(rng.integers(40))
                key = b"%d" % n
                store.put(key, b"%d," % n * 300)
                value = store.get(b"%d" % (n := int(rng.integers(40))))
                if value is not None and value != b"%d," % n * 300:
                    bad.append(n)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []
        shelf = store.shelf
        assert shelf.used_bytes == sum(len(k) + len(v) for k, v in shelf._values.items()) <= 10_000


def test_layout_digest_of_a_changed_config():
    """What fixes stored bytes changes the digest: record format, ring length, offset, rotation,
    scale, sink, model. Seed, slots, trace, path and longest sequence do not."""
    cfg = rs.load_config("quickstart.yaml")
    base = layout_digest(cfg)
    assert len(base) == 16
    assert layout_digest(rs.load_config("quickstart.yaml")) == base
    layer = cfg.layers[0]
    slots = cfg.slot_layout
    ring = slots.rings[0]

    def with_layer(**change):
        return replace(cfg, layers=(replace(layer, **change), *cfg.layers[1:]))

    def with_ring(**change):
        rings = (replace(ring, **change), *slots.rings[1:])
        return replace(cfg, slot_layout=replace(slots, rings=rings))

    other_format = replace(layer.record_format, amax_floor=0.0)
    changed = [
        replace(cfg, name="other"),
        replace(cfg, version=cfg.version + 1),
        replace(cfg, num_q_heads=cfg.num_q_heads * 2),
        with_layer(window=layer.window - 1),
        with_layer(rope=replace(layer.rope, theta=layer.rope.theta + 1)),
        with_layer(rope=replace(layer.rope, pairing="half")),
        with_layer(softmax_scale=layer.softmax_scale * 2),
        with_layer(sink=not layer.sink),
        with_layer(record_format=other_format),
        with_ring(ring_len=ring.ring_len + 1),
        with_ring(offset=ring.offset + 32),
        with_ring(stored=not ring.stored),
        replace(cfg, slot_layout=replace(slots, align_bytes=64)),
    ]
    digests = {layout_digest(other) for other in changed}
    assert len(digests) == len(changed)
    assert base not in digests
    same = [
        replace(cfg, path="elsewhere"),
        replace(cfg, max_seq_len=cfg.max_seq_len * 2),
        replace(cfg, run=replace(cfg.run, seed=cfg.run.seed + 1)),
        replace(cfg, engine=replace(cfg.engine, num_state_slots=1)),
        with_layer(group="renamed"),
    ]
    assert {layout_digest(other) for other in same} == {base}
    assert layout_digest(slots) != base


def test_digest_refuses_what_has_no_rule():
    """An array in a layout has no text: an error, not a digest that may collide."""
    with pytest.raises(TypeError, match="no rule"):
        layout_digest((np.zeros(3),))
    with pytest.raises(ArgumentError, match="no rule"):
        rs.open_store("memory:", layout=object())
