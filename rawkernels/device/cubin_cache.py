"""Cubins on disk, so that a kernel is compiled once a machine and not once a process.

An entry is a file named by its key: magic line, SHA-256 of all that follows, the key, the length of
the compiler's log, the log, the cubin. It is written to a temporary file and renamed, so a reader
sees all of it or nothing, and processes that build the same kernel at once do not disturb each
other. The checksum is verified over the very bytes that are then loaded: a corrupt, truncated or
foreign file is built again and counted.
"""

import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .nvrtc import Build

DIRECTORY_VARIABLE = "RINGSLAB_CACHE_DIR"
_MAGIC = b"ringslab cubin 1\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


@dataclass
class CacheCounters:
    """What a cache did in this process."""

    hits: int = 0
    builds: int = 0
    corrupt: int = 0  # entries that were there and could not be trusted
    store_failures: int = 0


@dataclass
class CubinCache:
    """`directories` are read in order; `write_directory` is one of them, or None: memory only."""

    directories: tuple[Path, ...]
    write_directory: Path | None
    memory: dict[str, Build] = field(default_factory=dict)
    counters: CacheCounters = field(default_factory=CacheCounters)

    def get_or_build(self, key: str, build: Callable[[], Build]) -> Build:
        """The build of a key, from memory, from disk, or made now and kept."""
        found = self.memory.get(key) or self._read(key)
        if found is not None:
            self.counters.hits += 1
            return found
        made = build()
        self.counters.builds += 1
        self._store(key, made)
        return made

    def _read(self, key: str) -> Build | None:
        for directory in self.directories:
            data = _read_trusted(directory / f"{key}.cubin")
            found = _decode_entry(key, data) if data else None
            if found is not None:
                return found
            if data is not None:
                self.counters.corrupt += 1
        return None

    def _store(self, key: str, made: Build) -> None:
        if self.write_directory is None:
            self.memory[key] = made
            return
        try:
            _write_atomic(self.write_directory, f"{key}.cubin", _encode_entry(key, made))
        except OSError as error:
            self.counters.store_failures += 1
            self.memory[key] = made
            if self.counters.store_failures == 1:
                _warn(
                    f"cannot write to {self.write_directory} ({error}); kernels built now are "
                    "kept in memory and will be built again by the next process"
                )


def cubin_key(
    source: str, headers: Mapping[str, str], options: tuple[str, ...], compiler: str
) -> str:
    """Name of a build: SHA-256 (hex) of everything that decides its bytes. `options` hold the
    architecture and the macros (see `nvrtc.compile_options`)."""
    parts = [source, sorted(headers.items()), options, compiler]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@lru_cache(maxsize=1)
def default_cache() -> CubinCache:
    """The cache of this process, opened at the first use."""
    return open_cache()


def cache_directory() -> Path:
    """RINGSLAB_CACHE_DIR, or ~/.cache/ringslab. Raises RuntimeError without a home directory."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path.home() / ".cache" / "ringslab"


def open_cache(directory: Path | None = None) -> CubinCache:
    """A cache in `directory` (default: `cache_directory()`), which is made with mode 0700.

    A directory that another user can write to is refused, because a cubin is code. Where the
    directory is refused, cannot be made or cannot be written, one warning says so and a private
    directory below the system's temporary one is used, or memory. A directory that can be trusted
    but not written is still read.
    """
    readable: tuple[Path, ...] = ()
    try:
        chosen = directory or cache_directory()
        problem = _prepare(chosen)
        if problem is None:
            readable = (chosen,)
            if os.access(chosen, os.W_OK | os.X_OK):
                return CubinCache(readable, chosen)
            problem = "is not writable"
    except RuntimeError as error:  # no home directory
        chosen, problem = Path("~/.cache/ringslab"), f"has no place ({error})"
    spare = Path(tempfile.gettempdir()) / f"ringslab-{os.geteuid()}"
    spare_problem = "is a symbolic link" if spare.is_symlink() else _prepare(spare)
    usable = spare_problem is None and os.access(spare, os.W_OK | os.X_OK)
    instead = str(spare) if usable else "memory"
    _warn(f"{chosen} {problem}; using {instead}. Set {DIRECTORY_VARIABLE} to a private directory")
    if usable:
        return CubinCache((*readable, spare), spare)
    return CubinCache(readable, None)


def _prepare(directory: Path) -> str | None:
    """Make a directory if it is missing; why it cannot be used, or None."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    if not _is_trusted(status):
        return (
            f"can be written by another user (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}) and is refused"
        )
    return None


def _is_trusted(status: os.stat_result) -> bool:
    """Only we, or root, can have written it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read_trusted(path: Path) -> bytes | None:
    """Bytes of an entry, b"" where it cannot be trusted or read, None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(status):
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _encode_entry(key: str, made: Build) -> bytes:
    log = made.log.encode()
    body = key.encode() + len(log).to_bytes(_LENGTH_BYTES, "little") + log + made.cubin
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode_entry(key: str, data: bytes) -> Build | None:
    body_at = len(_MAGIC) + _DIGEST_BYTES
    digest, body = data[len(_MAGIC) : body_at], data[body_at:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != digest:
        return None
    if body[: len(key)] != key.encode():
        return None  # a renamed entry
    log_at = len(key) + _LENGTH_BYTES
    cubin_at = log_at + int.from_bytes(body[len(key) : log_at], "little")
    return Build(body[cubin_at:], body[log_at:cubin_at].decode())


def _write_atomic(directory: Path, name: str, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=directory)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, directory / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _warn(text: str) -> None:
    warnings.warn(f"cubin cache: {text}", RuntimeWarning, stacklevel=2)
