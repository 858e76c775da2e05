"""LMDB: growth, other processes, damage of the file, a full disk."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from store_cases import LAYOUT_A, lmdb_faults

import ringslab as rs
from ringslab.engine.store import Store
from ringslab.engine.store_lmdb import LmdbShelf
from ringslab.engine.store_stats import StoreStats
from ringslab.errors import StoreError

pytest.importorskip("lmdb")


def small_map_store(path: Path, map_bytes: int, budget_bytes: int | None = None) -> Store:
    stats = StoreStats()
    shelf = LmdbShelf(str(path), budget_bytes, stats, sync=False, map_bytes=map_bytes)
    return Store(shelf, LAYOUT_A, stats)


def run_script(code: str, *args: str, prefix: tuple[str, ...] = (), ok: bool = True) -> str:
    """Runs Python code with the tests' modules at hand; its stdout."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *args]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0 or not ok, done.stderr
    return done.stdout


def test_without_lmdb(tmp_path, monkeypatch):
    """No lmdb: a StoreError that says what to install, and no directory is made."""
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(StoreError, match="pip install lmdb"):
        rs.open_store(f"lmdb:{tmp_path / 's'}")
    assert not (tmp_path / "s").exists()


def test_an_old_lmdb_is_refused(tmp_path, monkeypatch):
    """2.2.0 of the binding: a StoreError that names both versions."""
    import lmdb

    monkeypatch.setattr(lmdb, "__version__", "2.2.0")
    with pytest.raises(StoreError, match=r"2\.2\.0 .*lmdb>=3"):
        rs.open_store(f"lmdb:{tmp_path / 's'}")


def test_opened_twice_in_one_process(tmp_path):
    """The second is a StoreError that says so, the first goes on; after its close it opens."""
    url = f"lmdb:{tmp_path / 's'}"
    with rs.open_store(url) as store:
        with pytest.raises(StoreError, match="already open"):
            rs.open_store(url)
        assert store.put(b"k", b"v")
    with rs.open_store(url) as store:
        assert store.get(b"k") == b"v"


def test_the_map_grows(tmp_path):
    """A map of 256 kB takes 30 values of 300 kB, from 4 threads that read meanwhile: none fails."""
    bad = []
    with small_map_store(tmp_path / "s", 1 << 18) as store:

        def work(first: int) -> None:
            for n in range(first, 30, 4):
                if not store.put(b"%d" % n, bytes([n]) * 300_000):
                    bad.append(("put", n))
                for m in range(30):
                    if store.get(b"%d" % m) not in (None, bytes([m]) * 300_000):
                        bad.append(("get", m))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert bad == []
        assert store.stats.errors == 0
        assert all(store.get(b"%d" % n) == bytes([n]) * 300_000 for n in range(30))
        assert store.shelf.map_bytes > 30 * 300_000
        assert lmdb_faults(store.shelf) == []


GROWER = """
    import sys
    from pathlib import Path
    from test_store_lmdb import small_map_store
    with small_map_store(Path(sys.argv[1]), 1 << 18) as store:
        for n in range(int(sys.argv[2]), int(sys.argv[3])):
            assert store.put(b"%d" % n, bytes([n]) * 300_000), store.stats
        assert store.stats.errors == 0
"""


def test_the_map_grows_in_another_process(tmp_path):
    """Another process grows the map from 256 kB to hold 20 values; this one, opened before, reads
    them and writes on."""
    with small_map_store(tmp_path / "s", 1 << 18) as store:
        assert store.put(b"99", bytes([99]) * 300_000)
        run_script(GROWER, str(tmp_path / "s"), "0", "20")
        assert all(store.get(b"%d" % n) == bytes([n]) * 300_000 for n in range(20))
        assert store.put(b"20", b"v")
        assert store.stats.errors == 0


WORKER = """
    import random, sys
    import ringslab as rs
    rng = random.Random(int(sys.argv[2]))
    with rs.open_store("lmdb:" + sys.argv[1], budget_bytes=600_000, sync=False) as store:
        for _ in range(150):
            n = rng.randrange(60)
            assert store.put(b"%02d" % n, b"%02d" % n * 10_000)
            n = rng.randrange(60)
            assert store.get(b"%02d" % n) in (None, b"%02d" % n * 10_000)
            if rng.random() < 0.1:
                store.delete(b"%02d" % rng.randrange(60))
        assert store.stats.errors == store.stats.corrupt == 0, store.stats
        print(store.stats.evicted)
"""


