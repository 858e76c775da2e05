"""Arrays as callers have them: strides, offsets, odd addresses, byte order, read-only, zero size,
and each protocol. An operation gives what it gives for a plain copy, or refuses with an
ArgumentError; it never writes to its inputs, and never to a part of what it was asked for."""

import ml_dtypes
import numpy as np
import pytest
from helpers import bf16, i32, make_layout, poisoned_slab, record_format
from hypothesis import given
from hypothesis import strategies as st

import ringslab as rs
from ringslab.errors import ArgumentError, RingslabError

FMT = record_format(32)
LAYOUT = make_layout(FMT, 9)
ROPE = rs.Rope(1e4, 16, "half")
RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


class Wrapped:
    """An array known by some protocols only."""

    def __init__(self, array, protocol):
        self.array, self.protocol = array, protocol
        if protocol == "interface":
            self.__array_interface__ = array.__array_interface__
        if protocol == "dlpack":
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
        if protocol == "array":
            self.__array__ = lambda dtype=None, copy=None: array


def strided(array, draw):
    """The same numbers with other strides, where there is room for it."""
    kind = draw(st.sampled_from(["step", "reversed", "fortran", "broadcast", "column", "swapped"]))
    if kind == "step":
        axis = draw(st.integers(0, array.ndim - 1))
        every_second = [slice(None)] * axis + [slice(None, None, 2)]
        return np.repeat(array, 2, axis=axis)[tuple(every_second)]
    if kind == "reversed":
        return array[::-1].copy()[::-1]
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "broadcast":
        return np.broadcast_to(array[:1], array.shape)
    if kind == "column":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]
    return array.swapaxes(0, -1).copy().swapaxes(0, -1)


@st.composite
def guises(draw, array):
    """(what is passed, the plain array with the same numbers)."""
    kind = draw(
        st.sampled_from(
            ["plain", "offset", "odd", "read-only", "strided", "byte order", "subclass", "protocol"]
        )
    )
    size = array.nbytes
    if kind in ("offset", "odd"):
        itemsize = array.itemsize
        start = itemsize * draw(st.integers(0, 9)) + (kind == "odd") * draw(st.integers(1, 3))
        raw = np.zeros(size + 64, np.uint8)
        given_array = raw[start : start + size].view(array.dtype).reshape(array.shape)
        given_array[...] = array
    elif kind == "read-only":
        given_array = array.copy()
        given_array.flags.writeable = False
    elif kind == "strided" and array.size:
        given_array = strided(array, draw)
    elif kind == "byte order":
        native = array.dtype.newbyteorder(">") if array.dtype != BF16 else array.dtype
        given_array = array.astype(native)
    elif kind == "subclass":
        given_array = array.view(np.memmap if draw(st.booleans()) else np.recarray)
    elif kind == "protocol":
        names = ["interface", "array"] + ["dlpack"] * (array.dtype != BF16)
        return Wrapped(array.copy(), draw(st.sampled_from(names))), array
    else:
        given_array = array.copy()
    return given_array, np.array(given_array, array.dtype).reshape(np.shape(given_array))


def bytes_of(x):
    x = x.array if isinstance(x, Wrapped) else x
    return np.array(x).tobytes()


def rows(count, *shape, dtype=np.float32):
    numbers = RNG.standard_normal((count, *shape)).astype(np.float32)
    return numbers.astype(BF16) if dtype == BF16 else bf16(numbers) if dtype == "bits" else numbers


PLANS = {n: rs.plan_decode(i32([0] * n), i32(range(n)), window=4, ring_len=9) for n in (0, 1, 3)}
counts = st.sampled_from([0, 1, 3])
dtypes = st.sampled_from([np.float32, "bits", BF16])


def store(kv, ids, positions):
    slab = poisoned_slab(LAYOUT, 1)
    rs.ring_store(slab, LAYOUT, 1, kv, ids, positions, rope=ROPE)
    return slab


def decode(q, slab, sink, n):
    return rs.window_decode(q, slab, LAYOUT, 1, PLANS[n], softmax_scale=0.2, sink=sink)


