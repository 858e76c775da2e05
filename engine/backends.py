"""Which backend an engine runs on."""

from typing import Any

from ..layouts.errors import ArgumentError, BackendError
from ..layouts.sizes import is_word

BACKEND_CHOICES = ("auto", "cuda", "cpu", "reference")


def choose_backend(wish: str, device: int = 0) -> str:
    """ "cuda", "cpu" or "reference". "auto" is "cuda" where GPU `device` can run our kernels and
    CuPy is installed, else "cpu".

    Raises ArgumentError for another name, BackendError where "cuda" is asked for and cannot run.
    """
    if not is_word(wish, BACKEND_CHOICES):
        raise ArgumentError(f"backend={wish!r} but must be one of {', '.join(BACKEND_CHOICES)}")
    if wish == "cuda":
        require_cuda(device)
    if wish == "auto":
        return "cuda" if why_not_cuda(device) is None else "cpu"
    return wish


def require_cuda(device: int = 0) -> None:
    """Raises BackendError, with the reason, where GPU `device` cannot run our kernels."""
    reason = why_not_cuda(device)
    if reason is not None:
        raise BackendError(
            f"backend cuda cannot run on this machine: {reason}; use backend='cpu', or see "
            "`ringslab doctor`"
        )


def why_not_cuda(device: int = 0) -> str | None:
    """Why GPU `device` cannot be used, or None where it can."""
    from ..rawkernels.device.memory import device_problem

    return device_problem(device)


def check_device_number(device: Any) -> int:
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ArgumentError(f"device={device!r} but must be a GPU's number, 0 or more")
    return device
