"""What window_decode_gqa and paged_decode share: macros, shared memory and cuts of their kernels.

Nothing here but the record format, the softcap and the longest key list decides a row's bits: KV
heads of a block, query rows of a warp, stages and splits may follow from the batch.
"""

from dataclasses import dataclass
from functools import cache
from math import e, gcd, log2

from ...layouts.errors import ArgumentError
from ...layouts.formats import MX_BLOCK, RecordFormat
from ...layouts.sizes import align_up, div_ceil, div_exact
from ..device.kernel_source import MacroItems, macro_set

KEY_TILE = 16  # keys of a stage; part of what decides an output's bits
PART_KEYS = 256  # keys summed on their own before parts are merged in order; decides bits, too
RECORD_TYPES = {"bf16": 0, "fp16": 1, "mxfp8": 2}
MAX_HEAD_DIM = 256
MAX_BLOCK_HEADS = 8  # KV heads of a thread block, a warp each
MAX_ROW_TILES = 4  # groups of 8 query rows of a warp; a lane reads the plan of a token
ACCUMULATORS = 256  # ROW_TILES * HEAD_DIM that fit the registers
STAGE_BYTES = 36 * 1024  # of 16 keys; above this a block serves fewer heads
BLOCK_SHARED = 101_000  # two blocks share a multiprocessor of 227 KB; one fits 99 KB of sm_86
SMALL_BLOCK_SHARED = 50_000  # of blocks of few warps, four of which share a multiprocessor
MAX_STAGES = 8
MAX_SPLIT_BYTES = 64 * 2**20  # partial states in flight


@dataclass(frozen=True)
class Cut:
    """How a layer is cut: KV heads of a block, groups of 8 query rows of a warp, tiles of keys in
    shared memory, whole runs copied at once or 16 bytes a lane, blocks that share a sequence's
    parts, thread blocks that should fit a multiprocessor."""

    heads: int
    row_tiles: int
    stages: int
    bulk: bool
    splits: int = 1
    min_blocks: int = 1


def run_align(fmt: RecordFormat, base_align: int = 16) -> int:
    """What every run of a record begins and ends at a multiple of, at most 16 bytes."""
    element = 1 if fmt.type == "mxfp8" else 2
    values = fmt.head_dim * element * fmt.num_kv_heads
    scales = _scales(fmt)
    return gcd(gcd(16, base_align), gcd(gcd(values, values + scales), fmt.head_dim * element))


def _scales(fmt: RecordFormat) -> int:
    if fmt.type != "mxfp8":
        return 0
    return fmt.num_kv_heads * div_exact(fmt.head_dim, MX_BLOCK)


def key_stride(fmt: RecordFormat, heads: int) -> int:
    """Bytes of a key in shared memory, KEY_STRIDE in gqa_records.cuh."""
    values = heads * fmt.head_dim * (1 if fmt.type == "mxfp8" else 2)
    row = 2 * (values + align_up(_scales(fmt), 16))
    return row if row // 16 % 2 else row + 16  # exact: whole 16s


