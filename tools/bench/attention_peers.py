"""window_attention's work by other libraries: FlexAttention and SDPA of PyTorch, a Triton kernel of
one loop, cuDNN through JAX. Each is checked against ours, which was checked against float64.

A library that is not installed, or refuses a shape, is told as failed and the others are timed. The
row's peer is the fastest; `peers` holds all. PyTorch and Triton are captured and timed by the clock
of ours; JAX runs on streams of its own, so it is timed by the host's clock over a loop of calls.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .common import BenchError, Place, Shape, Work, times_of
from .peers import RELATIVE_ERROR, capture, torch_view

MASK_TOKENS = 8192  # longest sequence whose boolean mask is tried
FLEX_BLOCK = 128
JAX_CALLS = 20  # of a timed loop: launching is slow, and runs ahead of the GPU
MESSAGE_CHARS = 300


@dataclass(frozen=True)
class Peer:
    """calls: one an input set; result(): the first call's output, a tensor [T, Hq, D] bf16; wait:
    None where the calls can be captured, else it returns when they are done."""

    calls: list[Callable[[], Any]]
    result: Callable[[], Any]
    wait: Callable[[], None] | None = None


def measure_attention_peers(
    torch: Any, place: Place, work: Work, shape: Shape, repeats: int
) -> dict[str, Any]:
    """peer, peer_us, what its check found, and the others. BenchError where none ran."""
    ours = torch_view(torch, work.parts["outputs"][0][0]).view(torch.bfloat16)
    times: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in makers(work):
        try:
            torch.compiler.reset()
            peer = make(torch, place, work, shape["sequences"])
            times[name], found[name] = _timed_and_checked(torch, place, peer, ours, name, repeats)
        except Exception as error:  # one peer's fault must not lose the others
            times.pop(name, None)
            failed[name] = f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
        peer = None
        torch.cuda.empty_cache()
    if not times:
        raise BenchError(f"no peer ran: {failed}")
    best = min(times, key=lambda name: median(times[name]))
    return {
        "peer": best,
        "peer_us": round(median(times[best]), 3),
        "peer_min_us": round(min(times[best]), 3),
        "peer_check": {"relative_error": found[best]},
        "peers": {name: round(median(each), 3) for name, each in times.items()},
        "peers_failed": failed,
    }


def makers(work: Work) -> Iterator[tuple[str, Callable[..., Peer]]]:
    """The libraries that know this layer's attention, by name."""
    layer, window = work.parts["layer"], work.parts["window"]
    yield "FlexAttention", flex_attention
    plain = not layer.softcap and not layer.sink
    if plain and window is None:
        yield "SDPA, cuDNN", lambda *args: sdpa(*args, backend="CUDNN_ATTENTION")
        yield "SDPA, FlashAttention", lambda *args: sdpa(*args, backend="FLASH_ATTENTION")
    longest = work.parts["inputs"][0][0].shape[0]
    if plain and window is not None and longest <= MASK_TOKENS:
        yield "SDPA with a mask", sdpa_mask
    if not layer.softcap:
        yield "Triton, one loop", triton_loop
    if plain:
        yield "cuDNN by JAX", jax_cudnn


def _timed_and_checked(
    torch: Any, place: Place, peer: Peer, ours: Any, name: str, repeats: int
) -> tuple[list[float], float]:
    if peer.wait is None:
        replay = capture(torch, place, peer.calls)
        times = times_of(place, replay, repeats)
    else:
        place.watch.sync()
        times = [_loop_us(peer) for _ in range(repeats + 1)][1:]  # the first one compiles
    theirs = peer.result().reshape(ours.shape)
    error = float((ours.float() - theirs.float()).norm() / ours.float().norm())
    if not error < RELATIVE_ERROR:
        raise BenchError(f"{name}: relative error {error:.3e} against ours")
    return times, error


def _loop_us(peer: Peer) -> float:
    start = time.perf_counter()
    for i in range(JAX_CALLS):
        peer.calls[i % len(peer.calls)]()
    peer.wait()
    return (time.perf_counter() - start) * 1e6 / JAX_CALLS


def batches(torch: Any, work: Work, num_seqs: int) -> list[tuple[Any, ...]]:
    """(q, k, v) of each input set as [num_seqs, heads, length, head_dim], views of our arrays."""
    sets = []
    for arrays in work.parts["inputs"]:
        views = (torch_view(torch, x).view(torch.bfloat16) for x in arrays)
        sets.append(tuple(x.view(num_seqs, -1, *x.shape[1:]).transpose(1, 2) for x in views))
    return sets


