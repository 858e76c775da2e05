"""SIGKILL of the writing process: 20 times, or as often as RINGSLAB_STORE_KILLS says."""

import contextlib
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from store_cases import LAYOUT_A, end_with_parent, lmdb_faults

import ringslab as rs

KILLS = int(os.environ.get("RINGSLAB_STORE_KILLS", "20"))


def run_kills(url: str) -> dict:
    script = Path(__file__).with_name("store_kills.py")
    done = subprocess.run(
        [sys.executable, str(script), url, str(KILLS), "11"],
        capture_output=True,
        text=True,
        timeout=60 + 3 * KILLS,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_kills(url: str) -> None:
    seen = run_kills(url)
    print(seen)
    assert seen["faults"] == []
    assert seen["runs"] == KILLS
    assert seen["puts"] >= KILLS // 2  # they did write, and many died while they did
    assert seen["mid_put"] > KILLS // 4


def test_kill_while_writing_lmdb(tmp_path):
    """After each kill every key holds its last reported version or the one under way, whole; no
    value is damaged, and the directory opens again."""
    pytest.importorskip("lmdb")
    check_kills(f"lmdb:{tmp_path / 'store'}")


def test_kill_while_writing_redis(redis_server):
    """The same, the server living on."""
    check_kills(redis_server.url)


WORKER = """
    import random, sys
    from pathlib import Path
    from test_store_lmdb import small_map_store
    rng = random.Random(int(sys.argv[2]))
    with small_map_store(Path(sys.argv[1]), 1 << 18, budget_bytes=3_000_000) as store:
        for step in range(1 << 30):
            if step % 10 == 0:
                print(step, flush=True)
            n = rng.randrange(40)
            value = b"%02d" % n * (250, 35_000, 150_000, 4_000)[n % 4]
            store.put(b"%02d" % n, value)
            n = rng.randrange(40)
            value = b"%02d" % n * (250, 35_000, 150_000, 4_000)[n % 4]
            assert store.get(b"%02d" % n) in (None, value)
            if rng.random() < 0.1:
                store.delete(b"%02d" % rng.randrange(40))
            assert store.stats.errors == store.stats.corrupt == 0, store.stats
"""


def test_kill_among_other_processes(tmp_path):
    """Three processes write one LMDB store, in a map that begins at 256 kB; a random one is killed
    and replaced, again and again. The others take over its locks and see no fault; at the end the
    tables agree."""
    pytest.importorskip("lmdb")
    rng = random.Random(5)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path / "s")]
        command += [str(rng.randrange(1000))]
        env = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, preexec_fn=end_with_parent
        )

    def end(worker: subprocess.Popen) -> None:
        worker.kill()
        worker.wait()
        worker.stdout.close()

    workers = [start() for _ in range(3)]
    try:
        for _ in range(max(KILLS // 4, 1)):  # fewer: each start of a process takes longer
            worker = workers.pop(rng.randrange(3))
            assert worker.stdout.readline()  # it writes by now
            time.sleep(rng.uniform(0.0, 0.1))
            assert worker.poll() is None, "a worker met a fault"
            end(worker)
            workers.append(start())
        for worker in workers:
            assert worker.stdout.readline()
            assert worker.poll() is None, "a worker met a fault"
    finally:
        for worker in workers:
            end(worker)
    with rs.open_store(f"lmdb:{tmp_path / 's'}", layout=LAYOUT_A) as store:
        assert lmdb_faults(store.shelf) == []
        found = [n for n in range(40) if store.get(b"%02d" % n) is not None]
        assert found
        assert store.stats.corrupt == 0


PARENT = """
    import subprocess, sys
    from store_cases import end_with_parent
    child = subprocess.Popen(["sleep", "600"], preexec_fn=end_with_parent)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_test_run_leaves_no_child():
    """The parent is killed by SIGKILL: its child ends at once, though nobody told it."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        stat = Path("/proc", parent.stdout.readline().decode().strip(), "stat")
        assert ") Z " not in stat.read_text()
        parent.kill()
    end = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while ") Z " not in stat.read_text():  # a zombie waits for its new parent
            assert time.monotonic() < end, "the child outlived its parent by 10 s"
            time.sleep(0.01)
