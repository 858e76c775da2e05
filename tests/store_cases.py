"""What the tests of the stores share: layouts, and a Redis server of their own."""

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

LAYOUT_A, LAYOUT_B = b"A" * 16, b"B" * 16


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
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
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
