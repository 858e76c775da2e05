"""The same work by hand in PyTorch, compiled with torch.compile, beside ours in the same process.

PyTorch is imported here only, when peers are asked for; it is never a dependency. A peer reads and
writes the very arrays of our benchmark, is captured in a CUDA graph with one call an input set, and
is timed by the same clock with the same flush. Its result is checked too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from ...layouts.formats import E4M3_MAX, E8M0_BIAS, MX_BLOCK
from ...rawkernels.timing import Replay
from .common import BenchError, Place, Shape, Work, times_of

NAME = "torch.compile by hand"
WARM_CALLS = 2
# Compiling is slow.
DECODE_SHAPES = {"heads": (32, 64), "queries": (1, 6), "sequences": (1, 64, 256, 512)}
# Two bf16 kernels that round in other places differ by a few units in the last place of the largest
# output; a wrong one differs by all of it.
RELATIVE_ERROR = 2e-2
FLOAT_MANTISSA_BITS, FLOAT_MANTISSA = 23, 0x7FFFFF
CEIL_MANTISSA = 0x600000  # mantissa of 448: above it the block's largest needs the next scale
E4M3_EXPONENT = 8  # floor(log2(448))


def load_torch() -> Any:
    """PyTorch with a GPU, or None."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch if torch.cuda.is_available() else None


def has_peer(op: str, shape: Shape) -> bool:
    """Whether there is a peer for that operation and shape."""
    if op == "window_decode":
        return all(shape[axis] in values for axis, values in DECODE_SHAPES.items())
    return op in ("quantize_mxfp8", "dequantize_mxfp8", "window_attention")


def measure_peer(op: str, place: Place, work: Work, shape: Shape, repeats: int) -> dict[str, Any]:
    """peer, peer_us and what its check found. Raises BenchError where its result is wrong."""
    torch = load_torch()
    if torch is None:
        raise BenchError("peers need PyTorch with a GPU")
    if op == "window_attention":
        from .attention_peers import measure_attention_peers

        return measure_attention_peers(torch, place, work, shape, repeats)
    makers = {
        "window_decode": decode_calls,
        "quantize_mxfp8": quantize_calls,
        "dequantize_mxfp8": dequantize_calls,
    }
    name, make = NAME, makers[op]
    if op == "window_decode" and not work.parts["layers"][0].record_format.latent:
        from .decode_peers import NAME as name
        from .decode_peers import sdpa_calls as make
    torch.compiler.reset()
    calls, check = make(torch, place, work, shape)
    replay = capture(torch, place, calls)
    found = check()
    times = times_of(place, replay, repeats)
    del calls, check, replay
    torch.cuda.empty_cache()
    return {
        "peer": name,
        "peer_us": round(median(times), 3),
        "peer_min_us": round(min(times), 3),
        "peer_check": found,
    }


def torch_view(torch: Any, array: Any) -> Any:
    """A tensor over the memory of a CuPy array: bf16 bits come as int16, and bytes as uint8."""
    bits = array.view(np.int16) if array.dtype == np.uint16 else array
    return torch.from_dlpack(bits)


@contextmanager
def on_stream(torch: Any, place: Place) -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.ExternalStream(place.watch.stream)):
        yield


def capture(torch: Any, place: Place, calls: list[Callable[[], Any]]) -> Replay:
    """A CUDA graph of the calls, launched on the stream of the place."""
    place.watch.sync()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            for call in calls:
                call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    torch.cuda.synchronize()

    def run() -> None:
        with on_stream(torch, place):
            graph.replay()

    run()
    place.watch.sync()
    return Replay(run, len(calls), None)


def decode_calls(
    torch: Any, place: Place, work: Work, shape: Shape
) -> tuple[list[Callable[[], Any]], Callable[[], dict[str, Any]]]:
    """Gather the records, dequantize to bf16, product, softmax with sink, product. Without the
    rotation of the output, which is less work than ours where the layer asks for it."""
    parts = work.parts
    sequences, layers = parts["sequences"], parts["layers"]
    layer = layers[0]
    queries, heads, head_dim = shape["queries"], shape["heads"], layer.record_format.head_dim
    softmax_scale = layer.softmax_scale
    newest = sequences.first + queries - 1
    keys = layer.window + queries - 1
    oldest = newest - keys + 1
    where = (oldest[:, None] + np.arange(keys)) % layer.ring_len
    # Query i of a step sees the keys i .. i + window - 1 of the gathered ones.
    column, row = np.arange(keys), np.arange(queries)[:, None]
    hidden = (column < row) | (column >= row + layer.window)
    device = {"device": torch.device("cuda", torch.cuda.current_device())}
    index = torch.tensor(where, dtype=torch.int64, **device)
    states = torch.tensor(sequences.state_ids, dtype=torch.int64, **device)[:, None]
    mask = torch.tensor(np.where(hidden, -np.inf, 0.0), dtype=torch.float32, **device)
    sink = torch_view(torch, parts["sink"])
    rings = [_ring_of(torch, parts["slab"], parts["layout"], each) for each in layers]
    number = sequences.num_seqs

    def decode(q: Any, ring: Any, out: Any) -> None:
        records = ring[states, index]
        values = records[..., :head_dim].contiguous().view(torch.float8_e4m3fn)
        codes = records[..., head_dim:].to(torch.int32)
        scales = torch.bitwise_left_shift(codes, FLOAT_MANTISSA_BITS).view(torch.float32)
        blocks = values.to(torch.float32).view(number, keys, -1, MX_BLOCK) * scales[..., None]
        kv = blocks.view(number, keys, head_dim).to(torch.bfloat16)
        wide = q.view(number, queries * heads, head_dim)
        scores = torch.bmm(wide, kv.transpose(1, 2)).to(torch.float32) * softmax_scale
        scores = scores.view(number, queries, heads, keys) + mask[:, None]
        most = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
        weights = torch.exp(scores - most)
        total = weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - most)
        weights = (weights / total).to(torch.bfloat16).view(number, queries * heads, keys)
        out.copy_(torch.bmm(weights, kv).view(out.shape))

    compiled = torch.compile(decode, dynamic=False)
    tensors = []
    for q, ring in zip(parts["queries"], rings, strict=True):
        bits = torch_view(torch, q).view(torch.bfloat16)
        tensors.append((bits, ring, torch.empty_like(bits)))

    def check() -> dict[str, Any]:
        # Ours was checked against float64; the rotation of its last dims is left out of this.
        dims = layer.rope.dims if layer.inverse_rope_out else 0
        same = slice(0, head_dim - dims)
        ours = torch_view(torch, parts["outputs"][0][0]).view(torch.bfloat16)[..., same].float()
        theirs = tensors[0][2][..., same].float()
        error = float((ours - theirs).norm() / ours.norm())
        if not error < RELATIVE_ERROR:
            raise BenchError(f"peer {NAME}: relative error {error:.3e} against ours")
        return {"relative_error": error}

    return [lambda t=t: compiled(*t) for t in tensors], check


