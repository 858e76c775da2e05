"""Launcher of window_attention_sm90.cu and window_attention_sm90_band.cu, for Hopper GPUs."""

from functools import cache
from typing import Any, NamedTuple

from ...layouts.sizes import align_up, div_ceil, div_exact
from ..arrays import FP16
from ..device.kernel_source import (
    HOPPER_ARCHS,
    HOPPER_SHARED_BYTES,
    KernelSource,
    MacroItems,
    ParamsStruct,
    macro_set,
)
from ..device.module import device_pointer, get_kernel
from ..device.probe import multiprocessors
from ..device.streams import cupy_stream
from ..device.tensor_map import head_tensor_map
from .attention_shapes import scale_log2

HEAD_DIMS = (64, 96, 128)
ROW_TILE = 64  # rows of a warpgroup's products
WARP_ROWS = 16
CHUNK = 16  # keys of a step of O = P V
MAX_HEADS = 16  # a warp holds whole tokens
WARPGROUP_THREADS = 128
NO_WINDOW = 2**30  # longer than any sequence, and no sum of it with a position overflows
MAX_BAND_WINDOW = 128  # longest window of the band kernel
STREAM_CONSUMERS = 2
MOST_OF_NARROW = 0.45  # of a key tile; a product of its own is not overlapped with another
LEAST_PRODUCT = 32  # keys
# Rounds of all thread blocks that the query tiles of one head must fill to go head by head: with
# fewer, the ends of the heads leave blocks idle (1.7 times the time at 4,096 tokens of 8 KV heads).
MIN_HEAD_ROUNDS = 7.5
# Chunks of a band, and of the pieces it is taken in; other bands are filled up.
PIECE_CHUNKS = {2: 2, 3: 3, 4: 4, 5: 5, 6: 3, 8: 4, 9: 3, 10: 5, 12: 4}

PARAMS = ParamsStruct(
    "Params",
    (
        ("q_map", "TensorMap"),
        ("k_map", "TensorMap"),
        ("v_map", "TensorMap"),
        ("out_map", "TensorMap"),
        ("out", "uint16_t*"),
        ("lse", "float*"),
        ("sink", "const float*"),
        ("cu_seqlens_q", "const int32_t*"),
        ("cu_seqlens_k", "const int32_t*"),
        ("scale_log2", "float"),
        ("pre_scale", "float"),
        ("window", "int32_t"),
        ("sink_tokens", "int32_t"),
        ("num_q_heads", "int32_t"),
        ("heads_per_kv", "int32_t"),
        ("num_seqs", "int32_t"),
        ("num_k", "int32_t"),
        ("head_major", "int32_t"),
    ),
    docs=(
        ("q_map", "[num_q, num_q_heads, HEAD_DIM], boxes of 64 / HEADS tokens, HEADS heads"),
        ("k_map", "[num_k, num_kv_heads, HEAD_DIM], boxes of keys of one head"),
        ("v_map", "the same of the values"),
        ("out_map", "as q_map of the output, boxes of 16 / HEADS tokens, HEADS heads"),
        ("out", "[num_q, num_q_heads, HEAD_DIM]"),
        ("lse", "[num_q, num_q_heads]"),
        ("sink", "[num_q_heads], may be null"),
        ("cu_seqlens_q", "[num_seqs + 1]"),
        ("cu_seqlens_k", "[num_seqs + 1]"),
        ("scale_log2", "of what is exponentiated: softmax_scale or softcap, times log2(e)"),
        ("pre_scale", "softmax_scale / softcap, read where SOFTCAP"),
        ("window", "keys that a query sees, itself included"),
        ("num_k", "rows of k and v"),
        ("head_major", "1: one kv head after the other, 0: all heads of nearby tokens"),
    ),
)


class Shape(NamedTuple):
    """What a build depends on."""

    head_dim: int
    fp16: bool
    heads_per_kv: int
    window: int  # NO_WINDOW without one
    softcap: bool
    sink_tokens: bool


def packed_heads(heads_per_kv: int) -> int:
    """Query heads of a row tile: they share keys, so the more the fewer tokens and the fewer keys
    a tile has. The largest power of 2 in `heads_per_kv`, at most 16."""
    return min(heads_per_kv & -heads_per_kv, MAX_HEADS)


def is_band(shape: Shape) -> bool:
    """Whether the kernel that holds a tile's whole band of keys serves the shape."""
    return shape.window <= MAX_BAND_WINDOW and not shape.sink_tokens


