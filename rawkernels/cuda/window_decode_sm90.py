"""Launcher of window_decode_sm90.cu and window_decode_sm90_small.cu, for Hopper GPUs.

The two kernels and all groupings of tokens give a token the same bits, so what is launched may
follow from the batch; whether they are used at all may not, see `supports`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...layouts.plans import DecodePlan
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil, div_exact
from ..device.dependent_launch import launch_dependent
from ..device.kernel_source import (
    HOPPER_ARCHS,
    HOPPER_SHARED_BYTES,
    KernelSource,
    ParamsStruct,
    macro_set,
)
from ..device.module import device_pointer, get_kernel
from ..device.probe import multiprocessors
from ..device.tensor_map import bf16_tensor_map
from ..ring_access import RingAccess
from .attention_shapes import scale_log2
from .latent_sm90 import (
    HEAD_DIM,
    HEAD_TILE,
    MACROS,
    MAX_UNIT_TOKENS,
    NUM_THREADS,
    OUT_BOX_ROWS,
    serves,
)
from .rope_tables import device_rope_table

CHUNK_ROWS = 15  # records that fit a slot of 8 KB
MIN_CHUNKS = 9  # a ring of 135 rows; shorter ones have empty chunks
COLUMN_SPLITS = (1, 2, 4)  # blocks that may share a tile's 4 parts of output columns
MAX_INT32 = 2**31 - 1
KEPT_CUTS = 1024  # of batches of other shapes; finding one takes the host some microseconds

# Times of one thread block at the memory's full rate, in units of 1,000 cycles: a tile's queries
# and output, a unit's records, and what is between two units. Only their ratios matter.
TILE_TIME = 7.1
WINDOW_TIME = 3.8
UNIT_TIME = 2.0
ROUND_TIME = 2.4  # what is between two tiles of window_decode_sm90_small; nothing after one tile

PARAMS = ParamsStruct(
    "Params",
    (
        ("q_map", "TensorMap"),
        ("out_map", "TensorMap"),
        ("slab", "const uint8_t*"),
        ("out", "uint16_t*"),
        ("lse", "float*"),
        ("sink", "const float*"),
        ("rope_table", "const double2*"),
        ("positions", "const int32_t*"),
        ("offset_len", "const int2*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("slot_bytes", "int64_t"),
        ("ring_offset", "int64_t"),
        ("scale_log2", "float"),
        ("num_rows", "int32_t"),
        ("ring_len", "int32_t"),
        ("num_chunks", "int32_t"),
        ("planar", "int32_t"),
        ("head_tiles", "int32_t"),
        ("num_tokens", "int32_t"),
        ("num_units", "int32_t"),
        ("groups", "int32_t"),
        ("group_tokens", "int32_t"),
        ("rope_adjacent", "int32_t"),
        ("reserved", "int32_t"),
    ),
    docs=(
        ("q_map", "bf16 [num_tokens * num_q_heads, 512], boxes of 64 rows"),
        ("out_map", "the same of the output, boxes of 16 rows"),
        ("slab", "[num_state_slots * slot_bytes]"),
        ("out", "bf16 [num_tokens, num_q_heads, 512]"),
        ("lse", "[num_tokens, num_q_heads]"),
        ("sink", "[num_q_heads], may be null"),
        ("rope_table", "[table rows, 32] (cos, sin); null without rotation"),
        ("positions", "[num_tokens]; read with rope_table"),
        ("offset_len", "[num_tokens] (row of the oldest key, number of keys)"),
        ("cu_seqlens_q", "[num_seqs + 1]; not read by window_decode_sm90_small"),
        ("ring_offset", "of the ring, from the slot's start"),
        ("scale_log2", "softmax_scale * log2(e)"),
        ("num_rows", "num_state_slots * ring_len"),
        ("num_chunks", "of CHUNK_ROWS records; 9 or 10"),
        ("planar", "1 where a ring's scales lie behind all of its values"),
        ("head_tiles", "num_q_heads / 64"),
        ("num_units", "num_seqs * groups; tiles * column splits for window_decode_sm90_small"),
        ("groups", "groups of tokens of a sequence, for the longest"),
        ("group_tokens", "tokens of a group, 1 .. MAX_UNIT_TOKENS"),
        ("rope_adjacent", "1 for pairs (2i, 2i + 1), 0 for (i, i + 32)"),
        ("reserved", "the struct is a multiple of a tensor map's alignment"),
    ),
)
SPLIT_MACROS = {
    splits: tuple(sorted(MACROS + macro_set(COLUMN_SPLITS=splits))) for splits in COLUMN_SPLITS
}
UNITS_KERNEL = KernelSource("window_decode_sm90", PARAMS, (MACROS,), HOPPER_ARCHS)
TILES_KERNEL = KernelSource(
    "window_decode_sm90_small", PARAMS, tuple(SPLIT_MACROS.values()), HOPPER_ARCHS
)
KERNELS = (UNITS_KERNEL, TILES_KERNEL)


@dataclass(frozen=True)
class Work:
    """How a batch is cut. `group_tokens` 0: tile by tile, by window_decode_sm90_small, each tile's
    columns among `column_splits` blocks."""

    group_tokens: int
    groups: int
    num_units: int
    column_splits: int = 1


def supports(
    access: RingAccess, num_q_heads: int, rope_out: Rope | None, softmax_scale: float
) -> bool:
    """Whether the Hopper kernels serve a layer. It depends on nothing that changes from batch to
    batch, because the portable kernel's bits are others."""
    return serves(access.format, access.ring_len, num_q_heads, rope_out, softmax_scale)