def _as_ours(out: Any) -> Any:
    """[num_seqs, heads, length, head_dim] -> [T, heads, head_dim]."""
    return out.transpose(1, 2).flatten(0, 1)


def _keep_first(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Peer:
    """Calls of a function that returns its output; the first set's is kept."""
    kept: dict[int, Any] = {}

    def call(i: int) -> None:
        kept[i] = function(*sets[i])

    calls = [lambda i=i: call(i) for i in range(len(sets))]
    return Peer(calls, lambda: _as_ours(kept[0]))


def flex_attention(torch: Any, place: Place, work: Work, num_seqs: int) -> Peer:
    """Compiled FlexAttention with a BlockMask of the window; a sink as a factor from the LSE."""
    from torch.nn.attention import flex_attention as flex

    layer, window = work.parts["layer"], work.parts["window"]
    sets = batches(torch, work, num_seqs)
    length = sets[0][0].shape[2]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q if window is None else (k <= q) & (q - k < window)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return layer.softcap * torch.tanh(score / layer.softcap)

    device = sets[0][0].device
    block_mask = flex.create_block_mask(
        mask_mod, None, None, length, length, device=device, BLOCK_SIZE=FLEX_BLOCK
    )
    options = {"block_mask": block_mask, "scale": layer.softmax_scale, "enable_gqa": True}
    options |= {"score_mod": score_mod} if layer.softcap else {}
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    if not layer.sink:
        return _keep_first(lambda q, k, v: compiled(q, k, v, **options), sets)
    sink = torch_view(torch, work.parts["sink"])[:, None, None]

    @torch.compile(dynamic=False)
    def with_sink(q: Any, k: Any, v: Any) -> Any:
        out, lse = flex.flex_attention(q, k, v, return_lse=True, **options)
        return (out * torch.sigmoid(lse[..., None] - sink)).to(out.dtype)

    return _keep_first(with_sink, sets)


def sdpa(torch: Any, place: Place, work: Work, num_seqs: int, *, backend: str) -> Peer:
    """Causal scaled_dot_product_attention on one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options = {"is_causal": True, "scale": work.parts["layer"].softmax_scale, "enable_gqa": True}

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return _keep_first(attend, batches(torch, work, num_seqs))


def sdpa_mask(torch: Any, place: Place, work: Work, num_seqs: int) -> Peer:
    """scaled_dot_product_attention with a boolean mask: all pairs are computed."""
    sets = batches(torch, work, num_seqs)
    position = torch.arange(sets[0][0].shape[2], device=sets[0][0].device)
    back = position[:, None] - position
    mask = (back >= 0) & (back < work.parts["window"])
    options = {"attn_mask": mask, "scale": work.parts["layer"].softmax_scale, "enable_gqa": True}

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return _keep_first(attend, sets)


def triton_loop(torch: Any, place: Place, work: Work, num_seqs: int) -> Peer:
    """A Triton kernel with the window in its loop bounds and one masked loop."""
    from .triton_window import make_attention

    layer, window = work.parts["layer"], work.parts["window"]
    sink = None if work.parts["sink"] is None else torch_view(torch, work.parts["sink"])
    sets = batches(torch, work, num_seqs)
    attend = make_attention(sets[0], window=window, softmax_scale=layer.softmax_scale, sink=sink)
    return _keep_first(attend, sets)


def jax_cudnn(torch: Any, place: Place, work: Work, num_seqs: int) -> Peer:
    """jax.nn.dot_product_attention on cuDNN, [num_seqs, length, heads, head_dim]."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is ours too
    import jax
    from jax import dlpack
    from jax import numpy as jnp

    layer, window = work.parts["layer"], work.parts["window"]
    local = {} if window is None else {"local_window_size": (window - 1, 0)}

    @jax.jit
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, scale=layer.softmax_scale, is_causal=True, implementation="cudnn", **local
        )

    def tensor(array: Any) -> Any:
        bits = dlpack.from_dlpack(array.reshape(num_seqs, -1, *array.shape[1:]))
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)

    sets = [tuple(tensor(x) for x in arrays) for arrays in work.parts["inputs"]]
    last: list[Any] = [None] * len(sets)

    def call(i: int) -> None:
        last[i] = attend(*sets[i])

    def result() -> Any:
        host = np.asarray(last[0].astype(jnp.float32))
        return torch.from_numpy(host).cuda()

    calls = [lambda i=i: call(i) for i in range(len(sets))]
    return Peer(calls, result, lambda: jax.block_until_ready(last))