def _common(shape: Shape, consumers: int, registers: tuple[int, int]) -> dict[str, int]:
    return {
        "HEAD_DIM": shape.head_dim,
        "HEADS": packed_heads(shape.heads_per_kv),
        "FP16": int(shape.fp16),
        "SOFTCAP": int(shape.softcap),
        "CONSUMERS": consumers,
        "PRODUCER_REGISTERS": registers[0],
        "CONSUMER_REGISTERS": registers[1],
        "SHARED_BYTES": HOPPER_SHARED_BYTES,
    }


TWO, THREE = (40, 232), (32, 160)  # registers of producer and consumers, by consumer warpgroups


@cache
def band_macros(shape: Shape) -> MacroItems:
    """Macros of window_attention_sm90_band.cu. The rings hold what fits beside the queries."""
    heads = packed_heads(shape.heads_per_kv)
    step_chunks = max(div_exact(ROW_TILE, heads), CHUNK) // CHUNK  # exact: powers of 2
    band = div_ceil(shape.window - 1, CHUNK) + step_chunks
    band = min(chunks for chunks in PIECE_CHUNKS if chunks >= band)
    small = shape.head_dim <= 64
    wide = step_chunks > 1 and not small  # long bands leave room for two warpgroups' queries
    consumers, registers = (2, TWO) if wide else (3, THREE)
    return macro_set(
        **_common(shape, consumers, registers),
        WINDOW=shape.window,
        HISTORY_CHUNKS=band - step_chunks,
        PIECE_CHUNKS=band if small else PIECE_CHUNKS[band],  # one product where it fits
        AHEAD_CHUNKS=8 if small else (6 if step_chunks == 2 else 4),
        Q_STAGES=6 if small else (4 if wide else 3),
        OUT_STAGES=1 if small or wide else 2,
    )


def narrow_tile(shape: Shape, key_tile: int) -> int:
    """Keys of a query tile's newest key tile that have a product of their own, 0 where there is no
    such product: all key tiles but this one are full of keys that the query tile sees. It changes
    no bit, and saves 7 % where it helps; where it seldom does it costs 1 %."""
    tokens = STREAM_CONSUMERS * div_exact(ROW_TILE, packed_heads(shape.heads_per_kv))
    rest = (shape.window - 1 + tokens) % key_tile
    if shape.window == NO_WINDOW or not 0 < rest <= key_tile * MOST_OF_NARROW:
        return 0
    return max(align_up(rest, CHUNK), LEAST_PRODUCT)


@cache
def stream_macros(shape: Shape) -> MacroItems:
    """Macros of window_attention_sm90.cu."""
    small = shape.head_dim <= 64
    key_tile = 192 if small else 144
    return macro_set(
        **_common(shape, STREAM_CONSUMERS, TWO),
        KEY_TILE=key_tile,
        NARROW_TILE=narrow_tile(shape, key_tile),
        KV_STAGES=3 if small else 2,
        Q_STAGES=2,
        OUT_STAGES=1,
        TAKE_TURNS=1,
    )


def _shape(
    head_dim: int, heads_per_kv: int, window: int, fp16: bool = False, softcap: bool = False
) -> Shape:
    return Shape(head_dim, fp16, heads_per_kv, window, softcap, False)


WINDOW_ATTENTION_SM90 = KernelSource(
    "window_attention_sm90",
    PARAMS,
    tuple(
        stream_macros(shape)
        for shape in (
            _shape(128, 4, NO_WINDOW),
            _shape(128, 4, 1024),
            _shape(64, 8, NO_WINDOW),
            _shape(96, 1, NO_WINDOW, fp16=True),
            _shape(128, 2, NO_WINDOW, softcap=True),
        )
    ),
    HOPPER_ARCHS,
)
WINDOW_ATTENTION_SM90_BAND = KernelSource(
    "window_attention_sm90_band",
    PARAMS,
    tuple(
        band_macros(shape)
        for shape in (
            _shape(128, 4, 128),
            _shape(64, 8, 128),
            _shape(128, 1, 128, fp16=True),
            _shape(128, 2, 100, softcap=True),
            _shape(96, 16, 1),
        )
    ),
    HOPPER_ARCHS,
)
KERNELS = (WINDOW_ATTENTION_SM90, WINDOW_ATTENTION_SM90_BAND)


