"""Rotary embedding: frequencies (with YaRN) and the float64 tables that all backends rotate by.

Source of the formulas: RoFormer (arXiv 2104.09864) and YaRN (arXiv 2309.00071), in the form that
DeepSeek-V4's published configuration uses.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .errors import ArgumentError
from .rings import MAX_POSITION
from .sizes import is_count, is_flag, is_real, is_word

Pairing = Literal["adjacent", "half"]

# A position is cut into three digits, coarse * 2^20 + middle * 2^10 + fine, so that a table of
# cosines and sines for every int32 position has 2048 + 1024 + 1024 rows: 2 MB for 64 dims, small
# enough to stay in a GPU's L2, and no bound on positions need be known when it is made.
FINE_BITS = 10
MIDDLE_BITS = 10
COARSE_ROWS = 2048
MIDDLE_ROWS = 1 << MIDDLE_BITS
FINE_ROWS = 1 << FINE_BITS
TABLE_ROWS = COARSE_ROWS + MIDDLE_ROWS + FINE_ROWS
assert COARSE_ROWS << (MIDDLE_BITS + FINE_BITS) > MAX_POSITION


@dataclass(frozen=True)
class Yarn:
    """YaRN's context extension.

    `truncate` makes the ramp begin and end at whole pairs. `attention_factor` multiplies rotated
    queries and keys alike, so scores grow by its square (1 in DeepSeek's models, 0.1 ln(factor) + 1
    in gpt-oss); an inverse rotation is multiplied by it as well.

    Raises ArgumentError for a factor below 1, a length below 1, betas that are not
    beta_fast > beta_slow > 0, or an attention factor that is not positive.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if not is_real(self.factor) or not 1.0 <= self.factor < math.inf:
            raise ArgumentError(f"Yarn: factor={self.factor!r} but must be at least 1 and finite")
        if not is_count(self.original_length) or self.original_length < 1:
            raise ArgumentError(
                f"Yarn: original_length={self.original_length!r} but must be an integer >= 1"
            )
        are_real = is_real(self.beta_fast) and is_real(self.beta_slow)
        if not are_real or not 0.0 < self.beta_slow < self.beta_fast < math.inf:
            raise ArgumentError(
                f"Yarn: beta_fast={self.beta_fast!r} beta_slow={self.beta_slow!r} but must be "
                "beta_fast > beta_slow > 0"
            )
        factor = self.attention_factor
        if not is_real(factor) or not 0.0 < factor < math.inf or not is_flag(self.truncate):
            raise ArgumentError(
                f"Yarn: attention_factor={factor!r} truncate={self.truncate!r} but must be a "
                "positive finite number and a bool"
            )


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the last `dims` of a vector.

    `pairing`: "adjacent" rotates dims (2i, 2i + 1), "half" rotates dims (i, i + dims/2).
    `linear_factor` divides positions (linear scaling; Gemma 3's global layers: 8).
    Raises ArgumentError for a theta that is not positive and finite, for dims that are not positive
    and even, for YaRN whose slow pairs would lie before its fast ones (see rope_frequencies), and
    for a linear factor below 1 or beside YaRN.
    """

    theta: float
    dims: int
    pairing: Pairing
    yarn: Yarn | None = None
    linear_factor: float | None = None

    def __post_init__(self) -> None:
        if not is_real(self.theta) or not 0 < self.theta < math.inf:
            raise ArgumentError(f"Rope: theta={self.theta!r} but must be positive and finite")
        if not is_count(self.dims) or self.dims < 2 or self.dims % 2 != 0:
            raise ArgumentError(f"Rope: dims={self.dims!r} but must be a positive even integer")
        if not is_word(self.pairing, get_args(Pairing)):
            raise ArgumentError(f"Rope: pairing={self.pairing!r} but must be 'adjacent' or 'half'")
        linear = self.linear_factor
        if linear is not None and (not is_real(linear) or not 1.0 <= linear < math.inf):
            raise ArgumentError(f"Rope: linear_factor={linear!r} but must be at least 1 and finite")
        if linear is not None and self.yarn is not None:
            raise ArgumentError("Rope: linear_factor and yarn both scale positions; give one")
        if self.yarn is not None:
            if not isinstance(self.yarn, Yarn):
                raise ArgumentError(f"Rope: yarn is {type(self.yarn).__name__}, not a Yarn")
            if self.theta <= 1:
                raise ArgumentError(f"Rope: theta={self.theta} but YaRN needs more than 1")
            low, high = _yarn_ramp(self, self.yarn)
            if low > high:
                raise ArgumentError(
                    f"Rope: YaRN's ramp begins at pair {low:g} and ends at pair {high:g}; "
                    f"original_length={self.yarn.original_length} does not fit theta={self.theta}"
                )

    @property
    def num_pairs(self) -> int:
        return self.dims // 2  # exact: dims is even


def _yarn_ramp(rope: Rope, yarn: Yarn) -> tuple[float, float]:
    """First and last pair of YaRN's ramp, before they are kept apart."""

    def pair_of(rotations: float) -> float:
        turns = yarn.original_length / (2.0 * math.pi * rotations)
        return rope.dims * math.log(turns) / (2.0 * math.log(rope.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return float(max(low, 0)), float(min(high, rope.dims - 1))


def rope_frequencies(rope: Rope) -> np.ndarray:
    """Angle per position of each pair, float64 [dims / 2].

    f_i = theta^(-2i/dims). YaRN divides the slow ones by `factor`: with
    c(r) = dims ln(L / (2 pi r)) / (2 ln theta), low = max(floor(c(beta_fast)), 0),
    high = min(ceil(c(beta_slow)), dims - 1) and ramp_i = clamp((i - low) / (high - low), 0, 1),
    f_i becomes f_i / factor * ramp_i + f_i * (1 - ramp_i). Where low = high, high grows by 0.001;
    without `truncate`, low and high are not rounded. Linear scaling gives f_i / linear_factor.
    """
    pairs = range(rope.num_pairs)
    # Powers, cosines and sines are taken one by one from the C library: NumPy's may come from the
    # machine's vector unit with another last bit, and records are exchanged between machines.
    frequencies = np.array([rope.theta ** (-2.0 * i / rope.dims) for i in pairs], np.float64)
    if rope.linear_factor is not None:
        return frequencies / rope.linear_factor
    if rope.yarn is None:
        return frequencies
    low, high = _yarn_ramp(rope, rope.yarn)
    high += 0.001 if low == high else 0.0
    ramp = np.clip((np.array(pairs, np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies / rope.yarn.factor * ramp + frequencies * (1.0 - ramp)


def rope_table(rope: Rope) -> np.ndarray:
    """Cosines and sines of the three digits of a position, float64 [TABLE_ROWS, dims / 2, 2].

    Rows: COARSE_ROWS for coarse, then MIDDLE_ROWS, then FINE_ROWS. The last axis is (cos, sin).
    A backend multiplies the three unit complex numbers in float64, coarse times middle first, then
    times fine, each product as (a.c*b.c - a.s*b.s, a.c*b.s + a.s*b.c) without contraction, and
    rounds cosine and sine to float32. This rule is what makes every backend's bytes equal.
    YaRN's attention factor is in the fine rows, so that the product has it once.
    """
    digits = np.concatenate(
        [
            np.arange(COARSE_ROWS, dtype=np.float64) * float(1 << (MIDDLE_BITS + FINE_BITS)),
            np.arange(MIDDLE_ROWS, dtype=np.float64) * float(1 << FINE_BITS),
            np.arange(FINE_ROWS, dtype=np.float64),
        ]
    )
    angles = digits[:, None] * rope_frequencies(rope)[None, :]
    flat = angles.ravel().tolist()
    table = np.array([[math.cos(angle) for angle in flat], [math.sin(angle) for angle in flat]])
    table = np.ascontiguousarray(table.T).reshape(*angles.shape, 2)
    if rope.yarn is not None:
        table[-FINE_ROWS:] *= rope.yarn.attention_factor  # by 1.0 changes no bit
    return table
