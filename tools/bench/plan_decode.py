"""plan_decode: the plan of a decode step, on the device where there is one, else on the host.

Measures `sequences` sequences of `queries` tokens. A step needs one plan for each distinct window
and ring, whatever the number of layers. Bound by writing `index`, window x 4 B a token, and below
some thousand tokens by latency. On a GPU it is the kernel alone, in a graph: no host work counts.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from .common import Place, Shape, Work
from .inputs import random_sequences, upload, window_layers
from .records import INDEX_BYTES, require_equal

AXES = {"sequences": (512,), "queries": (1, 6)}
SMOKE = {"sequences": 5, "queries": 2}
DEVICE_POISON = 0xA5  # -1 is a right answer here, so 0xFF cannot mark what was not written
SETS = 8


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, queries}."""
    sequences = random_sequences(shape["sequences"], shape["queries"], rng)
    layer = window_layers(cfg)[0]
    wanted = sequences.plan(layer)
    tokens = wanted.num_tokens
    size = INDEX_BYTES * (2 * tokens + sequences.num_seqs + 1 + 2 * tokens + wanted.index.size)
    if place.backend != "cuda":
        calls = (lambda: sequences.plan(layer),)
        return Work(calls, (), size, 0, lambda: _compare(place, sequences.plan(layer), wanted))
    from ...rawkernels.cuda.plan_decode import plan_decode

    inputs = [
        upload(place, array) for array in (wanted.state_ids, wanted.positions, wanted.cu_seqlens_q)
    ]
    outputs, calls = [], []
    for _ in range(SETS):
        filled = [place.memory.empty(x.shape, np.int32) for x in (wanted.offset_len, wanted.index)]
        sizes = {"window": layer.window, "ring_len": layer.ring_len, "mode": "causal"}
        calls.append(partial(plan_decode, *inputs, 0, *filled, **sizes))
        outputs.append(tuple(filled))

    def check() -> dict[str, Any]:
        offset_len, index = (place.memory.to_host(x) for x in outputs[0])
        require_equal(offset_len, wanted.offset_len, "offset_len")
        return require_equal(index, wanted.index, "index")

    return Work(tuple(calls), outputs[0], size, 0, check, poison_byte=DEVICE_POISON)


def _compare(place: Place, found: Any, wanted: Any) -> dict[str, Any]:
    """The host builder against the definition, written out in the reference."""
    from ...rawkernels.reference.plan_decode import plan_decode

    offset_len, index = np.empty_like(wanted.offset_len), np.empty_like(wanted.index)
    arguments = (wanted.state_ids, wanted.positions, wanted.cu_seqlens_q, 0, offset_len, index)
    plan_decode(*arguments, window=wanted.window, ring_len=wanted.ring_len, mode="causal")
    require_equal(found.offset_len, offset_len, "offset_len")
    return require_equal(found.index, index, "index")
