"""Who is told when something slow happens, such as the build of a kernel at its first use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ProgressHook = Callable[[str], None]
_hook: ContextVar[ProgressHook | None] = ContextVar("ringslab_progress_hook", default=None)


@contextmanager
def progress_to(hook: ProgressHook) -> Iterator[None]:
    """Inside, one line of plain text goes to `hook` before each kernel build. Not nested: the
    innermost hook alone is told. A thread started inside has no hook."""
    token = _hook.set(hook)
    try:
        yield
    finally:
        _hook.reset(token)


def tell_progress(text: str) -> None:
    """Tell the hook of this context, if there is one."""
    hook = _hook.get()
    if hook is not None:
        hook(text)
