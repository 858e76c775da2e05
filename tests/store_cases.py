"""What the tests of the stores share: layouts, a Redis server of their own, and children that end
with the tests."""

import contextlib
import ctypes
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

LAYOUT_A, LAYOUT_B = b"A" * 16, b"B" * 16


def end_with_parent() -> None:
    """In a child, as Popen's `preexec_fn` or after a fork: the kernel kills it when its parent's
    thread ends, so a test run that is killed leaves no writer and no server behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def redis_problem() -> str | None:
    """Why a Redis server cannot be used here, or None."""
    try:
        import redis  # noqa: F401
    except ImportError as error:
        return f"no Redis client: {error}"
    if shutil.which("redis-server") is None:
        return "no redis-server on PATH: apt-get install redis-server"
    return None


class RedisServer:
    """A redis-server on a free port of this machine, its files in `folder`, nothing persisted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.socket_path = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self, *options: str) -> None:
        import redis

        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self.folder), *options]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < end, "redis-server did not answer in 20 s"
            time.sleep(0.01)

    def client(self):
        """A plain client, to look at and to damage what is stored."""
        import redis

        return redis.Redis(port=self.port, socket_timeout=10)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def lmdb_faults(shelf) -> list[str]:
    """What does not agree between the four tables of an LMDB shelf."""
    faults = []
    with shelf._env.begin() as txn:
        values = dict(txn.cursor(db=shelf._values))
        index = {key: struct.unpack("<QQ", entry) for key, entry in txn.cursor(db=shelf._index)}
        order = {struct.unpack(">Q", turn)[0]: key for turn, key in txn.cursor(db=shelf._turns)}
        used = txn.get(b"used", db=shelf._totals)
    if index.keys() != values.keys():
        faults.append(f"index has {len(index)} keys, values {len(values)}")
    if order != {turn: key for key, (turn, _) in index.items()}:
        faults.append("order is not the index by turn")
    sizes = {key: len(key) + len(sealed) for key, sealed in values.items()}
    if sizes != {key: size for key, (_, size) in index.items()}:
        faults.append("index has other sizes than the values")
    if struct.unpack("<Q", used or bytes(8))[0] != sum(sizes.values()):
        faults.append(f"used is {used}, values take {sum(sizes.values())}")
    return faults
