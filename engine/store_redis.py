"""A shelf on a server that speaks Redis's protocol, shared by many machines.

A server that cannot be reached costs one bounded wait; then, for a pause that doubles up to five
seconds, every call fails at once, and one call after each pause tries the server again.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from ..layouts.errors import ArgumentError, StoreError
from .store_seal import Sealed
from .store_stats import Outage, ShelfFault, StoreStats

KEY_PREFIX = b"ringslab:"  # other programs may keep keys in the same database
MAX_SEALED_BYTES = 512 << 20  # the protocol's bound for one string
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0
READ_BYTES = 1 << 18  # of one read from the socket

Result = TypeVar("Result")


class RedisShelf:
    """Sealed values on a Redis server; its memory bound and its durability are its own settings."""

    budget_bytes = None
    max_sealed_bytes = MAX_SEALED_BYTES

    def __init__(self, url: str, stats: StoreStats, *, timeout_s: float) -> None:
        self.shown = check_redis_url(url)
        try:
            import redis
        except ImportError as error:
            raise StoreError(f"{self.shown}: {error}; pip install 'ringslab[redis]'") from None
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.redis, self.stats = redis, stats
        self.outage = Outage(self.shown)
        self._lock = threading.Lock()
        self._pause_s = 0.0  # 0: the server answered last time
        self._retry_at = 0.0
        self._client = redis.Redis.from_url(
            url,
            protocol=2,  # no greeting that an older server would refuse
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_read_size=READ_BYTES,
            retry=Retry(NoBackoff(), 0),  # `_call` has its own
        )

    def fetch(self, key: bytes) -> bytes | None:
        return self._call(lambda: self._client.get(KEY_PREFIX + key))

    def head(self, key: bytes, num_bytes: int) -> tuple[bytes, int] | None:
        def look() -> tuple[bytes, int] | None:
            pipe = self._client.pipeline(transaction=True)
            pipe.getrange(KEY_PREFIX + key, 0, max(num_bytes - 1, 0))
            pipe.strlen(KEY_PREFIX + key)
            first, total = pipe.execute()
            return (first, total) if total else None  # no sealed value is empty

        return self._call(look)

    def place(self, items: Sequence[tuple[bytes, Sealed]]) -> None:
        for key, sealed in items:  # a server commits each anyway
            self._call(lambda key=key, sealed=sealed: self._client.set(KEY_PREFIX + key, sealed))

    def remove(self, key: bytes, seen: Sealed | None = None) -> bool:
        name = KEY_PREFIX + key
        if seen is None:
            return self._call(lambda: self._client.delete(name)) > 0

        def remove_seen() -> bool:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.watch(name)
                if pipe.get(name) != seen:
                    return False
                pipe.multi()
                pipe.delete(name)
                try:
                    return pipe.execute()[0] > 0
                except self.redis.WatchError:  # replaced between the look and the removal
                    return False

        return self._call(remove_seen)

    def close(self) -> None:
        self._client.close()

    def _call(self, work: Callable[[], Result]) -> Result:
        """work() on the server, or ShelfFault. Repeating any of our commands does no harm."""
        pause_s = self._wait_out()
        try:
            result = self._twice(work)
        except self.redis.ResponseError as error:  # it answered: full, read-only, another type
            self._answered()
            raise self.outage.fault(str(error)) from None
        except (self.redis.RedisError, OSError) as error:
            raise self._away(error, pause_s) from None
        self._answered()
        self.outage.over()
        return result

    def _twice(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except self.redis.ConnectionError:
            if self._pause_s > 0:
                raise
        # A kept connection may have been cut long ago, by a restart: a new one tells.
        self._client.connection_pool.disconnect(inuse_connections=False)
        return work()

    def _wait_out(self) -> float:
        """The last pause, 0 where the server answered. Raises ShelfFault during a pause; after it,
        for all calls but the one that tries."""
        with self._lock:
            if self._pause_s == 0.0:
                return 0.0
            now = time.monotonic()
            if now < self._retry_at:
                raise ShelfFault(f"{self.shown}: away, tried again in {self._retry_at - now:.2f} s")
            self._retry_at = now + self._pause_s
            return self._pause_s

    def _away(self, error: Exception, pause_s: float) -> ShelfFault:
        """The fault of a call that began after a pause of `pause_s`. Of several threads that lose
        the server at once, the first one to notice makes the pause."""
        with self._lock:
            if self._pause_s == pause_s:
                self._pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
                # Many clients lost the server at the same moment; they come back at different ones.
                self._retry_at = time.monotonic() + self._pause_s * random.uniform(0.75, 1.0)
        return self.outage.fault(f"{type(error).__name__}: {error}")

    def _answered(self) -> None:
        with self._lock:
            self._pause_s = 0.0


def check_redis_url(url: str) -> str:
    """The address without user and password, for messages.

    Raises ArgumentError unless it is `redis://HOST:PORT/DB`, `rediss://HOST:PORT/DB` (TLS), both
    with an optional `USER:PASSWORD@`, or `unix://PATH`, with an optional `?db=N`.
    """
    wanted = "must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://PATH?db=N"
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError:
        raise ArgumentError(
            f"store address: the port is no number up to 65535; it {wanted}"
        ) from None
    if parts.scheme == "unix":
        name, _, number = parts.query.partition("=")
        if (
            not parts.path
            or parts.fragment
            or (parts.query and (name, number.isdigit()) != ("db", True))
        ):
            raise ArgumentError(f"store address unix://{parts.path}: it {wanted}")
        return f"unix://{parts.path}?db={number or 0}"
    database = parts.path.removeprefix("/")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    shown = f"{parts.scheme}://{host}:{port}/{database or 0}"
    if not parts.hostname or parts.query or parts.fragment or not (database or "0").isdigit():
        raise ArgumentError(f"store address {shown}: it {wanted}")
    return shown
