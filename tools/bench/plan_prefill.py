"""plan_prefill: the plan of a prefill batch, on the device where there is one, else on the host.

Measures `tokens` tokens in `sequences` sequences of random lengths. A batch needs one plan for each
distinct window and ring. Bound by writing pivots, positions and state ids, 24 B a token, and below
some thousand tokens by latency: two kernels on a GPU, in a graph, without host work.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.plans import MAX_SEGMENTS
from .common import Place, Shape, Work
from .inputs import upload, window_layers
from .plan_decode import DEVICE_POISON, SETS
from .records import INDEX_BYTES, require_equal
from .window_prefill import random_plan

AXES = {"tokens": (4096, 32768), "sequences": (16,)}
SMOKE = {"tokens": 40, "sequences": 3}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {tokens, sequences}."""
    from ...rawkernels.reference.plan_prefill import plan_prefill as reference

    layer = window_layers(cfg)[0]
    sizes = {"window": layer.window, "ring_len": layer.ring_len}
    plan = random_plan(shape["tokens"], shape["sequences"], layer, rng)
    seqlens_q = np.diff(plan.cu_seqlens_q).astype(np.int32)
    given = (plan.state_ids, seqlens_q, plan.seqlens_k)
    num_seqs, tokens = plan.num_seqs, plan.num_tokens
    shapes = (
        (num_seqs + 1,),
        (tokens,),
        (tokens,),
        (MAX_SEGMENTS * num_seqs, 3),
        (1,),
        (tokens, 4),
    )
    written = sum(int(np.prod(extents)) for extents in shapes)
    size = INDEX_BYTES * (3 * num_seqs + written)
    wanted = [np.empty(extents, np.int32) for extents in shapes]

    if place.backend != "cuda":
        from ...schedules.plan_prefill import plan_prefill as on_host

        call = partial(on_host, *given, **sizes)

        def check_host() -> dict[str, Any]:
            reference(*given, 0, *wanted, **sizes)
            found = call()
            require_equal(found.positions, wanted[1], "positions")
            require_equal(found.segments, wanted[3][: wanted[4][0]], "segments")
            return require_equal(found.pivots, wanted[5], "pivots")

        return Work((call,), (), size, 0, check_host)
    from ...rawkernels.cuda.plan_prefill import plan_prefill

    inputs = [upload(place, array) for array in given]
    outputs, calls = [], []
    for _ in range(SETS):
        filled = [place.memory.empty(extents, np.int32) for extents in shapes]
        calls.append(partial(plan_prefill, *inputs, 0, *filled, **sizes))
        outputs.append(tuple(filled))

    def check() -> dict[str, Any]:
        reference(*given, 0, *wanted, **sizes)
        found = [place.memory.to_host(x) for x in outputs[0]]
        return [require_equal(f, w, "plan") for f, w in zip(found, wanted, strict=True)][-1]

    return Work(tuple(calls), outputs[0], size, 0, check, poison_byte=DEVICE_POISON)
