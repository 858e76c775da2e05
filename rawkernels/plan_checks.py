"""What every plan builder agrees on: the modes of a decode plan, the width of its index array, and
the checks that need no array's values."""

from typing import Literal

from ..layouts.errors import PlanError
from ..layouts.rings import MAX_POSITION
from ..layouts.sizes import is_count, is_word

DecodeMode = Literal["causal", "block", "draft_step"]

# What a kernel compares; p is a token's position, "first" the first token of its sequence here.
#   causal      keys max(0, p - W + 1) .. p
#   block       anchor = first - 1, the last committed position:
#               keys max(0, anchor - W + 1) .. last token of the sequence, the same for all
#   draft_step  first token: causal, it is the committed one; the others are a draft block with it
#               as anchor: keys max(0, first - W + 1) .. last token of the sequence
CAUSAL, BLOCK, DRAFT_STEP = 0, 1, 2
MODE_CODES: dict[str, int] = {"causal": CAUSAL, "block": BLOCK, "draft_step": DRAFT_STEP}

MAX_ROW = 2**31 - 1  # rows of a ring tensor and of a joint buffer are int32

# The sum of two ring indices must fit int32, where kernels add before they wrap.
MAX_RING_LEN = 2**30


def check_sizes(op: str, window: int, ring_len: int, sink_tokens: int = 0) -> tuple[int, int]:
    """`(window, ring_len)` as plain ints. Raises PlanError where the ring cannot hold a window
    beside its `sink_tokens` pinned positions."""
    for name, value in (("window", window), ("ring_len", ring_len)):
        if not is_count(value):
            raise PlanError(f"{op}: {name}={value!r} but must be an integer")
        if not 1 <= value <= MAX_RING_LEN:
            raise PlanError(f"{op}: {name}={value} but must be 1 .. {MAX_RING_LEN}")
    window, ring_len = int(window), int(ring_len)
    if not is_count(sink_tokens) or not 0 <= sink_tokens <= MAX_RING_LEN:
        raise PlanError(f"{op}: sink_tokens={sink_tokens!r} but must be an integer of at least 0")
    if ring_len - sink_tokens < window:
        pinned = f" beside sink_tokens={sink_tokens} pinned ones" if sink_tokens else ""
        raise PlanError(
            f"{op}: ring_len={ring_len} cannot hold the window={window} keys of a query{pinned}; "
            "use required_ring_len(window, tokens_per_step, sink_tokens) or more"
        )
    return window, ring_len


def mode_code(op: str, mode: str) -> int:
    """Number of a mode for a kernel. Raises PlanError for an unknown one."""
    if not is_word(mode, MODE_CODES):
        raise PlanError(f"{op}: mode={mode!r} but must be one of {', '.join(MODE_CODES)}")
    return MODE_CODES[mode]


def index_width(mode: str, window: int, max_seqlen_q: int) -> int:
    """Columns of a decode plan's index: the most keys that a query of this mode can see.

    A draft block sees the window up to its anchor and the whole block: W + drafts. In
    `draft_step` the anchor is one of the tokens, so the longest block has max_seqlen_q - 1.
    """
    if mode == "block":
        return window + max_seqlen_q
    if mode == "draft_step":
        return window + max(max_seqlen_q - 1, 0)
    return window


assert MAX_POSITION + 1 <= MAX_ROW  # seqlens_k is one past the last position and is int32
