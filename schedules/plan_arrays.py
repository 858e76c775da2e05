"""Reading of the arrays that a caller gives to a plan: host integers with their ranges checked."""

from typing import Any

import numpy as np

from ..layouts.errors import PlanError
from ..layouts.sizes import is_count
from ..rawkernels.arrays import as_array, is_cuda
from ..rawkernels.plan_checks import MAX_ROW


def from_caller(**arrays: Any) -> tuple[list[Any], bool]:
    """A call's arrays, and whether its plan is built on the GPU: whether any of them lives there.

    Lists, integers and None stay as they are. Raises ArgumentError for what is no array.
    """
    plain = (np.ndarray, list, tuple, int, np.integer, type(None))
    given = [
        x if isinstance(x, plain) and not isinstance(x, np.ma.MaskedArray) else as_array(x, name)
        for name, x in arrays.items()
    ]
    return given, any(is_cuda(x) for x in given)


def host_integers(op: str, name: str, values: Any, *, least: int, most: int) -> np.ndarray:
    """`values` as int64 [n], each in least .. most.

    Takes lists and any integer dtype. Raises PlanError for another rank or dtype and for a value
    out of range, naming the first one.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{op}: {name} is no array: {error}") from error
    if array.size == 0 and array.ndim == 1 and array.dtype == np.float64:
        array = array.astype(np.int64)  # np.asarray([]) is float64: an empty list has no integers
    if array.ndim != 1:
        raise PlanError(f"{op}: {name}.shape={array.shape} but must have one axis")
    if array.dtype.kind not in "iu":
        raise PlanError(f"{op}: {name}.dtype={array.dtype} but must be an integer dtype, as int32")
    if array.size and (array.min() < least or array.max() > most):
        bad = int(np.flatnonzero((array < least) | (array > most))[0])
        raise PlanError(f"{op}: {name}[{bad}]={array[bad]} but must be {least} .. {most}")
    return array.astype(np.int64)


def host_extent(op: str, name: str, given: Any, needed: int, what: str) -> int:
    """An extent that a caller may state: `needed` where it is None. Raises PlanError for what is no
    integer, for less than `needed`, and for more than int32 counts."""
    if given is None:
        return needed
    if not is_count(given):
        raise PlanError(f"{op}: {name}={given!r} but must be an integer")
    if given < needed:
        raise PlanError(f"{op}: {name}={given} but {what} {needed} tokens")
    if given > MAX_ROW:
        raise PlanError(f"{op}: {name}={given} but int32 counts to {MAX_ROW}")
    return int(given)


def host_valid_start(op: str, values: Any, count: int, what: str, most: int) -> np.ndarray:
    """`swa_valid_start` as int64 [count]: one integer for all, or one for each `what`."""
    if not isinstance(values, (list, tuple)) and np.ndim(values) == 0:
        array = host_integers(op, "swa_valid_start", np.asarray(values)[None], least=0, most=most)
        return np.broadcast_to(array, (count,))
    array = host_integers(op, "swa_valid_start", values, least=0, most=most)
    if array.shape[0] != count:
        raise PlanError(
            f"{op}: swa_valid_start has {array.shape[0]} values for {count} {what}s; "
            f"give one integer, or one for each {what}"
        )
    return array


def host_cu_seqlens(op: str, values: Any, num_tokens: int) -> np.ndarray:
    """`cu_seqlens_q` as int64 [num_seqs + 1]: from 0, never falling, to num_tokens."""
    cu = host_integers(op, "cu_seqlens_q", values, least=0, most=num_tokens)
    if cu.shape[0] == 0 or cu[0] != 0 or cu[-1] != num_tokens:
        ends = "nothing" if cu.shape[0] == 0 else f"{cu[0]} .. {cu[-1]}"
        raise PlanError(f"{op}: cu_seqlens_q runs {ends} but must run 0 .. {num_tokens} tokens")
    falls = np.flatnonzero(np.diff(cu) < 0)
    if falls.size:
        at = int(falls[0])
        raise PlanError(f"{op}: cu_seqlens_q falls from {cu[at]} to {cu[at + 1]} at sequence {at}")
    return cu


def refuse_pinned_on_device(op: str, sink_tokens: int) -> None:
    """PlanError where a plan with pinned positions is asked for on the GPU."""
    if sink_tokens:
        raise PlanError(
            f"{op}: sink_tokens={sink_tokens} but plans with pinned positions are built on the "
            "host; pass NumPy arrays, and copy the plan's arrays"
        )


def refuse_pinned_and_missing(op: str, sink_tokens: int, valid: np.ndarray) -> None:
    """PlanError where positions are missing in a ring that pins its first ones."""
    if sink_tokens and np.any(valid > 0):
        raise PlanError(
            f"{op}: swa_valid_start={int(valid.max())} and sink_tokens={sink_tokens}, but pinned "
            "positions are always visible; recompute the sequence from position 0"
        )
