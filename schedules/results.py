"""What a caller hands to commit, checked before anything changes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.errors import ArgumentError
from .batch import HostBatch


@dataclass(frozen=True)
class InFlight:
    """A batch that was given out, and the epochs of its rows then."""

    batch: HostBatch
    epochs: np.ndarray


@dataclass(frozen=True)
class Ended:
    """What stays readable of a request that ended."""

    state: str
    tokens: np.ndarray
    prompt_len: int


@dataclass(frozen=True)
class StepResults:
    """accepted int32 [num_seqs]; next_tokens int32 [num_seqs], -1 where none is due; num_drafts
    int32 [num_seqs] and drafts int32 [num_seqs, tokens_per_step - 1] of the next step; finished
    bool [num_seqs]."""

    accepted: np.ndarray
    next_tokens: np.ndarray
    num_drafts: np.ndarray
    drafts: np.ndarray
    finished: np.ndarray


def check_results(
    batch: HostBatch,
    due: np.ndarray,
    draft_columns: int,
    vocab_size: int | None,
    accepted: Any,
    next_tokens: Any,
    drafts: Any,
    finished: Any,
) -> StepResults:
    """Raises ArgumentError for a wrong shape, dtype or value, a token outside the vocabulary among
    them. `due`: sequences whose next token is expected, bool [num_seqs]; for the others the next
    tokens given are not looked at."""
    count = batch.num_seqs
    accepted = _integers("accepted", accepted, (count,))
    wrong = (accepted < 0) | (accepted > batch.num_drafts)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ArgumentError(
            f"commit: accepted[{at}]={accepted[at]} for request {batch.request_ids[at]!r}, which "
            f"had num_drafts={batch.num_drafts[at]}"
        )
    if next_tokens is None:
        if due.any():
            at = int(np.flatnonzero(due)[0])
            raise ArgumentError(
                f"commit: next_tokens is None but request {batch.request_ids[at]!r} ends its "
                "known tokens in this batch; give int32 [num_seqs]"
            )
        following = np.full(count, -1, np.int32)
    else:
        following = _integers("next_tokens", next_tokens, (count,))
        wrong = due & (following < 0)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ArgumentError(
                f"commit: next_tokens[{at}]={following[at]} for request "
                f"{batch.request_ids[at]!r} but must be at least 0"
            )
        following = np.where(due, following, np.int32(-1))
    num_drafts, columns = _drafts(drafts, count, draft_columns)
    _check_vocabulary("next_tokens", following, vocab_size, batch)
    _check_vocabulary("drafts", columns, vocab_size, batch)
    if finished is None:
        ends = np.zeros(count, bool)
    else:
        ends = _array("finished", finished)
        if ends.dtype != np.bool_ or ends.shape != (count,):
            raise ArgumentError(
                f"commit: finished is {ends.dtype} {ends.shape} but must be bool ({count},)"
            )
    return StepResults(accepted, following, num_drafts, columns, ends)


def _check_vocabulary(
    name: str, tokens: np.ndarray, vocab_size: int | None, batch: HostBatch
) -> None:
    """A token past the vocabulary would be refused in a prompt, and read past a table later."""
    if vocab_size is None or not (tokens >= vocab_size).any():
        return
    at = tuple(np.argwhere(tokens >= vocab_size)[0].tolist())
    raise ArgumentError(
        f"commit: {name}[{', '.join(map(str, at))}]={tokens[at]} for request "
        f"{batch.request_ids[at[0]]!r} but vocab_size={vocab_size}"
    )


def _drafts(drafts: Any, count: int, draft_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of drafts of each sequence and the drafts at full width."""
    columns = np.full((count, draft_columns), -1, np.int32)
    if drafts is None:
        return np.zeros(count, np.int32), columns
    given = _integers("drafts", drafts, (count, None))
    if given.shape[1] > draft_columns:
        raise ArgumentError(
            f"commit: drafts.shape={given.shape} but a step has room for {draft_columns} drafts "
            "(tokens_per_step - 1)"
        )
    is_draft = given >= 0
    after_the_end = is_draft[:, 1:] & ~is_draft[:, :-1]
    if after_the_end.any() or (given < -1).any():
        bad = after_the_end.any(axis=1) | (given < -1).any(axis=1)
        at = int(np.flatnonzero(bad)[0])
        raise ArgumentError(
            f"commit: drafts[{at}]={given[at].tolist()} must be tokens, then -1 to the end"
        )
    columns[:, : given.shape[1]] = given
    return is_draft.sum(axis=1, dtype=np.int32), columns


def _array(name: str, values: Any) -> np.ndarray:
    if hasattr(values, "__cuda_array_interface__"):
        raise ArgumentError(
            f"commit: {name} is on a GPU; the schedule is made on the host, so pass "
            f"cupy.asnumpy({name})"
        )
    if isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(f"commit: {name} is a masked array, which would lose its mask")
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"commit: {name} is no array: {error}") from error


def _integers(name: str, values: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    array = _array(name, values)
    wanted = "[" + ", ".join("<= tokens_per_step - 1" if n is None else str(n) for n in shape) + "]"
    if array.ndim != len(shape) or any(
        n is not None and n != have for n, have in zip(shape, array.shape, strict=True)
    ):
        raise ArgumentError(f"commit: {name}.shape={array.shape} but must be {wanted}")
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int32)  # an empty list has no integers
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"commit: {name}.dtype={array.dtype} but must be an integer dtype")
    bounds = np.iinfo(np.int32)
    if array.size and (array.min() < bounds.min or array.max() > bounds.max):
        raise ArgumentError(f"commit: {name} runs {array.min()} .. {array.max()}, past int32")
    return array.astype(np.int32)
