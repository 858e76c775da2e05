"""The cubin cache: atomic, checked before use, survives corrupt, read-only and foreign directories,
and several processes at once. No compiler is needed: builds are bytes made here."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from ringslab.layouts.errors import KernelBuildError
from ringslab.rawkernels.device import cubin_cache
from ringslab.rawkernels.device.cubin_cache import cubin_key, open_cache
from ringslab.rawkernels.device.nvrtc import Build

KEY = cubin_key("source", {"a.cuh": "text"}, ("-DN=1", "--gpu-architecture=sm_80"), "13.0")
MADE = Build(b"\x7fELF" + bytes(range(256)) * 20, "ptxas info: Used 9 registers\n")


def never() -> Build:
    raise AssertionError("the entry is in the cache, nothing may be built")


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*.cubin")
    return found


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """The system's temporary folder, so that a fallback does not leave this test."""
    place = tmp_path / "tmp"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_a_build_is_made_once(folder):
    """Built once, then read: the same cubin and log in another cache object, with the counts 1
    build and 1 hit. The folder has mode 0700, the file 0600, and nothing else lies there."""
    first = open_cache(folder)
    assert first.get_or_build(KEY, lambda: MADE) == MADE
    second = open_cache(folder)
    assert second.get_or_build(KEY, never) == MADE
    assert (first.counters.builds, first.counters.hits) == (1, 0)
    assert (second.counters.builds, second.counters.hits) == (0, 1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert entry(folder).stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == [f"{KEY}.cubin"]


def test_the_key_holds_everything_that_decides_the_bytes():
    """Source, header names, header texts, each option and the compiler: each alone changes the
    key; the order in which headers are listed does not."""
    base = ("s", {"a": "1", "b": "2"}, ("-x",), "13.0")
    keys = {
        cubin_key(*base),
        cubin_key("t", *base[1:]),
        cubin_key("s", {"a": "1", "b": "3"}, *base[2:]),
        cubin_key("s", {"a": "1", "c": "2"}, *base[2:]),
        cubin_key("s", base[1], ("-y",), "13.0"),
        cubin_key("s", base[1], ("-x",), "13.1"),
    }
    assert len(keys) == 6
    assert cubin_key("s", {"b": "2", "a": "1"}, *base[2:]) == cubin_key(*base)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data[:60],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"ELF" + data,
        lambda data: data[:40] + bytes([data[40] ^ 0x80]) + data[41:],
    ],
    ids=["empty", "header", "cut", "short", "long", "flip", "shift", "digest"],
)
def test_a_damaged_entry_is_built_again(folder, damage):
    """Truncated, longer, shifted or with one bit flipped: counted as corrupt, built again and
    written over, so the next cache reads it."""
    open_cache(folder).get_or_build(KEY, lambda: MADE)
    entry(folder).write_bytes(damage(entry(folder).read_bytes()))
    cache = open_cache(folder)
    assert cache.get_or_build(KEY, lambda: MADE) == MADE
    assert (cache.counters.corrupt, cache.counters.builds) == (1, 1)
    assert open_cache(folder).get_or_build(KEY, never) == MADE


def test_an_entry_under_another_name_is_refused(folder):
    """A sound entry renamed to another key does not answer for that key."""
    open_cache(folder).get_or_build(KEY, lambda: MADE)
    other = cubin_key("another source", {}, (), "13.0")
    entry(folder).rename(folder / f"{other}.cubin")
    cache = open_cache(folder)
    mine = Build(b"mine", "log")
    assert cache.get_or_build(other, lambda: mine) == mine
    assert cache.counters.corrupt == 1


@pytest.mark.parametrize("plant", ["symlink", "directory", "fifo", "writable"])
def test_an_entry_that_is_no_private_file_is_not_read(folder, tmp_path, plant):
    """A link, a directory, a pipe, or a file that others may write, in place of the entry: built
    again, without hanging."""
    open_cache(folder).get_or_build(KEY, lambda: MADE)
    path = entry(folder)
    if plant == "writable":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        if plant == "symlink":
            path.symlink_to(tmp_path / "elsewhere")
        elif plant == "directory":
            path.mkdir()
        else:
            os.mkfifo(path)
    cache = open_cache(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a directory cannot be replaced: kept in memory
        assert cache.get_or_build(KEY, lambda: MADE) == MADE
        assert cache.get_or_build(KEY, never) == MADE
    assert cache.counters.corrupt == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_can_write_is_refused(folder, spare, mode):
    """Group or world may write: one warning that names the folder, its mode and the variable; the
    private folder below the temporary one is used instead."""
    folder.mkdir()
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=r"another user .*RINGSLAB_CACHE_DIR") as told:
        cache = open_cache(folder)
    assert len(told) == 1
    assert str(folder) in str(told[0].message)
    cache.get_or_build(KEY, lambda: MADE)
    assert list(folder.iterdir()) == []
    assert entry(spare / f"ringslab-{os.geteuid()}").exists()


