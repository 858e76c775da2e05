"""How time grows with length: the exponent of a power law fitted to rows that differ in it alone.

A kernel whose loop bounds are the window's takes time in proportion to the length (exponent 1 once
the GPU is full); one that only masks takes its square.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

AXIS = "tokens"
LEAST_LENGTHS = 3


def exponents(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], float, float]]:
    """(operation, the other axes, shortest and longest length's ratio, exponent) of each group of
    timed rows with at least three lengths."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("median_us") and AXIS in row["shape"]:
            others = tuple((k, v) for k, v in row["shape"].items() if k != AXIS)
            groups.setdefault((row["op"], others), []).append(row)
    for (op, others), group in groups.items():
        lengths = np.array([row["shape"][AXIS] for row in group], np.float64)
        if len(set(lengths)) < LEAST_LENGTHS:
            continue
        times = np.array([row["median_us"] for row in group])
        slope = np.polyfit(np.log(lengths), np.log(times), 1)[0]
        yield op, dict(others), float(lengths.max() / lengths.min()), float(slope)
