"""The float64 rotation tables of layouts/rope.py, made once per Rope and kept."""

from functools import lru_cache

import numpy as np

from ..layouts.rope import Rope, rope_table

MAX_TABLES = 32  # 2 MB each for 64 dims; a model has two or three


@lru_cache(maxsize=MAX_TABLES)
def cached_rope_table(rope: Rope) -> np.ndarray:
    """`rope_table(rope)`, float64 [TABLE_ROWS, dims / 2, 2]. Shared: callers only read it."""
    return rope_table(rope)