def supports(head_dim: int, softmax_scale: float) -> bool:
    """Whether the Hopper kernels serve a call. It depends on nothing that changes from batch to
    batch, because the portable kernel's bits are others."""
    return head_dim in HEAD_DIMS and softmax_scale > 0  # the largest score is taken before scaling


def make_shape(q: Any, k: Any, window: int | None, softcap: float, sink_tokens: int) -> Shape:
    return Shape(
        q.shape[2],
        q.dtype == FP16,
        div_exact(q.shape[1], k.shape[1]),
        NO_WINDOW if window is None else min(window, NO_WINDOW),
        softcap > 0,
        sink_tokens > 0,
    )


def launch(
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
    num_blocks: int | None = None,
    tuning: tuple[tuple[str, int], ...] = (),
) -> None:
    """window_attention on arguments that its checks and `supports` have passed; the arrays lie on
    the current device and start at multiples of 16. q, k, v, out: bf16 bits or float16.

    `num_blocks` overrides one thread block a multiprocessor, for tests; `tuning` macros of the
    build, for measurements.
    """
    if q.shape[0] == 0:
        return
    if k.shape[0] == 0:
        _no_keys(out, lse, stream)
        return
    shape = make_shape(q, k, window, softcap, sink_tokens)
    band = is_band(shape)
    source = WINDOW_ATTENTION_SM90_BAND if band else WINDOW_ATTENTION_SM90
    macros = band_macros(shape) if band else stream_macros(shape)
    if tuning:
        macros = macro_set(**(dict(macros) | dict(tuning)))
    arrays = (q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k)
    resident = num_blocks or multiprocessors()
    params, blocks = _pack(
        dict(macros), shape, arrays, softmax_scale, softcap, sink_tokens, resident
    )

    kernel = get_kernel(source, macros, HOPPER_SHARED_BYTES)
    threads = (dict(macros)["CONSUMERS"] + 1) * WARPGROUP_THREADS
    grid = min(blocks, resident)
    kernel.launch((grid,), (threads,), params, stream)


def _pack(
    build: dict[str, Any],
    shape: Shape,
    arrays: tuple[Any, ...],
    softmax_scale: float,
    softcap: float,
    sink_tokens: int,
    resident: int,
) -> tuple[Any, int]:
    """The parameters of a launch on `resident` thread blocks at once, and the most thread blocks
    that may have work. `arrays`: q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k."""
    q, k, v, out, lse, sink, cu_seqlens_q, cu_seqlens_k = arrays
    heads, num_seqs = build["HEADS"], cu_seqlens_q.shape[0] - 1
    keys = build.get("KEY_TILE", CHUNK)
    step = ROW_TILE // heads * (build["CONSUMERS"] if "KEY_TILE" in build else 1)
    tiles = q.shape[0] // step + 2 * num_seqs  # of a head; at most two of a sequence are not whole

    def map_of(array: Any, box_tokens: int, box_heads: int) -> Any:
        return head_tensor_map(
            device_pointer(array), *array.shape, box_tokens, box_heads, shape.fp16
        )

    params = PARAMS.pack(
        q_map=map_of(q, ROW_TILE // heads, heads),  # exact: heads are a power of 2, at most 16
        k_map=map_of(k, keys, 1),
        v_map=map_of(v, keys, 1),
        out_map=map_of(out, WARP_ROWS // heads, heads),
        out=device_pointer(out),
        lse=device_pointer(lse),
        sink=device_pointer(sink),
        cu_seqlens_q=device_pointer(cu_seqlens_q),
        cu_seqlens_k=device_pointer(cu_seqlens_k),
        scale_log2=scale_log2(softcap if softcap > 0 else softmax_scale),
        pre_scale=softmax_scale / softcap if softcap > 0 else 1.0,
        window=shape.window,
        sink_tokens=min(sink_tokens, NO_WINDOW),
        num_q_heads=q.shape[1],
        heads_per_kv=shape.heads_per_kv,
        num_seqs=num_seqs,
        num_k=k.shape[0],
        head_major=int(shape.window == NO_WINDOW and tiles >= MIN_HEAD_ROUNDS * resident),
    )
    return params, tiles * div_exact(q.shape[1], heads)


def _no_keys(out: Any, lse: Any, stream: Any) -> None:
    with cupy_stream(stream):
        out.fill(0)
        lse.fill(float("-inf"))