def test_four_processes_at_once(tmp_path):
    """Four processes put, read and delete the same 60 keys within room for 29: no error, no wrong
    value, and the four tables agree at the end and keep the budget."""
    outs: list[str] = []
    runs = [
        threading.Thread(target=lambda n=n: outs.append(run_script(WORKER, str(tmp_path / "s"), n)))
        for n in "1234"
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(outs) == 4
    assert sum(map(int, outs)) > 50
    with rs.open_store(f"lmdb:{tmp_path / 's'}") as store:
        assert lmdb_faults(store.shelf) == []
        found = [n for n in range(60) if store.get(b"%02d" % n) == b"%02d" % n * 10_000]
        assert 20 <= len(found) <= 29


HOLDER = """
    import sys
    import ringslab as rs
    with rs.open_store("lmdb:" + sys.argv[1]) as store, store.shelf._env.begin(write=True):
        print("held", flush=True)
        sys.stdin.readline()
"""


def test_gets_go_on_while_another_process_writes(tmp_path):
    """Another process sits in a write transaction: a put by the thread waits for it, gets do not;
    when it ends, the put is stored."""
    url = f"lmdb:{tmp_path / 's'}"
    with rs.open_store(url, queue_bytes=1 << 20) as store:
        assert store.put(b"k", b"v")
        assert store.flush()
        command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "s")]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
            assert holder.stdout.readline() == b"held\n"
            assert store.put(b"k2", b"v2")
            assert not store.flush(timeout_s=0.2)
            assert store.get(b"k") == b"v"
            assert store.get(b"k2") == b"v2"
            holder.communicate(b"\n")
        assert store.flush()
        assert store.stats.puts == 2


FORK = """
    import os, sys, gc
    import ringslab as rs
    from ringslab.errors import StoreError
    store = rs.open_store("lmdb:" + sys.argv[1], queue_bytes=1 << 20)
    store.put(b"k", b"v")
    child = os.fork()
    if child == 0:
        try:
            store.get(b"k")
        except StoreError as error:
            assert "fork" in str(error)
            store.close()
            del store
            gc.collect()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert store.flush() and store.store.get(b"k") == b"v" and store.put(b"k", b"w")
    store.close()
    with rs.open_store("lmdb:" + sys.argv[1]) as store:
        assert store.get(b"k") == b"w"
"""


def test_a_forked_child_is_told(tmp_path):
    """A child's get is a StoreError, its close leaves the parent's store alone, which goes on."""
    run_script(FORK, str(tmp_path / "s"))


FULL = """
    import json, os, resource, sys, warnings
    import ringslab as rs
    limit, path = int(sys.argv[1]), sys.argv[2]
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with rs.open_store("lmdb:" + path) as store:
            stored = [n for n in range(60) if store.put(b"%d" % n, bytes([n]) * 200_000)]
            refused = store.stats.errors
            whole = [n for n in stored if store.get(b"%d" % n) == bytes([n]) * 200_000]
            freed = all(store.delete(b"%d" % n) for n in stored[:5])
            again = store.put(b"again", bytes(200_000))
            errors = store.stats.errors
    with rs.open_store("lmdb:" + path) as store:
        later = [n for n in stored[5:] if store.get(b"%d" % n) == bytes([n]) * 200_000]
        later_again = store.get(b"again") == bytes(200_000)
    print(json.dumps([len(stored), refused, whole == stored, freed, again, errors,
                      later == stored[5:], later_again, len(caught)]))
"""


def check_full(seen: list) -> None:
    stored, refused, whole, freed, again, errors, later, later_again, warned = seen
    assert 15 <= stored <= 45
    assert refused == 60 - stored == errors
    assert whole
    assert freed
    assert again
    assert later
    assert later_again
    assert warned == 1


