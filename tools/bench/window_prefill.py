"""window_prefill: one layer's attention of a prefill batch over a joint buffer that is filled.

Measures `tokens` tokens in `sequences` sequences of random lengths, all past their first window, so
that every query sees a whole one. Bound by bytes: q and out, 2 x num_q_heads x head_dim x 2 B a
token, and each record of the joint buffer that a query sees once. The products are 4 x window x
head_dim x num_q_heads FLOPs a token: two thirds of the bytes' time on an H200, so loads and both
products have to overlap.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.plans import PrefillPlan
from ...rawkernels.reference.bound import expected_prefill
from ...schedules.plan_prefill import plan_prefill
from .common import ATTENTION_FLOPS, Place, Shape, Work, num_sets
from .inputs import (
    FIRST_POSITIONS,
    host_rows,
    random_bf16,
    random_records,
    sample_rows,
    upload,
    upload_plan,
    window_layers,
)
from .window_decode import BF16_BYTES, options_of, within_bound

AXES = {"heads": (64, 128), "tokens": (4096, 32768), "sequences": (1, 16)}
SMOKE = {"heads": 8, "tokens": 40, "sequences": 3}
CHECKED_TOKENS = 8


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {heads, tokens, sequences}."""
    heads, tokens = shape["heads"], shape["tokens"]
    layers = window_layers(cfg)
    layer = layers[0]
    fmt = layer.record_format
    plan = random_plan(tokens, shape["sequences"], layer, rng)
    size = 2 * tokens * heads * cfg.head_dim * BF16_BYTES + seen_rows(plan) * fmt.record_bytes
    sink = rng.standard_normal(heads).astype(np.float32)
    device_sink, device_plan = upload(place, sink), upload_plan(place, plan)
    inputs, outputs, calls = [], [], []
    for i in range(num_sets(size)):
        records = upload(place, random_records(plan.history_rows + tokens, fmt, rng))
        q = random_bf16(place, (tokens, heads, cfg.head_dim), rng)
        out = place.memory.empty(q.shape, np.uint16)
        lse = place.memory.empty(q.shape[:2], np.float32)
        options = options_of(layers[i % len(layers)], device_sink)
        arguments = (q, records, device_plan, fmt, out, lse)
        calls.append(partial(place.ops.window_prefill, *arguments, **options))
        inputs.append((q, records))
        outputs.append((out, lse))

    def check() -> dict[str, Any]:
        rows = sample_rows(tokens, rng, CHECKED_TOKENS)
        q, out, lse = (host_rows(place, x, rows) for x in (inputs[0][0], *outputs[0]))
        records = place.memory.to_host(inputs[0][1])
        some = replace(plan, positions=plan.positions[rows], pivots=plan.pivots[rows])
        expected = expected_prefill(q, records, some, fmt, **options_of(layer, sink))
        return within_bound(out, lse, expected)

    visible = int(plan.pivots[:, 1].sum() + plan.pivots[:, 3].sum())
    return Work(
        calls=tuple(calls),
        outputs=outputs[0],
        bytes=size,
        flops=ATTENTION_FLOPS * visible * cfg.head_dim * heads,
        check=check,
    )


def random_plan(tokens: int, num_seqs: int, layer: Any, rng: np.random.Generator) -> PrefillPlan:
    """A host plan of `tokens` tokens in sequences of random lengths of at least 1."""
    cuts = np.sort(rng.choice(tokens - 1, num_seqs - 1, replace=False) + 1)
    lengths = np.diff(np.concatenate([[0], cuts, [tokens]]))
    first = rng.integers(*FIRST_POSITIONS, num_seqs)
    states = rng.permutation(num_seqs)
    return plan_prefill(
        states, lengths, first + lengths, window=layer.window, ring_len=layer.ring_len
    )


def seen_rows(plan: PrefillPlan) -> int:
    """Rows of the joint buffer that a query sees: the new ones, and window - 1 of each history."""
    return plan.num_tokens + plan.num_seqs * (plan.window - 1)
