"""What the host backends say about index arrays that point outside: the entry and the rule."""

import dataclasses

import numpy as np
import pytest
from helpers import i32

import ringslab as rs
from ringslab.rawkernels.value_checks import (
    check_decode_values,
    check_pivot_values,
    check_segment_values,
    check_store_values,
)


def refused(pattern, check, *arguments):
    with pytest.raises(rs.errors.ArgumentError, match=pattern):
        check("op", *arguments)


def test_store_values():
    check_store_values("op", i32([-1, 0, 4]), i32([-7, 0, 2**31 - 2]), 5)
    refused(r"op: state_ids\[2\]=5 .*0\.\.4", check_store_values, i32([0, 4, 5]), i32([0, 0, 0]), 5)
    refused(r"state_ids\[0\]=-2147483648", check_store_values, i32([-(2**31)]), i32([0]), 5)
    refused(r"positions\[1\]=-1", check_store_values, i32([0, 0]), i32([0, -1]), 5)


def test_decode_values():
    plan = rs.plan_decode([1, -1], [7, 0], window=4, ring_len=6)

    def with_row(*row):
        return dataclasses.replace(plan, offset_len=i32([row, (0, 0)]))

    check_decode_values("op", plan, 2)
    check_decode_values("op", with_row(999, 0), 2)  # no key: the offset is never used
    refused(r"offsets\[0\]=12 .*0\.\.11", check_decode_values, with_row(12, 1), 2)
    refused(r"offsets\[0\]=-1", check_decode_values, with_row(-1, 1), 2)
    refused(r"lengths\[0\]=7 .*ring_len=6", check_decode_values, with_row(6, 7), 2)
    refused(r"lengths\[0\]=-1", check_decode_values, with_row(6, -1), 2)


def test_segment_values():
    plan = rs.plan_prefill([1], [2], [10], window=4, ring_len=6)

    def with_segments(*rows, count=None):
        count = len(rows) if count is None else count
        return dataclasses.replace(plan, segments=i32(rows), num_segments=i32([count]))

    found = check_segment_values("op", with_segments((-1, 0, 4), (99, 99, 99), count=1), 2)
    assert found.tolist() == [[-1, 0, 4]]
    refused(r"num_segments\[0\]=3 .*=1", check_segment_values, with_segments((0, 0, 1), count=3), 2)
    refused("segment sources.*=12", check_segment_values, with_segments((12, 0, 1)), 2)
    refused("segment sources.*=-2", check_segment_values, with_segments((-2, 0, 1)), 2)
    refused("runs past its ring of 6", check_segment_values, with_segments((9, 0, 4)), 2)
    refused("segment targets.*=1 .*0..3", check_segment_values, with_segments((6, 1, 4)), 2)
    refused("segment targets", check_segment_values, with_segments((6, 0, -1)), 2)


def test_pivot_values():
    plan = rs.plan_prefill([1], [2], [10], window=4, ring_len=6)
    check_pivot_values("op", plan, 6)

    def with_pivots(*row):
        return dataclasses.replace(plan, pivots=i32([row, (0, 0, 0, 0)]))

    check_pivot_values("op", with_pivots(2**31 - 1, 0, -5, 0), 6)
    refused(r"section-1 starts\[0\]=-1", check_pivot_values, with_pivots(-1, 1, 0, 0), 6)
    refused(r"section-2 starts\[0\]=3 .*0\.\.5", check_pivot_values, with_pivots(0, 1, 3, 4), 6)
    most = 2**31 - 1
    refused("section-1 starts", check_pivot_values, with_pivots(most, most, 0, 0), 6)
    refused(r"section-2 lengths\[0\]=-3", check_pivot_values, with_pivots(0, 1, 3, -3), 6)
    assert plan.pivots.dtype == np.int32
