"""Files that a command or a run writes: tried before anything runs, then written whole or not at
all."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..layouts.errors import ArgumentError

# Names in here stand for open files; another file cannot take their place.
STREAM_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")


def check_separate_files(call: str, files: Mapping[str, Any]) -> None:
    """Raises ArgumentError where two of the named files (None: not asked for) are one, so that the
    later would be written over the earlier, and for a name that no file can have."""
    seen: dict[str, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        if "\0" in os.fspath(path):
            raise ArgumentError(
                f"{call}: {name} {os.fspath(path)!r} holds a NUL, as no file's name"
            )
        first = seen.setdefault(os.path.realpath(path), name)
        if first != name:
            raise ArgumentError(
                f"{call}: {first} and {name} are both {os.fspath(path)}; name two files"
            )


def check_output_path(path: str | Path) -> None:
    """Raises OSError where `write_whole` could not write to `path`; asked before a run, so that
    none is lost for a folder that is not there."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _is_stream(path):
        return
    with _naming(path), tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
        pass  # gone again at once


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Puts `content` (a text: in UTF-8) into a new file that then takes the place of `path`, so
    that `path` always holds a whole one: the old or the new. A symbolic link is replaced, not
    followed; a device or a pipe is written to as it is.

    Raises OSError, which names `path`, where it cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    with _naming(path):
        if _is_stream(path):
            path.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)  # its folder may be gone with it
            raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError in the block names `path`, not the temporary file; a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_stream(path: Path) -> bool:
    """A device, a pipe, or a name of an open file such as /dev/stdout."""
    if os.path.abspath(path.parent) in STREAM_FOLDERS:
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False  # it is not there yet


def _umask() -> int:
    """The process's file mode mask; reading it takes setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
