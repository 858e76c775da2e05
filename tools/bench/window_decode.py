"""window_decode: one layer's attention of a decode step, the rings already written.

Measures T = sequences * queries tokens against their rings, each input set the rings of another
layer of one slab with its own q and out. Slots and positions are random, so rings are wrapped.
Bound by bytes: q and out, 2 x num_q_heads x head_dim x 2 B a token, and the visible records of each
sequence once, window + queries - 1 of them. Few sequences are bound by latency instead. The
log-sum-exp (4 B a head) and the plan (8 B a token) are left out of the count.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.reference.bound import compare, expected_decode
from .common import ATTENTION_FLOPS, BenchError, Place, Shape, Work, num_sets
from .inputs import (
    Sequences,
    fill_ring,
    host_rows,
    poisoned_slab,
    random_bf16,
    random_sequences,
    sample_of,
    sample_slots,
    token_rows,
    upload,
    upload_plan,
    window_layers,
)

AXES = {
    "heads": (64, 128),
    "queries": (1, 2, 6),
    "sequences": (1, 16, 64, 256, 512),
}
SMOKE = {"heads": 8, "queries": 2, "sequences": 3}
BF16_BYTES = 2


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {heads, queries, sequences}."""
    heads, layout = shape["heads"], cfg.slot_layout
    sequences = random_sequences(shape["sequences"], shape["queries"], rng)
    layers = window_layers(cfg)
    plan = sequences.plan(layers[0])
    size = bytes_of(sequences, plan, heads, layers[0])
    layers = layers[: num_sets(size, len(layers))]

    slab = poisoned_slab(place, layout, sequences.num_slots)
    sink = rng.standard_normal(heads).astype(np.float32)
    device_sink, device_plan = upload(place, sink), upload_plan(place, plan)
    queries, outputs, calls = [], [], []
    for layer in layers:
        fill_ring(place, slab, layout, layer, rng)
        q = random_bf16(place, (plan.num_tokens, heads, cfg.head_dim), rng)
        out = place.memory.empty(q.shape, np.uint16)
        lse = place.memory.empty(q.shape[:2], np.float32)
        options = options_of(layer, device_sink)
        arguments = (q, slab, layout, layer.id, device_plan, out, lse)
        calls.append(partial(place.ops.window_decode, *arguments, **options))
        queries.append(q)
        outputs.append((out, lse))

    def check() -> dict[str, Any]:
        chosen, which = sample_of(sequences)
        host = sample_slots(place, slab, layout, sequences, which)
        rows = token_rows(which, sequences.queries)
        q, out, lse = (host_rows(place, x, rows) for x in (queries[0], *outputs[0]))
        options = options_of(layers[0], sink)
        plan = chosen.plan(layers[0])
        expected = expected_decode(q, host, layout, layers[0].id, plan, **options)
        return within_bound(out, lse, expected)

    return Work(
        calls=tuple(calls),
        outputs=outputs[0],
        bytes=size,
        flops=ATTENTION_FLOPS * int(plan.offset_len[:, 1].sum()) * cfg.head_dim * heads,
        check=check,
        parts={
            "queries": queries,
            "outputs": outputs,
            "slab": slab,
            "layout": layout,
            "layers": layers,
            "sequences": sequences,
            "sink": device_sink,
        },
    )


def options_of(layer: Any, sink: Any) -> dict[str, Any]:
    options = {
        "softmax_scale": layer.softmax_scale,
        "sink": sink if layer.sink else None,
        "rope_out": layer.rope if layer.inverse_rope_out else None,
        "softcap": layer.softcap or 0.0,
    }
    return {**options, "softcap": layer.softcap} if layer.softcap else options


def bytes_of(sequences: Sequences, plan: Any, heads: int, layer: Any) -> int:
    """q and out, and each sequence's visible records once."""
    fmt = layer.record_format
    q_and_out = 2 * plan.num_tokens * heads * fmt.head_dim * BF16_BYTES
    oldest = sequences.first + 1 - plan.offset_len[:: sequences.queries, 1]
    records = int((sequences.first + sequences.queries - oldest).sum())
    return q_and_out + records * fmt.record_bytes


def within_bound(out: np.ndarray, lse: np.ndarray, expected: Any) -> dict[str, Any]:
    """Errors against float64 and what they may be; BenchError where they are larger."""
    found = compare(out, lse, expected)
    if not found.passed:
        raise BenchError(f"outside the bound: {found}")
    return {
        "tokens": out.shape[0],
        "worst_error": found.worst_error,
        "bound": found.bound,
        "lse_error": found.lse_error,
        "lse_bound": found.lse_bound,
    }
