"""The one rule that attention outputs are compared by."""

import numpy as np
import pytest
from cases import DECODE_CASES, decode_inputs
from helpers import bf16, run_decode

from ringslab.rawkernels.reference.bound import (
    Expected,
    assert_within_bound,
    attention_bound,
    compare,
    expected_decode,
)


def plain(out, rounded=None):
    out = np.asarray(out, np.float64).reshape(1, 1, -1)
    rounded = out if rounded is None else np.asarray(rounded, np.float64).reshape(out.shape)
    return Expected(out, rounded, np.zeros((1, 1), np.float32))


LSE = np.zeros((1, 1), np.float32)


def test_formula():
    """2 * 0.01 + 4 / 256."""
    exact, rounded = np.float64([1.0, -4.0]), np.float64([1.01, -4.0])
    assert attention_bound(exact, rounded) == pytest.approx(2 * 0.01 + 4 / 256)


def test_edges():
    """An error of exactly 2^-8 of the largest value passes, one bit more does not; so for lse."""
    expected = plain([1.0, 0.5])
    assert compare(np.float64([[[1.0, 0.5 + 2**-8]]]), LSE, expected).passed
    assert not compare(np.float64([[[1.0, 0.5 + 2**-8 + 2**-40]]]), LSE, expected).passed
    assert compare(expected.out, LSE + np.float32(2**-12), expected).passed
    assert not compare(expected.out, LSE + np.float32(2**-11), expected).passed


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_must_match(wrong):
    """A NaN or infinity where the reference has a number fails, and the other way round."""
    numbers, special = plain([1.0, 2.0]), plain([1.0, wrong])
    assert not compare(special.out, LSE, numbers).passed
    assert not compare(numbers.out, LSE, special).passed
    assert compare(special.out, LSE, special).passed
    with pytest.raises(AssertionError, match="same_nonfinite=False"):
        assert_within_bound(special.out, LSE, numbers)
    assert not compare(numbers.out, np.full((1, 1), wrong, np.float32), numbers).passed


def test_catches_one_key_too_few():
    """A window of 127 for 128 fails the bound on a case of the table: it is not too loose."""
    case = next(c for c in DECODE_CASES if c.name == "wrap")
    q, slab, layout, layer, plan, options = decode_inputs(case)
    expected = expected_decode(q, slab, layout, layer, plan, **options)
    out, lse = run_decode("reference", q, slab, layout, layer, plan, **options)
    assert compare(out, lse, expected).passed
    plan.offset_len[:, 1] -= 1
    out, lse = run_decode("reference", q, slab, layout, layer, plan, **options)
    assert not compare(out, lse, expected).passed


def test_bf16_bits_are_read_as_bf16():
    assert compare(bf16([[[1.0, 2.0]]]), LSE, plain([1.0, 2.0])).worst_error == 0
