"""The private directory of a store on disk: made, or refused with the reason."""

import os
import stat
from pathlib import Path

from ..layouts.errors import StoreError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
LOCK_BYTES = 1 << 16  # of the lock file: more than LMDB needs for the readers we allow


def private_directory(path: str, data_name: str, lock_name: str) -> str:
    """The real path of a directory that only this user can write. It is made where it is missing,
    and missing parents with it, all with mode 0700; the lock file is made and given its blocks.

    Stored bytes become attention inputs of other requests, so whoever can write them can change
    outputs. Raises StoreError where the directory or one of the files belongs to another user, can
    be written by the group or by others, or lies in a directory in which others may replace it; and
    where it cannot be made or the disk is full.
    """
    try:
        _make(Path(path).absolute())
        real = os.path.realpath(path)
        _refuse_shared(real, (data_name, lock_name))
        _fill_lock_file(os.path.join(real, lock_name))
    except OSError as error:
        raise StoreError(f"lmdb:{path}: {error.strerror or error}") from None
    return real


def _make(path: Path) -> None:
    if path.exists():
        return
    _make(path.parent)
    try:
        path.mkdir(0o700)
        sync_directory(path.parent)
    except FileExistsError:  # another process was faster
        pass


def _fill_lock_file(path: str) -> None:
    """LMDB writes its lock file through a map, and a page of it for which a full disk has no block
    would kill the process: so all its blocks are taken first, or OSError raised."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, LOCK_BYTES)
    finally:
        os.close(handle)


def _refuse_shared(real: str, file_names: tuple[str, ...]) -> None:
    status = os.stat(real)
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"lmdb:{real}: this is no directory")
    _refuse_others(real, status)
    for ancestor in Path(real).parents:
        mode = os.stat(ancestor).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StoreError(
                f"lmdb:{real}: anyone may replace what lies in {ancestor} (mode "
                f"{stat.S_IMODE(mode):04o}); choose a place that only you can write"
            )
    for name in file_names:
        file = os.path.join(real, name)
        try:
            status = os.lstat(file)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise StoreError(f"lmdb:{real}: {name} is a link or no plain file; remove it")
        _refuse_others(file, status)


def _refuse_others(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"lmdb:{path}: belongs to user {status.st_uid}, and this process runs as "
            f"{os.geteuid()}; use a directory of your own"
        )
    if status.st_mode & OTHERS_WRITE:
        raise StoreError(
            f"lmdb:{path}: mode {stat.S_IMODE(status.st_mode):04o} lets other users write it; "
            f"chmod go-w {path}"
        )


def sync_directory(path: str | Path) -> None:
    """A new name in a directory survives a power cut only when the directory is synced."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
