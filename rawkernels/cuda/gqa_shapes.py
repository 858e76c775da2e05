"""What window_decode_gqa and paged_decode share: macros, shared memory and cuts of their kernels.

Nothing here but the record format, the softcap and the longest key list decides a row's bits: KV
heads of a block, query rows of a warp, stages and splits may follow from the batch.
"""

from dataclasses import dataclass
from functools import cache
from math import e, gcd, log2
from typing import Any

from ...layouts.errors import ArgumentError
from ...layouts.formats import MX_BLOCK, RecordFormat
from ...layouts.sizes import align_up, div_ceil, div_exact
from ..arrays import FP16
from ..device.kernel_source import MacroItems, macro_set

KEY_TILE = 16  # keys of a stage and of a step of the online softmax; decides bits
RECORD_TYPES = {"bf16": 0, "fp16": 1, "mxfp8": 2}
MAX_HEAD_DIM = 256
MAX_BLOCK_HEADS = 8  # KV heads of a thread block, a warp each
MAX_ROW_TILES = 4  # groups of 8 query rows of a warp; a lane reads the plan of a token
ACCUMULATORS = 256  # ROW_TILES * HEAD_DIM that fit the registers, where nothing else needs them
STAGE_BYTES = 36 * 1024  # of 16 keys; above this a block serves fewer heads
BLOCK_SHARED = 101_000  # two blocks share a multiprocessor of 227 KB; one fits 99 KB of sm_86
SMALL_BLOCK_SHARED = 52_000  # of blocks of few warps, four of which share a multiprocessor
MAX_STAGES = 12
LONE_MXFP8_STAGES = 3  # of whole records in long windows: 2 took 8 % longer, 6 took 3 %
FILLED = 0.9  # of the multiprocessors: as good as all of them
MAX_SPLIT_BYTES = 64 * 2**20  # partial states in flight
LONG_LIST = 8192  # keys; longer lists have longer parts
MAX_UNITS = 1 << 16  # counters of blocks that share a sequence; a larger batch is not split


@dataclass(frozen=True)
class Cut:
    """How a layer is cut: KV heads of a block, groups of 8 query rows of a warp, tiles of keys in
    shared memory, whole runs copied at once or 16 bytes a lane, blocks that share a sequence's
    parts, warps of a block that fetch records."""

    heads: int
    row_tiles: int
    stages: int
    bulk: bool
    splits: int = 1
    fetchers: int = 1


def run_align(fmt: RecordFormat) -> int:
    """What every run of a record begins and ends at a multiple of, at most 16 bytes."""
    element = 1 if fmt.type == "mxfp8" else 2
    values = fmt.head_dim * element * fmt.num_kv_heads
    scales = _scales(fmt)
    return gcd(16, values, values + scales, fmt.head_dim * element)


def _scales(fmt: RecordFormat) -> int:
    if fmt.type != "mxfp8":
        return 0
    return fmt.num_kv_heads * div_exact(fmt.head_dim, MX_BLOCK)


def key_stride(fmt: RecordFormat, heads: int) -> int:
    """Bytes of a key in shared memory, KEY_STRIDE in gqa_records.cuh."""
    values = heads * fmt.head_dim * (1 if fmt.type == "mxfp8" else 2)
    row = 2 * (values + align_up(_scales(fmt), 16))
    return row if row // 16 % 2 else row + 16  # exact: whole 16s


