"""The private directory of a store on disk: made, or refused with the reason."""

import os
import stat
from pathlib import Path

from ..layouts.errors import StoreError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MIN_FREE_BYTES = (
    1 << 20
)  # LMDB maps its lock file: a page of it that has no block kills the process


def private_directory(path: str, file_names: tuple[str, ...]) -> str:
    """The real path of a directory that only this user can write, made with mode 0700 where it is
    missing; `file_names` are the store's files in it.

    Stored bytes become attention inputs of other requests, so whoever can write them can change
    outputs. Raises StoreError where the directory or one of the files belongs to another user, can
    be written by the group or by others, or lies in a directory in which others may replace it; and
    where it cannot be made or the disk is full.
    """
    try:
        parent = Path(path).absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
            sync_directory(parent)
        except FileExistsError:
            pass
        real = os.path.realpath(path)
        _refuse_shared(real, file_names)
        free = os.statvfs(real)
    except OSError as error:
        raise StoreError(f"lmdb:{path}: {error.strerror or error}") from None
    if free.f_bavail * free.f_frsize < MIN_FREE_BYTES:
        raise StoreError(f"lmdb:{path}: fewer than {MIN_FREE_BYTES:,} bytes are free on this disk")
    return real


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
