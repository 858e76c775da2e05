"""Redis: a server that is away, silent, full, or comes back; addresses; many threads."""

import socket
import threading
import time
import warnings
from contextlib import contextmanager

import pytest
from store_cases import LAYOUT_A, RedisServer, redis_problem

import ringslab as rs
from ringslab.engine.store_redis import FIRST_PAUSE_S, MAX_PAUSE_S, RedisShelf, check_redis_url
from ringslab.engine.store_stats import ShelfFault, StoreStats
from ringslab.errors import ArgumentError, StoreError

needs_redis = pytest.mark.skipif(redis_problem() is not None, reason=redis_problem() or "")


@pytest.fixture
def own_redis(tmp_path):
    """A redis-server that a test may stop and start."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@contextmanager
def recorded():
    """All warnings of a block, in a list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def wait_until(what, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.02)
    return False


@needs_redis
def test_a_server_that_goes_and_comes_back(own_redis):
    """Killed: every call is a miss or False, 500 of them in well under the time that 500 timeouts
    would take, with one warning. Started again: the store finds it by itself, and a second outage
    warns again."""
    with rs.open_store(own_redis.url, layout=LAYOUT_A) as store, recorded() as caught:
        assert store.put(b"k", b"v")
        for outage in (1, 2):
            own_redis.stop()
            before = store.stats.as_dict()
            start = time.monotonic()
            for _ in range(100):
                assert store.get(b"k") is None
                assert not store.put(b"k", b"v")
                assert not store.contains(b"k")
                assert not store.delete(b"k")
            assert time.monotonic() - start < 20
            after = store.stats.as_dict()
            assert after["errors"] - before["errors"] == 400
            assert after["misses"] - before["misses"] == 100
            assert [w.category for w in caught] == [RuntimeWarning] * outage
            own_redis.start()
            assert wait_until(lambda: store.put(b"k", b"v2"), MAX_PAUSE_S + 10)
            assert store.get(b"k") == b"v2"
        assert store.stats.corrupt == 0


@needs_redis
def test_a_restart_between_calls_is_not_seen(own_redis):
    """The kept connection is cut by a restart: the next call makes a new one, without an error."""
    with rs.open_store(own_redis.url) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put(b"k", b"v")
        own_redis.stop()
        own_redis.start()
        assert store.get(b"k") is None  # nothing is persisted by this server
        assert store.put(b"k", b"v")
        assert store.stats.errors == 0


def serve(answer: bytes | None) -> tuple[str, socket.socket]:
    """A server that is no Redis: it answers every connection with these bytes, or never."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def work() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            kept.append(client)
            if answer is not None:
                client.sendall(answer)

    threading.Thread(target=work, daemon=True).start()
    return f"redis://127.0.0.1:{listener.getsockname()[1]}/0", listener


@pytest.mark.parametrize(
    "answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"\0\xff"]
)
def test_a_server_that_is_no_redis(answer):
    """One that never answers, and three that answer other bytes: misses with one warning, each call
    bounded by the time out of 0.2 s, and most of them immediate."""
    pytest.importorskip("redis")
    url, listener = serve(answer)
    with listener, rs.open_store(url, timeout_s=0.2) as store, recorded() as caught:
        longest = 0.0
        for _ in range(50):
            start = time.monotonic()
            assert store.get(b"k") is None
            longest = max(longest, time.monotonic() - start)
            assert not store.put(b"k", b"v")
        assert store.stats.errors == 100
        assert len(caught) == 1
        assert longest < 5.0  # 0.2 s on a machine that is not busy


@needs_redis
def test_a_full_server(own_redis):
    """maxmemory reached: puts are False and counted with one warning; gets go on, and after the
    bound is lifted puts do too, at once (the server was never away)."""
    with rs.open_store(own_redis.url) as store, recorded() as caught:
        with own_redis.client() as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used + (4 << 20))
            stored = [n for n in range(40) if store.put(b"%d" % n, bytes([n]) * 300_000)]
            assert 5 < len(stored) < 20
            assert all(store.get(b"%d" % n) == bytes([n]) * 300_000 for n in stored)
            assert store.stats.errors == 40 - len(stored)
            client.config_set("maxmemory", 0)
        assert store.put(b"39", b"v")
    assert ["maxmemory" in str(w.message) for w in caught] == [True]


def test_threads_that_lose_the_server_at_once_pause_once():
    """Four calls are under way when the server stops answering: the pause is the first one, 0.1 s,
    as for one call, and a later loss doubles it."""
    pytest.importorskip("redis")
    shelf = RedisShelf("redis://127.0.0.1:1/0", StoreStats(), timeout_s=0.1)
    met = threading.Barrier(4)

    def lose():
        met.wait(10)
        raise shelf.redis.TimeoutError("no answer")

    def call():
        with pytest.raises(ShelfFault):
            shelf._call(lose)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shelf._pause_s == FIRST_PAUSE_S
        met = threading.Barrier(1)
        assert wait_until(lambda: time.monotonic() > shelf._retry_at)
        call()
        assert shelf._pause_s == 2 * FIRST_PAUSE_S


@needs_redis
def test_a_password(own_redis):
    """A wrong password: misses, and the warning shows the address without it; the right one
    works."""
    with own_redis.client() as client:
        client.config_set("requirepass", "s3cret")
    wrong = own_redis.url.replace("//", "//:wr0ng@")
    with (
        rs.open_store(wrong) as store,
        pytest.warns(RuntimeWarning, match="(?i)password") as caught,
    ):
        assert store.get(b"k") is None
    assert "wr0ng" not in str(caught[0].message)
    with rs.open_store(own_redis.url.replace("//", "//:s3cret@")) as store:
        assert store.put(b"k", b"v")


@needs_redis
def test_a_unix_socket_and_a_database(redis_server):
    """unix://PATH?db=3 and redis://.../3 are the same place, another database is another."""
    with rs.open_store(f"unix://{redis_server.socket_path}?db=3") as store:
        assert store.put(b"k", b"v")
    with rs.open_store(redis_server.url.replace("/0", "/3")) as store:
        assert store.get(b"k") == b"v"
    with rs.open_store(redis_server.url) as store:
        assert store.get(b"k") is None
        assert store.stats.errors == 0


