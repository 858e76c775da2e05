"""How far an attention output may be from the float64 reference: the one rule for every backend.

`max|out - ref| <= 2 * max|same maths with bf16 operands - ref| + 2^-8 * max|ref|`, against float64
on the dequantized records. Queries, keys and values are bf16 numbers already, so what "bf16
operands" adds is the rounding of the softmax weights that tensor cores multiply V by; the second
term is the rounding of the output to bf16, twice its half unit.

The log-sum-exp is float32 all the way; its error is that of a float32 dot product and of exp and
log, relative to the largest score that took part: LSE_RELATIVE * max(1, max|lse|).
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import FP16
from .window_attention import window_attention
from .window_decode import window_decode
from .window_prefill import window_prefill

OUTPUT_RELATIVE = 2.0**-8
FP16_OUTPUT_RELATIVE = 2.0**-10  # of outputs in float16, which has 3 bits more
LSE_RELATIVE = 2.0**-12


@dataclass(frozen=True)
class Expected:
    """What the reference says: exact output float64 [T, H, D], the same with softmax weights
    rounded to bf16 (or float16), and the log-sum-exp float32 [T, H]. `relative`: what rounding the
    output may add, of its largest element."""

    out: np.ndarray
    rounded: np.ndarray
    lse: np.ndarray
    relative: float = OUTPUT_RELATIVE


@dataclass(frozen=True)
class Comparison:
    """Largest errors of an output and of its log-sum-exp, and what they may be."""

    worst_error: float
    bound: float
    lse_error: float
    lse_bound: float
    same_nonfinite: bool

    @property
    def passed(self) -> bool:
        return (
            self.same_nonfinite
            and self.worst_error <= self.bound
            and self.lse_error <= self.lse_bound
        )


def expected_decode(q: Any, slab: Any, layout: Any, layer: int, plan: Any, **options: Any) -> Any:
    """The reference's answer to `window_decode`. Host arrays; `options`: softmax_scale, sink,
    rope_out, kind."""
    return _expected(window_decode, q.shape, (q, slab, layout, layer, plan), options)


def expected_prefill(q: Any, records: Any, plan: Any, record_format: Any, **options: Any) -> Any:
    """The reference's answer to `window_prefill`. Host arrays; `options`: softmax_scale, sink,
    rope_out."""
    return _expected(window_prefill, q.shape, (q, records, plan, record_format), options)


def expected_attention(q: Any, k: Any, v: Any, *ends: Any, rows: Any = None, **options: Any) -> Any:
    """The reference's answer to `window_attention`, of the given rows of q alone where `rows` is
    not None. Host arrays; `ends`: cu_seqlens_q, cu_seqlens_k; `options`: softmax_scale, window,
    softcap, sink, sink_tokens."""
    found = _expected(window_attention, q.shape, (q, k, v, *ends), options | {"rows": rows})
    relative = FP16_OUTPUT_RELATIVE if q.dtype == FP16 else OUTPUT_RELATIVE
    chosen = slice(None) if rows is None else rows
    return Expected(found.out[chosen], found.rounded[chosen], found.lse[chosen], relative)


def _expected(function: Any, shape: tuple, arguments: tuple, options: dict) -> Expected:
    exact, rounded = np.empty(shape), np.empty(shape)
    lse = np.empty(shape[:2], np.float32)
    function(*arguments, rounded, lse, round_weights=True, **options)
    function(*arguments, exact, lse, **options)
    return Expected(exact, rounded, lse)


def attention_bound(
    exact: np.ndarray, rounded: np.ndarray, relative: float = OUTPUT_RELATIVE
) -> float:
    """The largest error an output may have, from the exact output and the one with bf16 operands;
    0 where nothing is finite."""
    finite = np.isfinite(exact) & np.isfinite(rounded)
    rounding = _largest_difference(exact, rounded, finite)
    return 2.0 * rounding + relative * _largest(exact, finite)


def lse_bound(exact: np.ndarray) -> float:
    """The largest error a log-sum-exp may have, from the exact ones."""
    return LSE_RELATIVE * max(1.0, _largest(exact, np.isfinite(exact)))


def compare(out: Any, lse: Any, expected: Expected) -> Comparison:
    """Compare bf16 (bfloat16 or uint16), float16 or float outputs [T, H, D] and float32 lse [T, H]
    on the host with what is expected. NaN and infinities must stand at the same places."""
    values = out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out
    values = np.asarray(values).astype(np.float64)
    finite, lse_finite = np.isfinite(expected.out), np.isfinite(expected.lse)
    same = _same_nonfinite(values, expected.out) and _same_nonfinite(lse, expected.lse)
    return Comparison(
        worst_error=_largest_difference(values, expected.out, finite),
        bound=attention_bound(expected.out, expected.rounded, expected.relative),
        lse_error=_largest_difference(lse, expected.lse, lse_finite),
        lse_bound=lse_bound(expected.lse),
        same_nonfinite=same,
    )


def assert_within_bound(out: Any, lse: Any, expected: Expected, name: str = "") -> Comparison:
    """AssertionError, with the numbers, unless an output and its lse are within the bound."""
    found = compare(out, lse, expected)
    assert found.passed, f"{name}: {found}"
    return found


def _same_nonfinite(found: np.ndarray, wanted: np.ndarray) -> bool:
    where = ~(np.isfinite(found) & np.isfinite(wanted))
    return bool(np.array_equal(found[where], wanted[where].astype(found.dtype), equal_nan=True))


def _largest(x: np.ndarray, where: np.ndarray) -> float:
    """max|x| over the places in `where`, 0 if there are none."""
    return float(np.abs(x[where]).max(initial=0.0))


def _largest_difference(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float:
    """max|a - b| in float64 over the places in `where`; inf where only one of them is finite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a[where].astype(np.float64) - b[where].astype(np.float64))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
