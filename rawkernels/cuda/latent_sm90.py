"""What the launchers of the Hopper kernels share: what they serve, macros and sizes.

window_decode_sm90, window_decode_sm90_small and window_prefill_sm90 give a token the same bits. The
portable kernels give others, so a layer is served by one of the two families for good.
"""

from ...layouts.formats import RecordFormat
from ...layouts.rope import Rope
from ..device.kernel_source import HOPPER_SHARED_BYTES, macro_set

HEAD_DIM = 512
HEAD_TILE = 64  # heads of a tile: the rows of a warpgroup product
KEY_ROWS = 136  # rows of a window in shared memory, so the longest ring
ROPE_DIMS = 64
MAX_UNIT_TOKENS = 8
OUT_BOX_ROWS = 16  # a warp stores its own 16 heads
NUM_THREADS = 384
MACROS = macro_set(
    HEAD_DIM=HEAD_DIM,
    HEAD_TILE=HEAD_TILE,
    KEY_ROWS=KEY_ROWS,
    MAX_UNIT_TOKENS=MAX_UNIT_TOKENS,
    SHARED_BYTES=HOPPER_SHARED_BYTES,
)


def serves(
    fmt: RecordFormat,
    ring_len: int,
    num_q_heads: int,
    rope_out: Rope | None,
    softmax_scale: float,
) -> bool:
    """Whether the Hopper kernels serve a layer: V4.1's window records, a ring of at most 136."""
    return (
        fmt.type == "mxfp8"
        and fmt.latent
        and fmt.head_dim == HEAD_DIM
        and num_q_heads > 0
        and num_q_heads % HEAD_TILE == 0
        and ring_len <= KEY_ROWS
        and (rope_out is None or rope_out.dims == ROPE_DIMS)
        and softmax_scale > 0  # the largest score is taken before scaling
    )
