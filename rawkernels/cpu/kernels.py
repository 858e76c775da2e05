"""How CPU kernels are compiled and called: Numba, at first use, kept in Numba's disk cache."""

import hashlib
import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import config, get_num_threads, njit, set_num_threads, threading_layer
from numba.core.caching import _CacheLocator

from ...layouts.errors import BackendError

SERIAL_WORK = 200_000  # turns of an inner loop, 50 to 200 us


def device_function(function: Callable) -> Callable:
    """A function that kernels call. Strict float arithmetic: every product and sum is rounded."""
    return _compiled(function, parallel=False, fastmath=False)


def kernel(function: Callable) -> Callable:
    """A kernel over the cores of the machine, with strict float arithmetic."""
    return _compiled(function, parallel=True, fastmath=False)


def attention_function(function: Callable) -> Callable:
    """A function that attention kernels call. Its sums may be reordered and contracted, once, at
    compile time: the same for every batch. NaN and infinities keep their meaning (masked rows,
    lse = -inf)."""
    return _compiled(function, parallel=False, fastmath={"contract", "reassoc"})


def _compiled(function: Callable, *, parallel: bool, fastmath: Any) -> Callable:
    # nogil, so that a thread of the caller can make progress while a kernel runs.
    options = {"parallel": parallel, "fastmath": fastmath, "nogil": True}
    _make_private_folder(function)
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for a cache can be written; compile in every process then
        return njit(**options)(function)
    problem = _folder_problem(compiled, function)
    if problem:
        _warn_once(f"Numba's cache {problem}; kernels are compiled in every process")
        return njit(**options)(function)
    _guard_cache(compiled)
    return compiled


def _make_private_folder(function: Callable) -> None:
    """The folder below NUMBA_CACHE_DIR that Numba would make with the process's umask, with mode
    0700. Its name is Numba's own; where a version names it otherwise, Numba makes its folder."""
    subpath = getattr(_CacheLocator, "get_suitable_cache_subpath", None)
    code = getattr(function, "__code__", None)
    if config.CACHE_DIR and subpath is not None and code is not None:
        folder = Path(config.CACHE_DIR) / subpath(code.co_filename)
        with suppress(OSError):  # where it cannot be made, Numba finds another place
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _folder_problem(compiled: Any, function: Callable) -> str:
    """Why a kernel must not be read from its cache folder, or "". Numba unpickles what lies there,
    which runs code of whoever wrote it: only we and root may. `__pycache__` beside the sources is
    as safe as they are."""
    folder = getattr(getattr(compiled, "_cache", None), "cache_path", None)
    if folder is None or Path(folder) == Path(function.__code__.co_filename).parent / "__pycache__":
        return ""
    status = os.stat(folder)
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return (
        f"{folder} can be written by another user (owner {status.st_uid}, mode "
        f"{stat.S_IMODE(status.st_mode):04o}) and is refused; chmod go-w it, or set "
        "NUMBA_CACHE_DIR to a folder of your own"
    )


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _guard_cache(compiled: Any) -> None:
    """Make a kernel's disk cache safe. The attributes are Numba's own; where a version lacks them,
    its plain cache stays.

    Numba reuses a cached kernel while its own file is unchanged, although functions that it calls
    in other files may have changed (numba/numba#1833, open): the stamp of each kernel covers all
    files whose code or constants end up in kernels. And a damaged cache file would end the call
    that reads it: it is emptied and the kernel compiled again, with a warning. So would a cache
    that cannot be written, a full disk for one: the compiled kernel is used, and not kept.
    """
    disk_cache = getattr(compiled, "_cache", None)
    cache_file = getattr(disk_cache, "_cache_file", None)
    if not hasattr(cache_file, "_source_stamp") or not hasattr(disk_cache, "save_overload"):
        return
    cache_file._source_stamp = _sources_digest()
    load, save, flush = disk_cache.load_overload, disk_cache.save_overload, disk_cache.flush

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # unpickling damaged bytes can raise anything
            warnings.warn(f"Numba's cache is damaged and is emptied: {error!r}", stacklevel=2)
            _or_warn(flush)
            return None

    disk_cache.load_overload = load_or_forget
    disk_cache.save_overload = lambda *arguments: _or_warn(save, *arguments)


def _or_warn(write: Callable, *arguments: Any) -> None:
    """A write to the disk cache; nothing is lost where it fails but the time of a compile."""
    try:
        write(*arguments)
    except Exception as error:  # a damaged index is read before it is written: anything again
        warnings.warn(f"Numba's cache cannot be written: {error!r}", stacklevel=2)


@cache
def _sources_digest() -> str:
    here = Path(__file__).parent
    layouts = here.parent.parent / "layouts"
    digest = hashlib.sha256()
    for file in [*sorted(here.glob("*.py")), layouts / "formats.py", layouts / "rope.py"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def launch(compiled: Callable, work: int, *arguments: Any) -> None:
    """Run a kernel on `arguments`, NumPy arrays and numbers; `work` counts its inner loop's turns.

    Little work stays on one core: waking the others costs more than it saves, and a great deal
    more where they are busy with something else. The bits are the same.
    Raises BackendError in a forked process whose parent had run a kernel: GNU OpenMP would end it.
    """
    if _launching_process() != os.getpid() and threading_layer() == "omp":
        raise BackendError(
            "CPU kernels do not run in a process that was forked after one had run: OpenMP's "
            "threads are not copied; start workers with the 'spawn' method, or set "
            "NUMBA_THREADING_LAYER=workqueue"
        )
    arguments = tuple(_argument(x) if isinstance(x, np.ndarray) else x for x in arguments)
    threads = get_num_threads()
    if threads == 1 or work >= SERIAL_WORK:
        compiled(*arguments)
        return
    set_num_threads(1)
    try:
        compiled(*arguments)
    finally:
        set_num_threads(threads)


@cache
def _launching_process() -> int:
    """Id of the process that first launched a kernel; a forked child inherits the answer."""
    return os.getpid()


class _Memory:
    """The memory of an array, for NumPy to view again."""

    def __init__(self, array: np.ndarray) -> None:
        pointer = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}
        self.owner = array


def _argument(array: np.ndarray) -> np.ndarray:
    """`array` as kernels take it. A read-only array would be another type to Numba, and every
    kernel would be compiled twice; kernels never write their inputs."""
    if array.flags.writeable:
        return array
    return np.asarray(_Memory(array))
