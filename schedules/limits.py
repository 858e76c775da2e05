"""What bounds a schedule, and the checks of a request against it."""

import math
from dataclasses import dataclass, fields

import numpy as np

from ..layouts.errors import ArgumentError, RequestError
from ..layouts.rings import MAX_POSITION
from .batch import Request


@dataclass(frozen=True)
class SchedulerLimits:
    """num_state_slots   sequences that can hold state at once
    token_budget      prompt tokens of a prefill batch
    max_prefill_seqs  sequences of a prefill batch
    max_decode_seqs   sequences of a decode batch
    tokens_per_step   query tokens of a sequence in a decode step: drafts + 1
    max_seq_len       tokens of a sequence, prompt and generated
    vocab_size        tokens are below it, in prompts and at commit; None: any int32
    chunked_prefill   whether a prompt may be cut to the budget; if not, a prompt larger than the
                      budget runs alone
    num_blocks, block_size  blocks of the paged pool and tokens of a block; None: nothing is paged

    Raises ArgumentError for a number below 1 and a max_seq_len whose positions are not int32.
    """

    num_state_slots: int
    token_budget: int
    max_prefill_seqs: int
    max_decode_seqs: int
    tokens_per_step: int
    max_seq_len: int
    chunked_prefill: bool = True
    vocab_size: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "chunked_prefill" or (value is None and field.default is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ArgumentError(f"SchedulerLimits: {field.name}={value!r} must be 1 or more")
        if self.max_seq_len > MAX_POSITION + 1:
            raise ArgumentError(
                f"SchedulerLimits: max_seq_len={self.max_seq_len} has positions past {MAX_POSITION}"
            )

        if (self.num_blocks is None) != (self.block_size is None):
            raise ArgumentError(
                f"SchedulerLimits: num_blocks={self.num_blocks} block_size={self.block_size}; give "
                "both or neither"
            )

    @property
    def paged_tokens(self) -> int | None:
        """Tokens that the paged pool holds; None where nothing is paged."""
        return None if self.num_blocks is None else self.num_blocks * self.block_size


def check_request(
    request: Request,
    max_seq_len: int,
    vocab_size: int | None = None,
    paged_tokens: int | None = None,
) -> np.ndarray:
    """The prompt as int32 [n]. Raises RequestError for what can never run, with the numbers."""
    if not isinstance(request, Request):
        raise RequestError(f"submit: got {type(request).__name__} but needs a Request")
    if not isinstance(request.id, str) or not request.id:
        raise RequestError(f"submit: id={request.id!r} but must be text that is not empty")
    new = request.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, (int, np.integer)) or new < 0:
        raise RequestError(f"request {request.id!r}: max_new_tokens={new!r} must be 0 or more")
    arrival = request.arrival_s
    number = isinstance(arrival, (int, float, np.number)) and not isinstance(arrival, bool)
    if not number or not math.isfinite(arrival) or arrival < 0:
        raise RequestError(f"request {request.id!r}: arrival_s={arrival!r} must be 0 or more")
    if hasattr(request.prompt, "__cuda_array_interface__"):
        raise RequestError(
            f"request {request.id!r}: its prompt is on a GPU; pass a host array of int32"
        )
    try:
        prompt = np.asarray(request.prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"request {request.id!r}: its prompt is no array: {error}") from error
    if prompt.ndim != 1 or prompt.shape[0] == 0:
        raise RequestError(
            f"request {request.id!r}: prompt.shape={prompt.shape} but must be [n], n at least 1"
        )
    if prompt.dtype.kind not in "iu":
        raise RequestError(f"request {request.id!r}: prompt.dtype={prompt.dtype} must be integer")
    if prompt.min() < 0 or prompt.max() > np.iinfo(np.int32).max:
        raise RequestError(
            f"request {request.id!r}: prompt tokens run {prompt.min()} .. {prompt.max()} but must "
            "be int32 and not negative"
        )
    if vocab_size is not None and prompt.max() >= vocab_size:
        at = int(np.argmax(prompt))
        raise RequestError(
            f"request {request.id!r}: prompt[{at}]={prompt[at]} but vocab_size={vocab_size}"
        )
    total = prompt.shape[0] + int(new)
    if total > max_seq_len:
        raise RequestError(
            f"request {request.id!r}: {prompt.shape[0]} prompt tokens + {new} new tokens are "
            f"{total}, more than max_seq_len={max_seq_len}"
        )
    if paged_tokens is not None and total > paged_tokens:
        raise RequestError(
            f"request {request.id!r}: {prompt.shape[0]} prompt tokens + {new} new tokens are "
            f"{total}, more than the {paged_tokens} tokens of the paged pool; raise num_blocks"
        )
    return prompt.astype(np.int32)