@needs_redis
def test_a_server_killed_under_8_threads(own_redis):
    """8 threads put and get values of 1.5 MB while the server is killed and started: no exception,
    no wrong value, and it works at the end."""
    bad, stop = [], threading.Event()
    with rs.open_store(own_redis.url) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def work(n: int) -> None:
            value = bytes([n]) * 1_500_000
            try:
                while not stop.is_set():
                    store.put(b"%d" % n, value)
                    if store.get(b"%d" % n) not in (None, value):
                        bad.append(n)
            except Exception as error:
                bad.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.15)
            own_redis.stop()
            own_redis.start()
        stop.set()
        for thread in threads:
            thread.join()
        assert bad == []
        assert wait_until(lambda: store.put(b"k", b"v"), MAX_PAUSE_S + 10)
        assert store.stats.corrupt == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://h", "redis://h:6379/0"),
        ("redis://h/", "redis://h:6379/0"),
        ("redis://user:pw@h:1/2", "redis://h:1/2"),
        ("rediss://:pw@[::1]:1/2", "rediss://[::1]:1/2"),
        ("unix:///a/b.sock", "unix:///a/b.sock?db=0"),
        ("unix:///a/b.sock?db=3", "unix:///a/b.sock?db=3"),
    ],
)
def test_addresses(url, shown):
    """What is shown of an address has no user and no password."""
    assert check_redis_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis:///0",
        "redis://h:port/0",
        "redis://h:99999/0",
        "redis://h:1/x",
        "redis://h:1/-1",
        "redis://h:1/0/1",
        "redis://h:1/0?socket_timeout=99",
        "redis://h:1/0#x",
        "redis://u:secret@h:1/x",
        "unix://",
        "unix:///a?db=x",
        "unix:///a?password=secret",
    ],
)
def test_addresses_that_are_refused(url):
    """An ArgumentError, not another database or another time out, and no password in it."""
    with pytest.raises(ArgumentError) as caught:
        rs.open_store(url)
    assert "secret" not in str(caught.value)


def test_without_the_client(monkeypatch):
    """No redis package: a StoreError that says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(StoreError, match="pip install"):
        rs.open_store("redis://127.0.0.1:1/0")


@pytest.mark.parametrize("kw", [{"budget_bytes": 5}, {"timeout_s": 0}, {"timeout_s": "1"}])
def test_options_that_are_refused(kw):
    """A server bounds its own memory; a time out is a positive number."""
    with pytest.raises(ArgumentError):
        rs.open_store("redis://127.0.0.1:1/0", **kw)