def max_row_tiles(head_dim: int) -> int:
    return max(1, min(MAX_ROW_TILES, ACCUMULATORS // head_dim))  # rounded down


def choose_cut(
    fmt: RecordFormat,
    group: int,
    max_tokens: int,
    num_seqs: int,
    num_parts: int,
    multiprocessors: int,
    *,
    bulk: bool,
) -> Cut:
    """The cut of a batch of num_seqs sequences of at most max_tokens query tokens each."""
    tiles = div_ceil(group * max_tokens, 8)
    row_tiles = next((n for n in (1, 2, 4) if n >= tiles), MAX_ROW_TILES)
    row_tiles = min(row_tiles, max_row_tiles(fmt.head_dim))
    row_groups = div_ceil(tiles, row_tiles)
    sizes = [n for n in range(MAX_BLOCK_HEADS, 0, -1) if fmt.num_kv_heads % n == 0]
    fitting = [n for n in sizes if KEY_TILE * key_stride(fmt, n) <= STAGE_BYTES] or sizes[-1:]
    # Many blocks hide each other's beginnings and ends; whole records are the best copies.
    wanted = 2 * multiprocessors
    units = num_seqs * row_groups
    enough = [n for n in fitting if units * div_exact(fmt.num_kv_heads, n) >= wanted]
    heads = enough[0] if enough else fitting[-1] if num_parts == 1 else fitting[0]
    splits = 1
    blocks = units * div_exact(fmt.num_kv_heads, heads)
    if num_parts > 1 and blocks < wanted:
        splits = min(num_parts, div_ceil(wanted, max(blocks, 1)))
        per_split = div_ceil(num_parts, splits)
        splits = div_ceil(num_parts, per_split)
        partial = blocks * heads * num_parts * 4 * row_tiles * (fmt.head_dim // 16 + 1) * 32 * 4
        if partial > MAX_SPLIT_BYTES:
            splits = 1
    room = BLOCK_SHARED if heads > 4 or num_parts > 1 else SMALL_BLOCK_SHARED
    stage = KEY_TILE * key_stride(fmt, heads)
    stages = max(2, min(MAX_STAGES, room // stage))  # rounded down
    return Cut(heads, row_tiles, stages, bulk, splits, 2 if row_tiles * fmt.head_dim <= 128 else 1)


def shared_bytes(fmt: RecordFormat, cut: Cut) -> int:
    """sizeof(Shared) in window_decode_gqa.cuh, which asserts it."""
    stages = cut.stages * KEY_TILE * key_stride(fmt, cut.heads)
    return align_up(stages + cut.stages * 16 + cut.row_tiles * 8 * 8 + 4, 16)


@cache
def gqa_macros(
    fmt: RecordFormat, cut: Cut, num_parts: int, softcap: bool, base_align: int = 16
) -> MacroItems:
    align = run_align(fmt, base_align)
    return macro_set(
        HEAD_DIM=fmt.head_dim,
        NUM_KV_HEADS=fmt.num_kv_heads,
        HEADS=cut.heads,
        RECORD_TYPE=RECORD_TYPES[fmt.type],
        COPY_ALIGN=align,
        BULK_COPY=int(cut.bulk and align == 16),
        NUM_STAGES=cut.stages,
        ROW_TILES=cut.row_tiles,
        SOFTCAP=int(softcap),
        PART_KEYS=PART_KEYS,
        MULTI_PART=int(num_parts > 1),
        MIN_BLOCKS=cut.min_blocks,
        SHARED_BYTES=shared_bytes(fmt, cut),
    )


def score_numbers(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """`score_factor` and `cap` of the kernels: scores in units of log2, where exponentials are one
    instruction; with a softcap c first 2 / c of them, then cap = c log2(e)."""
    if softcap == 0.0:
        return softmax_scale * log2(e), 0.0
    return softmax_scale * 2.0 / softcap * log2(e), softcap * log2(e)


def check_shape(op: str, fmt: RecordFormat, num_q_heads: int) -> int:
    """Query heads of a KV head. ArgumentError for what the kernels do not hold."""
    if fmt.head_dim % 32 != 0 or fmt.head_dim > MAX_HEAD_DIM:
        raise ArgumentError(
            f"{op}: head_dim={fmt.head_dim} but the CUDA kernels need a multiple of 32, at most "
            f"{MAX_HEAD_DIM}; use the cpu or reference backend"
        )
    if fmt.plane_order != "interleaved":
        raise ArgumentError(f"{op}: plane_order={fmt.plane_order!r} but must be interleaved")
    if num_q_heads % fmt.num_kv_heads != 0:
        raise ArgumentError(
            f"{op}: q.shape[1]={num_q_heads} is no multiple of num_kv_heads={fmt.num_kv_heads}"
        )
    return num_q_heads // fmt.num_kv_heads  # exact: checked above


def state_floats(fmt: RecordFormat, cut: Cut) -> int:
    """Floats of a warp's partial state, STATE_WORDS * 32 in window_decode_gqa.cuh."""
    return 4 * cut.row_tiles * (div_exact(fmt.head_dim, 16) + 1) * 32

