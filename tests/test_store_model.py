"""The three stores against a dict, and against an ordered dict with a byte budget."""

import itertools
from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cases import LAYOUT_A, LAYOUT_B, lmdb_faults

import ringslab as rs
from ringslab.engine.store_seal import sealed_bytes

KEYS = st.sampled_from([b"a", b"b", b"\0", b"\xff" * 511, b"a\0", b"aa"])
VALUES = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 40_000).map(lambda size: bytes(range(256)) * (size // 256)),  # whole runs
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, VALUES),
        st.tuples(st.just("get"), KEYS),
        st.tuples(st.just("contains"), KEYS),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("reopen")),
    ),
    max_size=30,
)
MANY = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example has its own place
)
numbers = itertools.count()


def fresh(url: str, redis_client=None) -> str:
    """The address of a store that no example used before."""
    if url.startswith("lmdb:"):
        return f"{url}{next(numbers)}"
    if redis_client is not None:
        redis_client.flushall()
    return url


@MANY
@given(steps=STEPS)
def test_a_store_is_a_dict(store_url, request, steps):
    """Any order of put, get, contains, delete and closing gives what a dict gives; a store in
    memory is empty after closing, the others are not. The counts add up."""
    client = None
    if store_url.startswith("redis:"):
        client = request.getfixturevalue("shared_redis").client()
    url = fresh(store_url, client)
    model: dict[bytes, bytes] = {}
    store = rs.open_store(url, layout=LAYOUT_A, sync=False)
    gets = 0
    for name, *args in steps:
        if name == "put":
            assert store.put(*args)
            model[args[0]] = args[1]
        elif name == "get":
            assert store.get(*args) == model.get(*args)
            gets += 1
        elif name == "contains":
            assert store.contains(*args) == (args[0] in model)
        elif name == "delete":
            assert store.delete(*args) == (model.pop(*args, None) is not None)
        else:
            assert store.stats.hits + store.stats.misses == gets
            assert store.stats.errors == store.stats.corrupt == store.stats.evicted == 0
            store.close()
            store, gets = rs.open_store(url, layout=LAYOUT_A, sync=False), 0
            if url == "memory:":
                model.clear()
    assert {key: store.get(key) for key in model} == model
    store.close()
    if client is not None:
        client.close()


BUDGET = 3 * (sealed_bytes(b"a", 1000) + 1)
SIZED = st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), st.integers(0, 1500))


@pytest.mark.parametrize("kind", ["memory:", "lmdb:"])
@MANY
@given(steps=st.lists(st.one_of(SIZED, st.sampled_from([b"a", b"b", b"c", b"d"])), max_size=40))
def test_budget_against_a_model(tmp_path, kind, steps):
    """Puts of 0 to 1,500 bytes and gets within room for three values of 1,000: what is there after
    each put is what an ordered dict keeps that drops the least recently used first, and the bytes
    that the store counts are those of the model."""
    if kind == "lmdb:":
        pytest.importorskip("lmdb")
    url = fresh(f"lmdb:{tmp_path / 'store'}") if kind == "lmdb:" else kind
    model: OrderedDict[bytes, int] = OrderedDict()

    def bytes_of(key: bytes) -> int:
        return len(key) + sealed_bytes(key, model[key])

    evicted = 0
    with rs.open_store(url, budget_bytes=BUDGET, sync=False) as store:
        for step in steps:
            if isinstance(step, bytes):
                value = store.get(step)
                assert value == (bytes(model[step]) if step in model else None)
                if step in model:
                    model.move_to_end(step)
                continue
            key, size = step
            assert store.put(key, bytes(size))
            model.pop(key, None)
            model[key] = size
            while sum(map(bytes_of, model)) > BUDGET:
                model.popitem(last=False)
                evicted += 1
            present = {key for key in (b"a", b"b", b"c", b"d", b"e") if store.contains(key)}
            assert present == set(model)
            assert store.stats.evicted == evicted
        if kind == "lmdb:":
            assert lmdb_faults(store.shelf) == []


def test_another_layout_is_never_read(store_url):
    """A value put under layout A, in a store opened for layout B: contains says no, get is a miss
    that counts as corrupt, and the value is gone for A too."""
    a = rs.open_store(store_url, layout=LAYOUT_A)
    assert a.put(b"k", b"value")
    a.layout = LAYOUT_B  # LMDB opens a directory once, memory is one process's: the same shelf
    assert not a.contains(b"k")
    assert a.get(b"k") is None
    assert (a.stats.corrupt, a.stats.misses) == (1, 1)
    a.layout = LAYOUT_A
    assert a.get(b"k") is None
    assert (a.stats.corrupt, a.stats.misses) == (1, 2)
    a.close()


def test_a_changed_config_never_reads_old_bytes(store_url):
    """The same YAML with another rotation, opened anew: the value is a miss, once corrupt."""
    cfg = rs.load_config("quickstart.yaml")
    change = f"layer_groups.{cfg.layers[0].group}.rope.theta=20000.0"
    other = rs.load_config("quickstart.yaml", (change,))
    with rs.open_store(store_url, layout=cfg) as store:
        assert store.put(b"k", b"value")
        digest = store.layout
    with rs.open_store(store_url, layout=other) as store:
        assert store.layout != digest
        assert store.get(b"k") is None
        assert store.stats.corrupt == (store_url != "memory:")
        assert not store.contains(b"k")


@pytest.mark.parametrize("size", [0, 1, 3_128_352, 64 << 20])
def test_sizes(store_url, size):
    """Nothing, one byte, a V4.1-Flash slot, 64 MB: what was put comes back, also over a value of
    another size."""
    value = (b"0123456789abcdef" * (size // 16 + 1))[:size]  # whole runs, cut
    with rs.open_store(store_url, sync=False) as store:
        assert store.put(b"k", b"before")
        assert store.put(b"k", value)
        assert store.contains(b"k")
        assert store.get(b"k") == value
        assert store.delete(b"k")
        assert store.get(b"k") is None
        assert store.stats.bytes_out == size
