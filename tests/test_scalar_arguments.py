"""What the public calls say about arguments that are no arrays: numbers, plans and layouts."""

import numpy as np
import pytest
from helpers import bf16

import ringslab as rs
from ringslab.layouts.errors import LayoutError
from ringslab.layouts.rope import Yarn

CFG = rs.load_config("quickstart.yaml")
LAYOUT, LAYER = CFG.slot_layout, CFG.layers[0]
DECODE = rs.plan_decode([0], [0], window=32, ring_len=36)
PREFILL = rs.plan_prefill([0], [1], [1], window=32, ring_len=36)
NO_NUMBERS = (None, "1", [1.0], np.ones(2), float("nan"), float("inf"), 1e300, True)


def refused(pattern, function, *arguments, error=rs.errors.ArgumentError, **options):
    with pytest.raises(error, match=pattern):
        function(*arguments, **options)


def decode(plan, layout=LAYOUT, scale=0.1):
    slab = rs.empty_slab(LAYOUT, 1)
    q = bf16(np.zeros((1, 8, 128)))
    return rs.window_decode(q, slab, layout, 0, plan, softmax_scale=scale)


def prefill(plan):
    records = np.zeros((33, 132), np.uint8)
    q = bf16(np.zeros((1, 8, 128)))
    return rs.window_prefill(q, records, plan, LAYER.record_format, softmax_scale=0.1)


def history(plan, layout=LAYOUT):
    return rs.load_history(rs.empty_slab(LAYOUT, 1), layout, 0, plan)


def test_a_plan_of_the_wrong_kind():
    """A prefill plan in window_decode, a decode plan in window_prefill and load_history, and None:
    the message names the call that makes the right one."""
    decode(DECODE), prefill(PREFILL), history(PREFILL)
    refused("window_decode: plan is PrefillPlan; pass what plan_decode", decode, PREFILL)
    refused("window_decode: plan is NoneType", decode, None)
    refused("window_prefill: plan is DecodePlan; pass what plan_prefill", prefill, DECODE)
    refused("load_history: plan is DecodePlan; pass what plan_prefill", history, DECODE)
    refused("load_history: plan is NoneType", history, None)


def test_a_layout_that_is_none():
    """A Config in place of its slot_layout is named, also where `out` is left out."""
    refused("layout is Config, not a SlotLayout", history, PREFILL, CFG)
    refused("layout is NoneType, not a SlotLayout", decode, DECODE, None)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_numbers_that_kernels_hold_in_float32(value):
    """softmax_scale and amax_floor: None, text, arrays, NaN, infinity and 1e300, which is infinite
    in float32, are refused by name."""
    refused("softmax_scale=", decode, DECODE, scale=value)
    x = np.zeros((1, 32), np.float32)
    refused("amax_floor=", rs.quantize_mxfp8, x, "ceil", value)


def test_numpy_numbers_are_numbers():
    """softmax_scale and amax_floor are also taken as NumPy's float32 and as integers."""
    for scale in (np.float32(0.5), np.int64(1), 1):
        decode(DECODE, scale=scale)
    x = np.zeros((1, 32), np.float32)
    assert rs.quantize_mxfp8(x, "ceil", np.float32(1e-4))[1] == 105
    assert rs.quantize_mxfp8(x, "ceil", 0)[1] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1e4", 64, "half"), "theta='1e4'"),
        ((None, 64, "half"), "theta=None"),
        ((1e4, "64", "half"), "dims='64'"),
        ((1e4, 64.0, "half"), "dims=64.0"),
        ((1e4, True, "half"), "dims=True"),
        ((1e4, 64, "half", {"factor": 16}), "yarn is dict, not a Yarn"),
    ],
)
def test_rope_of_other_types(arguments, says):
    """Text, None, a whole float for a count, a mapping for a Yarn: refused by name."""
    refused(says, rs.Rope, *arguments)


def test_yarn_of_other_types():
    refused("factor='16'", Yarn, "16", 65536, 32.0, 1.0)
    refused("original_length=65536.0", Yarn, 16.0, 65536.0, 32.0, 1.0)
    refused("beta_fast='32'", Yarn, 16.0, 65536, "32", 1.0)


@pytest.mark.parametrize("value", [1.5, "8", None, True])
def test_required_ring_len_of_no_integers(value):
    """1.5 gave a ring of 1.5 records."""
    for arguments in ((value, 6), (128, value), (128, 6, value)):
        refused("but must be an integer", rs.required_ring_len, *arguments, error=LayoutError)
    assert rs.required_ring_len(np.int32(128), np.int64(6)) == 133