def max_row_tiles(fmt: RecordFormat, num_parts: int) -> int:
    """Groups of 8 rows whose accumulators, and those of all parts together, fit the registers."""
    room = ACCUMULATORS if num_parts == 1 and fmt.type != "mxfp8" else ACCUMULATORS // 2
    return max(1, min(MAX_ROW_TILES, room // fmt.head_dim))  # rounded down


def part_keys(max_length: int) -> int:
    """Keys that are summed on their own before parts are merged in order; decides bits. Long lists
    have longer parts, so that their partial states are no burden."""
    return 256 if max_length <= LONG_LIST else 1024


def parts_of(max_length: int) -> int:
    """Parts of the longest list of keys that a layer can have."""
    return div_ceil(max_length, part_keys(max_length))


def choose_cut(
    fmt: RecordFormat,
    group: int,
    max_tokens: int,
    num_seqs: int,
    max_length: int,
    multiprocessors: int,
    *,
    hopper: bool,
) -> Cut:
    """The cut of a batch of num_seqs sequences of at most max_tokens query tokens each."""
    tiles = div_ceil(group * max_tokens, 8)
    num_parts = parts_of(max_length)
    row_tiles = next((n for n in (1, 2, 4) if n >= tiles), MAX_ROW_TILES)
    row_tiles = min(row_tiles, max_row_tiles(fmt, num_parts))
    units = num_seqs * div_ceil(tiles, row_tiles)

    heads = _choose_heads(fmt, units, num_parts, multiprocessors)
    blocks = units * div_exact(fmt.num_kv_heads, heads)
    # Blocks of 9 warps and more with wide accumulators have a multiprocessor to themselves.
    wide = _width(fmt, row_tiles, num_parts) >= 128
    lone = wide and heads > 4
    slots = multiprocessors if lone else 2 * multiprocessors
    splits = 1
    if num_parts > 1 and blocks < FILLED * multiprocessors:
        splits = max(1, min(num_parts, slots // max(blocks, 1)))  # rounded down: all at once
        partial = blocks * heads * num_parts * 4 * state_words(fmt.head_dim, row_tiles) * 32
        splits = splits if partial <= MAX_SPLIT_BYTES and blocks <= MAX_UNITS else 1

    # A block alone asks for much at once. Shared memory is for two, or for four small ones, but
    # where blocks stay alone anyway and a count was measured: for rings, whose lists are not long.
    alone = blocks * splits <= multiprocessors or lone
    run_bytes = heads * fmt.head_dim * (1 if fmt.type == "mxfp8" else 2)
    room = BLOCK_SHARED if wide or run_bytes >= 1024 else SMALL_BLOCK_SHARED
    fetchers = 4 if alone else 2 if heads > 4 or wide else 1
    stages = room // (KEY_TILE * key_stride(fmt, heads))  # rounded down
    stages = max(2, min(MAX_STAGES, stages))
    whole = heads == fmt.num_kv_heads and run_align(fmt) == 16
    bulk = hopper and whole
    if lone and bulk and fmt.type == "mxfp8" and num_parts > 1 and max_length <= LONG_LIST:
        stages = LONE_MXFP8_STAGES
    return Cut(heads, row_tiles, stages, bulk, splits, fetchers)


def _choose_heads(fmt: RecordFormat, units: int, num_parts: int, multiprocessors: int) -> int:
    """KV heads of a thread block: many make long copies, few make many blocks."""
    sizes = [n for n in range(MAX_BLOCK_HEADS, 0, -1) if fmt.num_kv_heads % n == 0]
    sizes = [n for n in sizes if KEY_TILE * key_stride(fmt, n) <= STAGE_BYTES] or sizes[-1:]
    if (
        fmt.type == "mxfp8"
        and sizes[0] == fmt.num_kv_heads
        and 2 * units >= FILLED * multiprocessors
    ):
        return sizes[0]  # the scales of a part of the heads are copies of a few bytes
    smaller = [n for n in sizes if n <= 4] or sizes[-1:]
    for n in smaller:
        if units * div_exact(fmt.num_kv_heads, n) * num_parts >= FILLED * multiprocessors:
            return n
    return smaller[-1]


def shared_bytes(fmt: RecordFormat, cut: Cut) -> int:
    """sizeof(Shared) in window_decode_gqa.cuh, which asserts it."""
    stages = cut.stages * KEY_TILE * key_stride(fmt, cut.heads)
    return align_up(stages + cut.stages * 16 + cut.row_tiles * 8 * 12 + 4, 16)


def _width(fmt: RecordFormat, row_tiles: int, num_parts: int) -> int:
    """A measure of the registers that a thread needs: 96 do for 64, 168 for 128 (256 in parts)."""
    return row_tiles * fmt.head_dim * (2 if num_parts > 1 and fmt.head_dim < 128 else 1)


def _min_blocks(fmt: RecordFormat, cut: Cut, num_parts: int) -> int:
    """Blocks that shall fit a multiprocessor. Two of 10 warps leave a thread 96 registers, two of 6
    warps 168; more accumulators need more."""
    width, warps = _width(fmt, cut.row_tiles, num_parts), cut.heads + cut.fetchers
    return 2 if (width <= 64 and warps <= 10) or (width <= 128 and warps <= 6) else 1


@cache
def gqa_macros(fmt: RecordFormat, cut: Cut, max_length: int, softcap: bool) -> MacroItems:
    align = run_align(fmt)
    return macro_set(
        HEAD_DIM=fmt.head_dim,
        NUM_KV_HEADS=fmt.num_kv_heads,
        HEADS=cut.heads,
        RECORD_TYPE=RECORD_TYPES[fmt.type],
        COPY_ALIGN=align,
        BULK_COPY=int(cut.bulk and align == 16),
        NUM_STAGES=cut.stages,
        FETCHERS=cut.fetchers,
        ROW_TILES=cut.row_tiles,
        SOFTCAP=int(softcap),
        KEY_TILE=KEY_TILE,
        PART_KEYS=part_keys(max_length),
        MULTI_PART=int(parts_of(max_length) > 1),
        MIN_BLOCKS=_min_blocks(fmt, cut, parts_of(max_length)),
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


def block_threads(cut: Cut) -> int:
    return 32 * (cut.heads + cut.fetchers)


def check_output_type(op: str, q: Any, out: Any) -> None:
    """ArgumentError where out is not what a GPU writes: the type of q, bf16 as its bits."""
    if out.dtype.itemsize != 2 or (out.dtype == FP16) != (q.dtype == FP16):
        raise ArgumentError(
            f"{op}: out.dtype={out.dtype} but on a GPU it must be like q, of {q.dtype}"
        )


def state_words(head_dim: int, row_tiles: int) -> int:
    """Words of a lane's partial state, STATE_WORDS in window_decode_gqa.cuh."""
    return 4 * row_tiles * (div_exact(head_dim, 16) + 1)