def test_a_file_that_may_not_grow(tmp_path):
    """A file size limit of 8 MB and 60 values of 200 kB: the puts above it are False and counted,
    with one warning; what was stored is whole, and after deletes there is room again."""
    check_full(json.loads(run_script(FULL, str(8 << 20), str(tmp_path / "s"))))


def test_a_full_disk(tmp_path):
    """The same on a disk of 8 MB (a tmpfs of its own, where the kernel lets us mount one)."""
    enter = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=8m t {tmp_path} && exec "$@"')
    if (
        shutil.which("unshare") is None
        or subprocess.run([*enter, "sh", "true"], capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a tmpfs")
    check_full(json.loads(run_script(FULL, "0", str(tmp_path / "s"), prefix=(*enter, "sh"))))


TRUNCATED = """
    import sys, warnings
    import ringslab as rs
    from ringslab.errors import StoreError
    warnings.simplefilter("ignore")
    try:
        store = rs.open_store("lmdb:" + sys.argv[1])
    except StoreError:
        print("refused")
        sys.exit()
    with store:
        for n in range(100):
            assert store.get(b"%d" % n) in (None, bytes([n]) * 9_000), n
        stats = store.stats
        assert stats.misses <= stats.corrupt + stats.errors  # removing may fail too
        print("opened", stats.hits)
"""


def test_a_file_cut_off_at_any_place(tmp_path):
    """The data file cut at 6 places: the process is not killed (reading past the end of a mapped
    file is a SIGBUS); values are whole or missing, or the store refuses to open."""
    path = tmp_path / "s"
    with rs.open_store(f"lmdb:{path}", sync=False) as store:
        for n in range(100):
            assert store.put(b"%d" % n, bytes([n]) * 9_000)
    data = (path / "data.mdb").read_bytes()
    seen = []
    for cut in range(1, 7):
        (path / "data.mdb").write_bytes(data[: len(data) * cut // 7])  # any place will do
        seen.append(run_script(TRUNCATED, str(path)).split()[0])
    assert set(seen) <= {"opened", "refused"}


def test_a_file_that_is_not_lmdbs(tmp_path):
    """Other bytes in data.mdb: a StoreError that names the directory and says what to do."""
    path = tmp_path / "s"
    path.mkdir(0o700)
    (path / "data.mdb").write_bytes(b"not a database" * 1000)
    (path / "data.mdb").chmod(0o600)
    with pytest.raises(StoreError, match="must be removed"):
        rs.open_store(f"lmdb:{path}")


def test_it_reopens_after_a_panic(tmp_path, monkeypatch):
    """After a failed write of its own pages LMDB refuses all work: the environment is opened again,
    by the next call where that fails at first, and the call goes through."""
    with rs.open_store(f"lmdb:{tmp_path / 's'}") as store:
        assert store.put(b"k", b"v")
        real = store.shelf._env

        class Panicked:
            def __getattr__(self, name):
                return getattr(real, name)

            def begin(self, **kw):
                raise store.shelf.lmdb.PanicError("MDB_PANIC")

        store.shelf._env = Panicked()
        monkeypatch.setattr(store.shelf, "_prepare", lambda: (_ for _ in ()).throw(OSError("full")))
        with pytest.warns(RuntimeWarning, match="full"):
            assert store.get(b"k") is None
        monkeypatch.undo()
        assert store.get(b"k") == b"v"
        assert store.put(b"k", b"w")
        assert store.stats.errors == 1


def test_readers_of_killed_processes_are_cleared(tmp_path):
    """A process that is killed inside a read transaction leaves a reader's slot behind; the next
    opening clears it, so that old pages are used again."""
    code = """
        import os, signal, sys
        import ringslab as rs
        store = rs.open_store("lmdb:" + sys.argv[1])
        store.put(b"k", b"v")
        txn = store.shelf._env.begin()
        txn.get(b"k", db=store.shelf._values)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run_script(code, str(tmp_path / "s"), ok=False)
    with rs.open_store(f"lmdb:{tmp_path / 's'}") as store:
        assert store.get(b"k") == b"v"
        assert store.shelf._env.reader_check() == 0
        assert store.shelf._env.info()["num_readers"] <= 2
