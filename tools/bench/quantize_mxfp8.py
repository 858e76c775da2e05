"""quantize_mxfp8: bf16 rows to E4M3 elements and E8M0 scales.

Measures `rows` rows of head_dim bf16 numbers by both scale rules: `ceil` with amax_floor 1e-4
(DeepSeek's) and `floor` with 0 (OCP MX). Bound by bytes: 2 read and 1 + 1/32 written a number.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.formats import MX_BLOCK
from ...layouts.sizes import div_ceil
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import host_rows, random_bf16, sample_rows
from .records import kv_bytes, require_equal

AXES = {"rows": (65536, 1048576), "rule": ("ceil", "floor")}
SMOKE = {"rows": 33, "rule": "ceil"}
AMAX_FLOORS = {"ceil": 1e-4, "floor": 0.0}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {rows, rule}."""
    num_rows, rule, width = shape["rows"], shape["rule"], cfg.head_dim
    blocks = div_ceil(width, MX_BLOCK)
    size = num_rows * (kv_bytes(cfg) + width + blocks)
    options = {"scale_rounding": rule, "amax_floor": AMAX_FLOORS[rule]}
    inputs, outputs, calls = [], [], []
    for _ in range(num_sets(size)):
        x = random_bf16(place, (num_rows, width), rng)
        values = place.memory.empty((num_rows, width), np.uint8)
        scales = place.memory.empty((num_rows, blocks), np.uint8)
        calls.append(partial(place.ops.quantize_mxfp8, x, values, scales, **options))
        inputs.append(x)
        outputs.append((values, scales))

    def check() -> dict[str, Any]:
        rows = sample_rows(num_rows, rng)
        x = host_rows(place, inputs[0], rows)
        wanted = [np.empty((len(rows), columns), np.uint8) for columns in (width, blocks)]
        operation("reference", "quantize_mxfp8")(x, *wanted, **options)
        found = np.concatenate([host_rows(place, part, rows) for part in outputs[0]], axis=1)
        return require_equal(found, np.concatenate(wanted, axis=1), "values and scales")

    return Work(
        calls=tuple(calls),
        outputs=outputs[0],
        bytes=size,
        flops=0,
        check=check,
        parts={"inputs": inputs, "outputs": outputs, **options},
    )