@lru_cache(maxsize=KEPT_CUTS)
def choose_work(
    num_seqs: int, max_seqlen_q: int, num_tokens: int, head_tiles: int, num_blocks: int
) -> Work:
    """The cut of the least time, from rounds of units over the thread blocks."""
    num_tiles = num_tokens * head_tiles
    splits = max(n for n in COLUMN_SPLITS if n == 1 or n * num_tiles <= num_blocks)
    best = Work(0, 1, num_tiles * splits, splits)
    rounds = div_ceil(num_tiles, num_blocks)
    best_time = rounds * (TILE_TIME + WINDOW_TIME + (ROUND_TIME if rounds > 1 else 0.0))
    for tokens in range(1, min(max_seqlen_q, MAX_UNIT_TOKENS) + 1):
        groups = div_ceil(max_seqlen_q, tokens)
        if (rounds == 1 and tokens * head_tiles == 1) or num_seqs * groups > num_tokens:
            continue  # one tile a block; a plan that only bounds its longest sequence
        units = num_seqs * groups
        time = tokens * head_tiles * TILE_TIME + WINDOW_TIME + UNIT_TIME
        time *= div_ceil(units, num_blocks)
        if time < best_time:
            best, best_time = Work(tokens, groups, units), time
    return best


def launch(
    q: Any,
    slab: Any,
    plan: DecodePlan,
    out: Any,
    lse: Any,
    access: RingAccess,
    num_state_slots: int,
    *,
    softmax_scale: float,
    sink: Any = None,
    rope_out: Rope | None = None,
    stream: Any = None,
    work: Work | None = None,
    overlap: bool = True,
) -> None:
    """window_decode on arguments that `check_window_decode` and `supports` have passed; the arrays
    lie on the current device and start at multiples of 16.

    `work` overrides `choose_work`, for tests and benchmarks. `overlap`: the launch may begin while
    the kernel ahead of it ends (see dependent_launch.py); the plan must be older than that kernel.
    """
    num_tokens, num_q_heads = q.shape[:2]
    head_tiles = div_exact(num_q_heads, HEAD_TILE)
    num_blocks = multiprocessors()  # each runs one block at a time
    if work is None:
        work = choose_work(plan.num_seqs, plan.max_seqlen_q, num_tokens, head_tiles, num_blocks)
    if num_tokens == 0:
        return

    rows = num_tokens * num_q_heads
    params = PARAMS.pack(
        q_map=bf16_tensor_map(device_pointer(q), rows, HEAD_DIM, HEAD_TILE),
        out_map=bf16_tensor_map(device_pointer(out), rows, HEAD_DIM, OUT_BOX_ROWS),
        slab=device_pointer(slab),
        out=device_pointer(out),
        lse=device_pointer(lse),
        sink=device_pointer(sink),
        rope_table=0 if rope_out is None else device_pointer(device_rope_table(rope_out)),
        positions=device_pointer(plan.positions),
        offset_len=device_pointer(plan.offset_len),
        cu_seqlens_q=device_pointer(plan.cu_seqlens_q),
        slot_bytes=access.slot_bytes,
        ring_offset=access.value_offset,
        scale_log2=scale_log2(softmax_scale),
        num_rows=min(num_state_slots * access.ring_len, MAX_INT32),
        ring_len=access.ring_len,
        num_chunks=max(div_ceil(access.ring_len, CHUNK_ROWS), MIN_CHUNKS),
        planar=int(access.format.plane_order == "planar"),
        head_tiles=head_tiles,
        num_tokens=num_tokens,
        num_units=work.num_units,
        groups=work.groups,
        group_tokens=work.group_tokens,
        rope_adjacent=int(rope_out is not None and rope_out.pairing == "adjacent"),
        reserved=0,
    )

    if work.group_tokens == 0:
        kernel = get_kernel(TILES_KERNEL, SPLIT_MACROS[work.column_splits], HOPPER_SHARED_BYTES)
    else:
        kernel = get_kernel(UNITS_KERNEL, MACROS, HOPPER_SHARED_BYTES)
    grid = min(work.num_units, num_blocks)
    if overlap:
        launch_dependent(kernel, grid, NUM_THREADS, params, stream)
    else:
        kernel.launch((grid,), (NUM_THREADS,), params, stream)
