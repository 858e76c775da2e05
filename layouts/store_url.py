"""Addresses of a prefix cache's store."""

from typing import Literal

StoreKind = Literal["memory", "lmdb", "redis"]
STORE_URLS = "memory:, lmdb:PATH or redis://HOST:PORT/DB"


def store_kind(url: str) -> StoreKind | None:
    """What lies at an address, which need not be there; None where it is none of ours."""
    if url == "memory:":
        return "memory"
    if url.startswith("lmdb:") and url != "lmdb:":
        return "lmdb"
    if url.startswith(("redis://", "rediss://", "unix://")):
        return "redis"
    return None
