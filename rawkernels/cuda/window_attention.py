"""Launcher of window_attention.cu, and the choice among the kernels of the operation."""

from functools import cache
from typing import Any

import numpy as np

from ...layouts.errors import ArgumentError
from ...layouts.sizes import div_ceil
from ..arrays import FP16
from ..attention_checks import check_window_attention
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from . import window_attention_sm90
from .attention_shapes import Variant, choose_variant, scale_log2

PARAMS = ParamsStruct(
    "WindowAttentionParams",
    (
        ("q", "const uint16_t*"),
        ("k", "const uint16_t*"),
        ("v", "const uint16_t*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("cu_seqlens_k", "const int32_t*"),
        ("sink", "const float*"),
        ("out", "uint16_t*"),
        ("lse", "float*"),
        ("counts", "uint64_t*"),
        ("num_q_rows", "int32_t"),
        ("num_k_rows", "int32_t"),
        ("num_seqs", "int32_t"),
        ("num_q_heads", "int32_t"),
        ("num_kv_heads", "int32_t"),
        ("head_tiles", "int32_t"),
        ("num_tiles", "int32_t"),
        ("window", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("scale", "float"),
        ("cap_log2", "float"),
    ),
    docs=(
        ("q", "[num_q_rows, num_q_heads, HEAD_DIM]"),
        ("k", "[num_k_rows, num_kv_heads, HEAD_DIM]"),
        ("v", "[num_k_rows, num_kv_heads, HEAD_DIM]"),
        ("cu_seqlens_q", "[num_seqs + 1]"),
        ("cu_seqlens_k", "[num_seqs + 1]"),
        ("sink", "[num_q_heads], may be null"),
        ("out", "[num_q_rows, num_q_heads, HEAD_DIM]"),
        ("lse", "[num_q_rows, num_q_heads]"),
        ("counts", "[5], full, partial, empty, without mask, pairs; null unless COUNT_TILES"),
        ("head_tiles", "div_ceil(num_q_heads / num_kv_heads, PACK)"),
        ("num_tiles", "num_q_rows / QUERY_TILE + num_seqs"),
        ("window", "INT_MAX for none"),
        ("scale", "softmax_scale * log2(e), or softmax_scale / softcap"),
        ("cap_log2", "softcap * log2(e)"),
    ),
)
BLOCK_ROWS = 64  # rows of a thread block: queries x heads of one group
NUM_THREADS = 128
MAX_PACK = 16  # heads of a group that share a tile
MAX_HEAD_DIM = 256  # a lane's accumulators: 16 rows x 256 columns a warp is half of the registers
HEAD_DIM_STEP = 16  # K of mma.m16n8k16
SHARED_ALIGN = 16  # bytes; of what a copy or a fragment's row moves
HOPPER_NEEDS = f"head_dim of {window_attention_sm90.HEAD_DIMS} and a positive softmax_scale"
INT32_MAX = int(np.iinfo(np.int32).max)


def pack_of(group: int) -> int:
    """Query heads of a group that share a tile: all, or equal parts of at most MAX_PACK."""
    return div_ceil(group, div_ceil(group, MAX_PACK))


def key_tile(head_dim: int) -> int:
    """Keys of a step; part of what decides an output's bits. A wide output leaves fewer registers
    for scores."""
    return 64 if head_dim <= 128 else 32


def shared_bytes(head_dim: int, *, count_tiles: bool = False) -> int:
    """sizeof(Shared) in grouped_tile.cuh, which asserts it."""
    row_bytes = head_dim * 2 + SHARED_ALIGN
    return (BLOCK_ROWS + 2 * key_tile(head_dim)) * row_bytes + SHARED_ALIGN * count_tiles


@cache
def macros_of(
    head_dim: int, group: int, *, fp16: bool, softcap: bool, count_tiles: bool = False
) -> MacroItems:
    """Macros of a build for a group of so many query heads a KV head."""
    return macro_set(
        HEAD_DIM=head_dim,
        KEY_TILE=key_tile(head_dim),
        PACK=pack_of(group),
        FP16=int(fp16),
        SOFTCAP=int(softcap),
        COUNT_TILES=int(count_tiles),
        SHARED_BYTES=shared_bytes(head_dim, count_tiles=count_tiles),
    )


WINDOW_ATTENTION = KernelSource(
    "window_attention",
    PARAMS,
    (
        macros_of(128, 4, fp16=False, softcap=False),  # mistral_7b
        macros_of(128, 2, fp16=False, softcap=True),  # gemma2_27b
        macros_of(128, 2, fp16=False, softcap=False),  # gemma3_27b
        macros_of(64, 8, fp16=False, softcap=False),  # gpt_oss_120b
        macros_of(64, 1, fp16=True, softcap=True),
        macros_of(96, 5, fp16=False, softcap=False),
        macros_of(128, 16, fp16=True, softcap=False),
        macros_of(256, 2, fp16=False, softcap=True),
        macros_of(256, 1, fp16=True, softcap=False),
        macros_of(128, 4, fp16=False, softcap=False, count_tiles=True),
    ),
)
KERNELS = (WINDOW_ATTENTION,)


def window_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sink: Any = None,
    sink_tokens: int = 0,
    stream: Any = None,
    variant: Variant | None = None,
    counts: Any = None,
) -> None:
    """q bf16 or fp16 [Tq, Hq, D], k, v [Tk, Hkv, D] -> out like q, lse float32 [Tq, Hq].

    `variant` forces one kernel where two serve the shape. `counts`: uint64 [5], to which the debug
    build of the portable kernel adds, of all heads' tiles: full, partial, empty, computed without a
    mask, and pairs of a query row and a key that took part.
    """
    scalars = {
        "softmax_scale": softmax_scale,
        "window": window,
        "softcap": softcap,
        "sink_tokens": sink_tokens,
    }
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse)
    check_window_attention(*arrays, sink=sink, **scalars)
    _check_shapes(q, k, out)
    check_current_device("window_attention", q)
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        check_alignment("window_attention", name, array, SHARED_ALIGN)
    if q.size == 0 or cu_seqlens_q.shape[0] == 1:
        return
    if counts is not None:
        variant = variant or "portable"  # the one that has a debug build
    hopper = window_attention_sm90.supports(q.shape[2], softmax_scale)
    chosen = choose_variant("window_attention", q.device.id, hopper, variant, HOPPER_NEEDS)
    if chosen == "sm_90a":
        window_attention_sm90.launch(*arrays, sink=sink, **scalars, stream=stream)
        return

    fields = portable_fields(q.shape, k.shape, cu_seqlens_q.shape[0] - 1, **scalars)
    options = {"fp16": q.dtype == FP16, "softcap": softcap > 0, "count_tiles": counts is not None}
    macros = macros_of(q.shape[2], q.shape[1] // k.shape[1], **options)  # exact: checked
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out", "lse")
    pointers = {name: device_pointer(array) for name, array in zip(names, arrays, strict=True)}
    pointers |= {"sink": device_pointer(sink), "counts": device_pointer(counts)}
    params = PARAMS.pack(**{name: (pointers | fields)[name] for name, _ in PARAMS.fields})

    kernel = get_kernel(WINDOW_ATTENTION, macros, dict(macros)["SHARED_BYTES"])
    kernel.launch((num_blocks(fields),), (NUM_THREADS,), params, stream)


def portable_fields(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    num_seqs: int,
    *,
    softmax_scale: float,
    window: int | None,
    softcap: float,
    sink_tokens: int,
) -> dict[str, Any]:
    """The scalars of the portable kernel's parameters."""
    rows, num_q_heads = q_shape[:2]
    group = num_q_heads // k_shape[1]  # exact: checked
    pack = pack_of(group)
    return {
        "num_q_rows": rows,
        "num_k_rows": k_shape[0],
        "num_seqs": num_seqs,
        "num_q_heads": num_q_heads,
        "num_kv_heads": k_shape[1],
        "head_tiles": div_ceil(group, pack),
        "num_tiles": rows // (BLOCK_ROWS // pack) + num_seqs,  # both rounded down, as on the device
        "window": INT32_MAX if window is None else min(window, INT32_MAX),
        "sink_tokens": min(sink_tokens, INT32_MAX),
        "scale": softmax_scale / softcap if softcap > 0 else scale_log2(softmax_scale),
        "cap_log2": scale_log2(softcap),
    }


def num_blocks(fields: dict[str, Any]) -> int:
    return fields["num_kv_heads"] * fields["head_tiles"] * fields["num_tiles"]


def _check_shapes(q: Any, k: Any, out: Any) -> None:
    """ArgumentError for what the kernels cannot hold."""
    op, head_dim = "window_attention", q.shape[2]
    if head_dim % HEAD_DIM_STEP != 0 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ArgumentError(
            f"{op}: head_dim={head_dim} but the CUDA kernels need a multiple of {HEAD_DIM_STEP}, "
            f"at most {MAX_HEAD_DIM}; use the cpu or reference backend"
        )
    if out.dtype != q.dtype:
        raise ArgumentError(f"{op}: out.dtype={out.dtype} but on a GPU it must be {q.dtype}")
    if max(q.shape[0], k.shape[0]) > INT32_MAX:
        raise ArgumentError(f"{op}: q.shape[0]={q.shape[0]} but rows are counted in int32")