def test_a_folder_of_another_user_is_refused(folder, spare, monkeypatch):
    """Owned by neither us nor root: refused like one that others may write."""
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1) if os.geteuid() == 0 else pytest.skip("needs root to chown")
    with pytest.warns(RuntimeWarning, match="owner 12345"):
        cache = open_cache(folder)
    assert cache.write_directory.parent == spare


def test_a_folder_that_cannot_be_made(tmp_path, spare, monkeypatch):
    """G01: the folder's parent is a file. One warning, then the temporary folder; with that one
    impossible too, memory, where a second call builds nothing."""
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be made") as told:
        cache = open_cache(tmp_path / "file" / "cache")
    assert len(told) == 1
    assert cache.write_directory.parent == spare

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="using memory"):
        cache = open_cache(tmp_path / "file" / "cache")
    assert cache.write_directory is None
    assert cache.get_or_build(KEY, lambda: MADE) == MADE
    assert cache.get_or_build(KEY, never) == MADE


def test_no_home_directory(spare, monkeypatch):
    """Path.home() raises where the user has none: a warning, then the temporary folder."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cubin_cache.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="home directory"):
        cache = open_cache()
    assert cache.write_directory.parent == spare


def test_a_read_only_folder_is_read_but_not_written(folder, spare, monkeypatch):
    """What is there is used; what is new goes to the temporary folder, after one warning."""
    open_cache(folder).get_or_build(KEY, lambda: MADE)
    real_access = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p != folder and real_access(p, mode))
    with pytest.warns(RuntimeWarning, match="not writable"):
        cache = open_cache(folder)
    assert cache.get_or_build(KEY, never) == MADE
    other = cubin_key("new", {}, (), "13.0")
    cache.get_or_build(other, lambda: MADE)
    assert not (folder / f"{other}.cubin").exists()
    with pytest.warns(RuntimeWarning):
        assert open_cache(folder).get_or_build(other, never) == MADE


def test_a_full_disk_is_counted_and_told_once(folder, monkeypatch):
    """Two failed writes: one warning, count 2, both builds answered from memory afterwards, and no
    temporary file left."""

    def full(*_):
        raise OSError(28, "No space left on device")

    cache = open_cache(folder)
    monkeypatch.setattr(os, "replace", full)
    keys = [cubin_key(name, {}, (), "13.0") for name in "ab"]
    with pytest.warns(RuntimeWarning, match="No space left"):
        cache.get_or_build(keys[0], lambda: MADE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.get_or_build(keys[1], lambda: MADE)
    assert cache.counters.store_failures == 2
    assert all(cache.get_or_build(key, never) == MADE for key in keys)
    assert list(folder.iterdir()) == []


def test_a_failed_build_leaves_nothing(folder):
    """The build's own error passes through; the folder stays empty and the next call builds."""

    def broken() -> Build:
        raise KernelBuildError("no")

    cache = open_cache(folder)
    with pytest.raises(KernelBuildError):
        cache.get_or_build(KEY, broken)
    assert list(folder.iterdir()) == []
    assert cache.get_or_build(KEY, lambda: MADE) == MADE


WORKER = """
import sys
from pathlib import Path
from ringslab.rawkernels.device.cubin_cache import cubin_key, open_cache
from ringslab.rawkernels.device.nvrtc import Build
cache = open_cache(Path(sys.argv[1]))
for turn in range(40):
    key = cubin_key(str(turn % 4), {}, (), "13.0")
    made = Build(bytes([turn % 4]) * 200_000, str(turn % 4))
    if turn % 8 == 7:
        (Path(sys.argv[1]) / f"{key}.cubin").unlink(missing_ok=True)
    assert cache.get_or_build(key, lambda: made) == made, turn
print(cache.counters.corrupt, cache.counters.store_failures)
"""


def test_processes_that_build_at_once(folder, tmp_path):
    """Four processes write, read and delete the same four entries of 200 kB, 40 times each: every
    answer is right and no reader ever meets a partial file."""
    search = os.pathsep.join(filter(None, sys.path))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder)],
            env={**os.environ, "PYTHONPATH": search},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [worker.communicate(timeout=120)[0].strip() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert outputs == ["0 0"] * 4
