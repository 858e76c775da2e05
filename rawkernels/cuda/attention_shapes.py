"""What window_decode and window_prefill share: variants, macros and sizes of their kernels."""

from functools import cache
from math import e, log2
from typing import Any, Literal

from ...layouts.errors import ArgumentError
from ...layouts.formats import MX_BLOCK, RECORD_ALIGN, RecordFormat, RecordType, make_record_format
from ...layouts.rope import Pairing, Rope
from ...layouts.sizes import align_up, div_ceil, div_exact
from ..arrays import UINT16
from ..device.kernel_source import MacroItems, macro_set
from ..device.probe import device_arch

MAX_HEAD_DIM = 512  # a lane's accumulators: 16 heads x 256 columns a warp is half of the registers
HEAD_TILES = (16, 32, 64)  # heads of a thread block: 1, 2 or 4 rows of warps
KEY_TILE = 32  # keys of a step of the online softmax; part of what decides an output's bits
WARP_LANES = 32
WARP_HEADS = 16  # M of mma.m16n8k16
COLUMN_GROUPS = 2  # warps side by side, half of the columns each
SWIZZLE_ROWS = 8  # rows that ldmatrix reads at once; blocks of a padded row come in fours
# sizeof(KeyRuns) and sizeof(Query) in attention_keys.cuh and attention_output.cuh.
KEY_RUNS_BYTES = 40
QUERY_BYTES = 48

# Which kernel serves a layer: "portable" runs everywhere from sm_80 on, "sm_90a" on Hopper.
Variant = Literal["portable", "sm_90a"]


LATENT_NEEDS = "mxfp8 records of 512, rings of at most 136 and heads by the 64"


def choose_variant(
    op: str, device: int, hopper: bool, wanted: Variant | None, needs: str = LATENT_NEEDS
) -> Variant:
    """The variant of a launch on the current device, whose id is `device`.

    `hopper`: the sm_90a kernels serve the layer. That and the device decide, and neither changes
    from batch to batch, because an output's bits must not depend on what else is in its batch.
    `wanted` forces a variant, for tests and benchmarks; ArgumentError, which says what the sm_90a
    kernels take (`needs`), where it cannot run.
    """
    possible: Variant = "sm_90a" if hopper and current_arch(device) == "sm_90a" else "portable"
    if wanted not in (None, "portable", possible):
        raise ArgumentError(
            f"{op}: variant={wanted!r} but 'portable' alone serves this layer here: sm_90a kernels"
            f" take a Hopper GPU, {needs}"
        )
    return wanted or possible


@cache
def current_arch(device: int) -> str:
    """Architecture of the current device, whose id is `device`; asked of the driver once."""
    return device_arch()


def head_tile(num_q_heads: int) -> int:
    """Heads of a thread block: the smallest tile that holds all heads, or the largest."""
    return next((tile for tile in HEAD_TILES if tile >= num_q_heads), HEAD_TILES[-1])


def check_head_dim(op: str, fmt: RecordFormat) -> None:
    """ArgumentError for a head_dim that the kernels do not hold in registers."""
    if fmt.head_dim % MX_BLOCK != 0 or fmt.head_dim > MAX_HEAD_DIM:
        raise ArgumentError(
            f"{op}: head_dim={fmt.head_dim} but the CUDA kernels need a multiple of {MX_BLOCK}, "
            f"at most {MAX_HEAD_DIM}; use the cpu or reference backend"
        )


def check_output_bits(op: str, out: Any) -> None:
    """ArgumentError unless the output is bf16 bits; float64 is for the reference."""
    if out.dtype != UINT16:
        raise ArgumentError(f"{op}: out.dtype={out.dtype} but on a GPU it must be uint16 bits")


def attention_macros(
    fmt: RecordFormat, num_q_heads: int, rope: Rope | None, *, planar: bool = False
) -> MacroItems:
    """Macros of a build. `planar`: the records lie in a planar ring, not whole in a buffer."""
    dims, pairing = (0, "adjacent") if rope is None else (rope.dims, rope.pairing)
    return _macros(fmt.type, fmt.head_dim, head_tile(num_q_heads), dims, pairing, planar)


@cache
def _macros(
    record_type: RecordType, head_dim: int, tile: int, dims: int, pairing: Pairing, planar: bool
) -> MacroItems:
    return macro_set(
        HEAD_DIM=head_dim,
        HEAD_TILE=tile,
        KEY_TILE=KEY_TILE,
        RECORD_MXFP8=int(record_type == "mxfp8"),
        PLANAR=int(planar),
        ROPE_DIMS=dims,
        ROPE_ADJACENT=int(pairing == "adjacent"),
        SHARED_BYTES=shared_bytes(record_type, head_dim, tile, dims),
    )


def num_threads(tile: int) -> int:
    return WARP_LANES * COLUMN_GROUPS * div_exact(tile, WARP_HEADS)


def shared_bytes(record_type: RecordType, head_dim: int, tile: int, rope_dims: int) -> int:
    """sizeof(Shared) in attention_tile.cuh, member by member; that file asserts it."""
    threads = num_threads(tile)
    warps = div_exact(threads, WARP_LANES)
    padded_blocks = align_up(div_exact(head_dim, MX_BLOCK), 4)
    keys = 2 * KEY_TILE * padded_blocks * MX_BLOCK * 2  # two buffers of bf16
    scores = warps * WARP_HEADS * KEY_TILE * 4  # float32
    rotation = (rope_dims // 2 + 1) * 8  # exact: dims are even
    tasks = div_ceil(div_exact(KEY_TILE, SWIZZLE_ROWS) * div_exact(padded_blocks, 4), warps)
    prefetched = 2 if record_type == "mxfp8" and tasks > 1 else 1
    scales = prefetched * threads
    used = keys + scores + rotation + scales + KEY_RUNS_BYTES + QUERY_BYTES
    return align_up(used, RECORD_ALIGN)


def scale_log2(softmax_scale: float) -> float:
    """Scores are kept in units of log2, where exponentials are one instruction."""
    return softmax_scale * log2(e)


def shared_of(macros: MacroItems) -> int:
    return int(dict(macros)["SHARED_BYTES"])


def compiled_shapes(*, planar: bool) -> tuple[MacroItems, ...]:
    """The builds that `ringslab compile` makes: the packaged models and every branch."""

    def build(
        record_type: RecordType, dim: int, heads: int, rope_dims: int, pairing: Pairing
    ) -> MacroItems:
        rope = Rope(10_000.0, rope_dims, pairing) if rope_dims else None
        return attention_macros(make_record_format(record_type, dim), heads, rope)

    whole = (
        build("mxfp8", 512, 64, 64, "adjacent"),  # deepseek_v4_1_flash
        build("mxfp8", 128, 8, 32, "adjacent"),  # quickstart
        build("mxfp8", 512, 64, 0, "adjacent"),
        build("mxfp8", 512, 32, 64, "half"),
        build("mxfp8", 480, 16, 64, "adjacent"),  # records at odd addresses, padded columns
        build("mxfp8", 32, 16, 0, "adjacent"),
        build("bf16", 512, 64, 64, "adjacent"),
        build("bf16", 128, 8, 32, "half"),
    )
    in_planes = (
        attention_macros(
            make_record_format("mxfp8", 512), 64, Rope(10_000.0, 64, "adjacent"), planar=True
        ),
        attention_macros(make_record_format("mxfp8", 128), 8, None, planar=True),
    )
    return whole + (in_planes if planar else ())