def _ring_of(torch: Any, slab: Any, layout: Any, layer: Any) -> Any:
    """uint8 [num_state_slots, ring_len, record_bytes] with the stride of a slot."""
    return torch_view(torch, layout.view(slab, layer.id)[:, :, 0])


def quantize_calls(
    torch: Any, place: Place, work: Work, shape: Shape
) -> tuple[list[Callable[[], Any]], Callable[[], dict[str, Any]]]:
    """Scales from the float's bits, elements by a multiplication, a clamp and a cast."""
    parts = work.parts
    ceil, amax_floor = parts["scale_rounding"] == "ceil", parts["amax_floor"]

    def quantize(x: Any, values: Any, scales: Any) -> None:
        blocks = x.view(x.shape[0], -1, MX_BLOCK).to(torch.float32)
        amax = blocks.abs().amax(-1).clamp(min=amax_floor)
        bits = amax.view(torch.int32)
        code = (bits >> FLOAT_MANTISSA_BITS) - E4M3_EXPONENT
        if ceil:
            code = code + ((bits & FLOAT_MANTISSA) > CEIL_MANTISSA).to(torch.int32)
        code = code.clamp(min=0)
        inverse = ((2 * E8M0_BIAS - code) << FLOAT_MANTISSA_BITS).view(torch.float32)
        small = (blocks * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
        values.copy_(small.to(torch.float8_e4m3fn).view(values.shape))
        scales.copy_(code.to(torch.uint8))

    compiled = torch.compile(quantize, dynamic=False)
    tensors = []
    for x in parts["inputs"]:
        bits = torch_view(torch, x).view(torch.bfloat16)
        blocks = bits.shape[1] // MX_BLOCK  # exact: head_dim is a multiple
        values = torch.empty(bits.shape, dtype=torch.float8_e4m3fn, device=bits.device)
        scales = torch.empty((bits.shape[0], blocks), dtype=torch.uint8, device=bits.device)
        tensors.append((bits, values, scales))

    def check() -> dict[str, Any]:
        ours = [torch_view(torch, x) for x in parts["outputs"][0]]
        theirs = (tensors[0][1].view(torch.uint8), tensors[0][2])
        pairs = zip(ours, theirs, strict=True)
        different = sum(int((a != b).sum()) for a, b in pairs)
        if different:
            raise BenchError(f"peer {NAME}: {different} bytes differ from ours")
        return {"different": different}

    return [lambda t=t: compiled(*t) for t in tensors], check


def dequantize_calls(
    torch: Any, place: Place, work: Work, shape: Shape
) -> tuple[list[Callable[[], Any]], Callable[[], dict[str, Any]]]:
    """Elements times the power of two that a scale byte stands for, to the dtype of ours."""
    parts = work.parts
    first = parts["outputs"][0]
    dtype = torch.float32 if first.dtype == np.float32 else torch.bfloat16

    def dequantize(values: Any, codes: Any, out: Any) -> None:
        bits = torch.bitwise_left_shift(codes.to(torch.int32), FLOAT_MANTISSA_BITS)
        wide = values.to(torch.float32).view(values.shape[0], -1, MX_BLOCK)
        out.copy_((wide * bits.view(torch.float32)[..., None]).view(out.shape))

    compiled = torch.compile(dequantize, dynamic=False)
    tensors = []
    for values, scales in parts["inputs"]:
        elements = torch_view(torch, values).view(torch.float8_e4m3fn)
        out = torch.empty(elements.shape, dtype=dtype, device=elements.device)
        tensors.append((elements, torch_view(torch, scales), out))

    def check() -> dict[str, Any]:
        ours = torch_view(torch, first)
        ours = ours.view(dtype) if ours.dtype != dtype else ours
        different = int((ours != tensors[0][2]).sum())
        if different:
            raise BenchError(f"peer {NAME}: {different} numbers differ from ours")
        return {"different": different}

    return [lambda t=t: compiled(*t) for t in tensors], check
