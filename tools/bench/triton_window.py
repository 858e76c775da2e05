"""A Triton kernel of windowed attention, as its users write it: the window in the loop bounds, one
loop that masks every tile. A peer of window_attention; imported where Triton is asked for."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

# Tiles, warps and stages that are tried; the fastest for a shape is kept.
CONFIGS = (
    (64, 64, 4, 3),
    (64, 32, 4, 4),
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
)
LOG2_E = 1.4426950408889634


@triton.jit
def window_loop(
    q_at,
    k_at,
    v_at,
    out_at,
    sink_at,
    length,
    window,
    scale_log2,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    heads: tl.constexpr,
    group: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINK: tl.constexpr,
):
    tile, pair = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), pair % heads
    q_at += batch * q_batch + head * q_head
    out_at += batch * q_batch + head * q_head
    k_at += batch * k_batch + head // group * k_head
    v_at += batch * k_batch + head // group * k_head
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    q_places = rows.to(tl.int64)[:, None] * q_row + dims[None, :]
    q = tl.load(q_at + q_places, mask=rows[:, None] < length, other=0.0)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    start = tl.maximum(tile * BLOCK_M - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum((tile + 1) * BLOCK_M, length)
    for first in range(start, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        k_places = keys.to(tl.int64)[:, None] * k_row + dims[None, :]
        k = tl.load(k_at + k_places, mask=keys[:, None] < length, other=0.0)
        back = rows[:, None] - keys[None, :]
        scores = tl.where((back >= 0) & (back < window), tl.dot(q, tl.trans(k)), -float("inf"))
        newest = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
        base = tl.where(newest == -float("inf"), 0.0, newest)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        correction = tl.exp2(maximum - base)
        total = total * correction + tl.sum(weights, 1)
        v = tl.load(v_at + k_places, mask=keys[:, None] < length, other=0.0)
        acc = acc * correction[:, None] + tl.dot(weights.to(v.dtype), v)
        maximum = newest
    if SINK:
        total += tl.exp2(tl.load(sink_at + head) * 1.4426950408889634 - maximum)
    out = acc / total[:, None]
    tl.store(out_at + q_places, out.to(out_at.dtype.element_ty), mask=rows[:, None] < length)


def make_attention(
    sample: tuple[Any, Any, Any], *, window: int | None, softmax_scale: float, sink: Any = None
) -> Callable[[Any, Any, Any], Any]:
    """attend(q, k, v) -> out for tensors like `sample`, [batch, heads, length, head_dim] with any
    strides but the last; causal. The fastest of CONFIGS on the sample is taken."""
    configs = CONFIGS
    if sample[0].is_cuda:
        times = {
            c: _time(lambda c=c: _launch(c, *sample, window, softmax_scale, sink)) for c in CONFIGS
        }
        configs = sorted(CONFIGS, key=times.get)
    return lambda q, k, v: _launch(configs[0], q, k, v, window, softmax_scale, sink)


def _time(run: Callable[[], Any]) -> float:
    try:
        return triton.testing.do_bench(run, warmup=5, rep=20)
    except (triton.runtime.errors.OutOfResources, triton.compiler.CompilationError):
        return float("inf")


def _launch(
    config: tuple[int, int, int, int],
    q: Any,
    k: Any,
    v: Any,
    window: int | None,
    softmax_scale: float,
    sink: Any,
) -> Any:
    block_m, block_n, warps, stages = config
    batch, heads, length, dim = q.shape
    out = torch.empty_like(q)  # keeps the strides of q
    assert out.stride() == q.stride()
    assert v.stride() == k.stride()
    window_loop[(triton.cdiv(length, block_m), batch * heads)](
        q,
        k,
        v,
        out,
        q if sink is None else sink,
        length,
        length if window is None else window,
        softmax_scale * LOG2_E,
        *q.stride()[:3],
        *k.stride()[:3],
        heads=heads,
        group=heads // k.shape[1],  # exact
        DIM=dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SINK=sink is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out
