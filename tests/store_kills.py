"""Kills writers at random points: `python store_kills.py URL RUNS SEED`, a process of its own.

Each run forks a writer, which opens the store and puts versions of a few keys, of 0 to 1.5 MB, and
reports each put that returned True. It is killed by SIGKILL after a random time, from its start or
from its first report. Then the store is opened here and every key is read: it must hold the last
reported version, or the one whose put was under way. Prints what it saw, as JSON.
"""

import json
import os
import random
import select
import signal
import sys
import time

from store_cases import end_with_parent, lmdb_faults

from ringslab.engine.store import open_store

LAYOUT = b"K" * 16
NUM_KEYS = 6
SIZES = (0, 100, 4_000, 70_752, 300_000, 1_415_040)


def key_of(n: int) -> bytes:
    return b"kill-%d" % n


def value_of(n: int, version: int) -> bytes:
    rng = random.Random(n << 32 | version)
    size = rng.choice(SIZES)
    return (b"%d,%d;" % (n, version) + rng.randbytes(61)) * (size // 64 + 1)  # about that size


def write_until_killed(url: str, versions: list[int], seed: int, pipe: int) -> None:
    """Reports 8 bytes before each put (begun) and 8 after it (stored): key, version."""
    rng = random.Random(seed)
    with open_store(url, layout=LAYOUT) as store:
        while True:
            n = rng.randrange(NUM_KEYS)
            versions[n] += 1
            value = value_of(n, versions[n])
            report = n.to_bytes(3, "little") + versions[n].to_bytes(4, "little")
            os.write(pipe, b"b" + report)
            if rng.random() < 0.1:
                store.get(key_of(rng.randrange(NUM_KEYS)))
            if store.put(key_of(n), value):
                os.write(pipe, b"s" + report)


def one_run(url: str, last: list[int], stored: list[int], rng: random.Random) -> dict[int, int]:
    """Starts a writer and kills it. Updates the last version begun and the last one stored of each
    key; gives the put that was under way, as {key: version}, or nothing."""
    reading, writing = os.pipe()
    seed = rng.randrange(1 << 30)
    child = os.fork()
    if child == 0:
        try:
            end_with_parent()
            os.close(reading)
            write_until_killed(url, list(last), seed, writing)
        finally:
            os._exit(1)
    os.close(writing)
    if rng.random() < 0.75:
        select.select([reading], [], [], 30)  # so many runs die while writing, the rest earlier
    time.sleep(rng.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    reports = b""
    while part := os.read(reading, 1 << 16):
        reports += part
    os.close(reading)
    under_way: dict[int, int] = {}
    for at in range(0, len(reports), 8):
        n = int.from_bytes(reports[at + 1 : at + 4], "little")
        version = int.from_bytes(reports[at + 4 : at + 8], "little")
        last[n] = version
        if reports[at : at + 1] == b"b":
            under_way = {n: version}
        else:
            stored[n], under_way = version, {}
    return under_way


def check(url: str, stored: list[int], under_way: dict[int, int], faults: list[str]) -> None:
    """Reads every key: it holds its stored version; that of the put under way may be there too,
    and then counts as stored."""
    with open_store(url, layout=LAYOUT) as store:
        for n in range(NUM_KEYS):
            value = store.get(key_of(n))
            if n in under_way and value == value_of(n, under_way[n]):
                stored[n] = under_way[n]
            elif value != (value_of(n, stored[n]) if stored[n] else None):
                size = None if value is None else len(value)
                faults.append(f"key {n}: {size} bytes are not version {stored[n]}; {under_way}")
        if store.stats.corrupt or store.stats.errors:
            faults.append(f"{store.stats}")
        if url.startswith("lmdb:"):
            faults += lmdb_faults(store.shelf)


def main(url: str, runs: int, seed: int) -> None:
    rng = random.Random(seed)
    last, stored, faults = [0] * NUM_KEYS, [0] * NUM_KEYS, []
    mid_put = landed = 0
    for _ in range(runs):
        under_way = one_run(url, last, stored, rng)
        before = list(stored)
        check(url, stored, under_way, faults)
        mid_put += len(under_way)
        landed += before != stored
    seen = {"runs": runs, "puts": sum(last), "mid_put": mid_put, "landed": landed}
    print(json.dumps(seen | {"faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
