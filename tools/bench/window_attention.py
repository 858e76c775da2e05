"""window_attention: prefill of `sequences` equal prompts, `tokens` tokens in all, of one layer.

Measures whole prompts (every query with its own key) for the heads of one kind of layer: `mistral`
32 query and 8 KV heads of 128; `gpt_oss` 64 and 8 of 64 with sinks; `gemma2` 32 and 16 of 128 with
a cap of 50; `gemma3` the same without. Bound by matrix products, 4 x head_dim FLOPs a visible pair
and head; by bytes where the window is shortest: q, k, v and out once. `visited_tflops` counts all
pairs of the 128 x 128 tiles that a window touches, for comparison with kernels of such tiles.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.tiles import count_scores, count_tiles
from ...rawkernels.reference.bound import expected_attention
from .common import ATTENTION_FLOPS, Place, Shape, Work, num_sets
from .inputs import random_bf16, sample_rows, upload
from .window_decode import BF16_BYTES, within_bound


@dataclass(frozen=True)
class Layer:
    """Heads of a layer, as published for a model."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sink: bool = False
    softcap: float = 0.0
    query_dim: int = 0  # softmax_scale is its square root's inverse; 0: head_dim

    @property
    def softmax_scale(self) -> float:
        return (self.query_dim or self.head_dim) ** -0.5


LAYERS = {
    "mistral": Layer(32, 8, 128),
    "gpt_oss": Layer(64, 8, 64, sink=True),
    "gemma2": Layer(32, 16, 128, softcap=50.0, query_dim=144),
    "gemma3": Layer(32, 16, 128, query_dim=168),
}
NO_WINDOW = "none"
AXES = {
    "layer": ("mistral", "gpt_oss"),
    "window": (128, 1024, 4096, NO_WINDOW),
    "sequences": (1,),
    "tokens": (4096, 32768),
}
SMOKE = {"layer": "gpt_oss", "window": 16, "sequences": 2, "tokens": 80}
CHECKED_ROWS = 16
TILE = 128  # of visited_tflops


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {layer, window, sequences, tokens}; the configuration is not looked at."""
    layer = LAYERS[shape["layer"]]
    window = None if shape["window"] == NO_WINDOW else shape["window"]
    tokens, ends = shape["tokens"], sequence_ends(shape["tokens"], shape["sequences"])
    q_shape = (tokens, layer.num_q_heads, layer.head_dim)
    kv_shape = (tokens, layer.num_kv_heads, layer.head_dim)
    size = 2 * (int(np.prod(q_shape)) + int(np.prod(kv_shape))) * BF16_BYTES
    sink = rng.standard_normal(layer.num_q_heads).astype(np.float32) if layer.sink else None
    device_ends = upload(place, ends)
    options = {"softmax_scale": layer.softmax_scale, "window": window, "softcap": layer.softcap}
    device_sink = None if sink is None else upload(place, sink)
    inputs, outputs, calls = [], [], []
    for _ in range(num_sets(size)):
        q = random_bf16(place, q_shape, rng)
        k, v = (random_bf16(place, kv_shape, rng) for _ in range(2))
        out = place.memory.empty(q_shape, np.uint16)
        lse = place.memory.empty(q_shape[:2], np.float32)
        arguments = (q, k, v, device_ends, device_ends, out, lse)
        calls.append(partial(place.ops.window_attention, *arguments, sink=device_sink, **options))
        inputs.append((q, k, v))
        outputs.append((out, lse))

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng, CHECKED_ROWS)
        q, k, v, out, lse = (place.memory.to_host(x) for x in (*inputs[0], *outputs[0]))
        expected = expected_attention(q, k, v, ends, ends, rows=rows, sink=sink, **options)
        return within_bound(out[rows], lse[rows], expected)

    lengths = np.diff(ends).tolist()
    per_pair = ATTENTION_FLOPS * layer.head_dim * layer.num_q_heads
    tile = {"window": window, "block_m": TILE, "block_n": TILE}
    visited = sum(count_tiles(n, n, **tile).visited for n in lengths)
    return Work(
        calls=tuple(calls),
        outputs=outputs[0],
        bytes=size,
        flops=per_pair * sum(count_scores(n, n, window=window) for n in lengths),
        visited_flops=per_pair * visited * TILE * TILE,
        check=check,
        parts={
            "inputs": inputs,
            "outputs": outputs,
            "layer": layer,
            "window": window,
            "sink": device_sink,
        },
    )


def sequence_ends(tokens: int, num_seqs: int) -> np.ndarray:
    """int32 [num_seqs + 1]: sequences of lengths that differ by at most one."""
    return np.linspace(0, tokens, num_seqs + 1).astype(np.int32)  # rounded down