@st.composite
def calls(draw):
    """(function of arrays, its plain arrays) of one public operation with 0, 1 or 3 tokens."""
    n, dtype = draw(counts), draw(dtypes)
    tokens = [i32([0] * n), i32(range(n))]
    kv = rows(n, 32, dtype="bits" if dtype == np.float32 else dtype)
    codes = RNG.integers(0, 120, (n, 33)).astype(np.uint8)
    slab = poisoned_slab(LAYOUT, 1) & 0x77
    q = rows(n, 2, 32, dtype="bits" if dtype == np.float32 else dtype)
    sink = RNG.standard_normal(2).astype(np.float32)
    options = {
        "quantize": (rs.quantize_mxfp8, [rows(n, 40, dtype=dtype)]),
        "dequantize": (rs.dequantize_mxfp8, [codes[:, :32].copy(), codes[:, 32:].copy()]),
        "rope": (
            lambda x, positions: rs.apply_rope(x, positions, ROPE),
            [rows(n, 2, 32, dtype=dtype), tokens[1]],
        ),
        "encode": (lambda kv, p: rs.encode_records(kv, FMT, p, ROPE), [kv, tokens[1]]),
        "store": (store, [kv, *tokens]),
        "decode": (lambda *arrays: decode(*arrays, n), [q, slab, sink]),
        "hash": (lambda *ids: rs.seeded_activations(3, 1, *ids, 16), tokens),
        "plan": (
            lambda *arrays: rs.plan_decode(*arrays, window=4, ring_len=9).index,
            tokens,
        ),
    }
    return options[draw(st.sampled_from(sorted(options)))]


@given(st.data())
def test_inputs_in_any_guise(data):
    """Each input of an operation in a guise of its own: the result of the plain arrays, bit for
    bit, or an ArgumentError; the inputs keep their bytes."""
    function, plain = data.draw(calls())
    pairs = [data.draw(guises(array)) for array in plain]
    passed = [pair[0] for pair in pairs]
    before = [bytes_of(x) for x in passed]
    try:
        found = function(*passed)
    except RingslabError:
        assert any(not is_plain(x) for x in passed), "plain arrays were refused"
        return
    finally:
        assert [bytes_of(x) for x in passed] == before, "an input was written to"
    wanted = function(*[pair[1] for pair in pairs])
    for one, other in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def is_plain(x):
    return (
        isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative
    )


ONES = np.ones((3, 2, 32), np.float32)
OUTPUTS = {
    "rope": lambda out: rs.apply_rope(ONES, i32(range(3)), ROPE, out=out),
    "encode": lambda out: rs.encode_records(bf16(np.ones((3, 32))), FMT, out=out),
    "hash": lambda out: rs.seeded_activations(3, 1, i32(range(3)), i32(range(3)), 16, out=out),
    "store": lambda slab: rs.ring_store(
        slab, LAYOUT, 1, bf16(np.ones((3, 32))), i32([0] * 3), i32(range(3))
    ),
}
SHAPES = {
    "rope": ((3, 2, 32), np.float32),
    "encode": ((3, 33), np.uint8),
    "hash": ((3, 16), np.uint16),
    "store": ((LAYOUT.slot_bytes,), np.uint8),
}


@given(st.sampled_from(sorted(OUTPUTS)), st.data())
def test_outputs_in_any_guise(name, data):
    """What is filled may be any C-contiguous, writeable memory of the right dtype; all else is
    refused and keeps its bytes. What a call fills is what it returns for no `out`."""
    shape, dtype = SHAPES[name]
    blank = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8)
    passed, _ = data.draw(guises(blank.view(dtype).reshape(shape)))
    plain = blank.copy().view(dtype).reshape(shape)
    OUTPUTS[name](plain)
    before = bytes_of(passed)
    try:
        OUTPUTS[name](passed)
    except ArgumentError:
        assert bytes_of(passed) == before, "a refused output was written to"
        return
    assert bytes_of(passed) == plain.tobytes()


def test_overlapping_output():
    """apply_rope in place is its only overlap: `out` may be `x`."""
    x = RNG.standard_normal((5, 2, 32)).astype(np.float32)
    wanted = rs.apply_rope(x, i32(range(5)), ROPE)
    assert rs.apply_rope(x, i32(range(5)), ROPE, out=x) is x
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("device", [(8, 0), (4, 0), (10, 3)])
def test_dlpack_of_other_devices(device):
    """OpenCL, ROCm and others: refused by the number of their kind before anything is read."""

    class Elsewhere:
        def __dlpack_device__(self):
            return device

        def __dlpack__(self, **options):
            raise AssertionError("read")

    with pytest.raises(ArgumentError, match=f"x: DLPack device type {device[0]} is neither"):
        rs.quantize_mxfp8(Elsewhere())
