"""ring_store on every backend: the bytes of encode_records at the places of store_records."""

import numpy as np
import pytest
from helpers import (
    Guarded,
    encoded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    to_backend,
)

import ringslab as rs

FORMATS = {
    "interleaved": record_format(64),
    "planar": record_format(64, plane_order="planar"),
    "bf16": record_format(64, "bf16"),
}
ROPES = {"none": None, "adjacent": rs.Rope(10000.0, 32, "adjacent")}


def ring_store(backend, layout, num_slots, layer, kv, state_ids, positions, rope=None):
    slab = Guarded((num_slots * layout.slot_bytes,), np.uint8, backend)
    operations(backend).ring_store(
        slab.array,
        layout,
        layer,
        to_backend(kv, backend),
        to_backend(i32(state_ids), backend),
        to_backend(i32(positions), backend),
        rope=rope,
    )
    return slab.host()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_is_encode_then_store(backend, fmt, rope):
    """A ragged step with wraps and padding, and a chunk of 30 into a ring of 11, layer 1 of 2:
    the slab equals that of the two operations, sentinels and other rings untouched."""
    layout = make_layout(FORMATS[fmt], 11)
    state_ids = [2, 2, 2, -1, 0] + [1] * 30
    positions = [9, 10, 11, 0, 2**31 - 2, *range(40, 70)]
    kv = random_bf16(np.random.default_rng(1), (35, 64))
    found = ring_store(backend, layout, 3, 1, kv, state_ids, positions, ROPES[rope])
    wanted = poisoned_slab(layout, 3)
    records = encoded(kv, FORMATS[fmt], i32(positions), ROPES[rope])
    operations("reference").store_records(
        wanted, layout, 1, records, i32(state_ids), i32(positions)
    )
    np.testing.assert_array_equal(found, wanted)


def test_r04_rows_when_the_length_equals_the_window(backend):
    """Ring of 8, positions 0..10 one at a time: rows hold 8, 9, 10, 3, 4, 5, 6, 7."""
    fmt = record_format(32, "bf16")
    layout = make_layout(fmt, 8, num_layers=1)
    slab = to_backend(poisoned_slab(layout, 1), backend)
    for position in range(11):
        kv = np.full((1, 32), np.float32(position).view(np.uint32) >> 16, np.uint16)
        operations(backend).ring_store(
            slab,
            layout,
            0,
            to_backend(kv, backend),
            to_backend(i32([0]), backend),
            to_backend(i32([position]), backend),
        )
    host = slab if isinstance(slab, np.ndarray) else slab.get()
    rows = layout.view(host, 0)[0, :, 0].copy().view(np.uint16)[:, 0].astype(np.uint32) << 16
    assert rows.view(np.float32).tolist() == [8, 9, 10, 3, 4, 5, 6, 7]


def test_every_layer_has_its_own_ring(backend):
    """Three layers stored one after the other: each view holds its own records, nothing leaks into
    another ring or slot."""
    fmt = FORMATS["interleaved"]
    layout = make_layout(fmt, 5, num_layers=3)
    slab = to_backend(poisoned_slab(layout, 2), backend)
    kv = random_bf16(np.random.default_rng(3), (3, 64))
    for layer in range(3):
        operations(backend).ring_store(
            slab,
            layout,
            layer,
            to_backend(kv[layer : layer + 1], backend),
            to_backend(i32([1]), backend),
            to_backend(i32([layer]), backend),
        )
    host = slab if isinstance(slab, np.ndarray) else slab.get()
    for layer in range(3):
        view = layout.view(host, layer)
        np.testing.assert_array_equal(view[1, layer, 0], encoded(kv[layer : layer + 1], fmt)[0])
        assert (view[0] == 0xFF).all()
        assert (np.delete(view[1], layer, axis=0) == 0xFF).all()


def test_nothing_to_store(backend):
    """No tokens: the slab keeps every byte."""
    layout = make_layout(FORMATS["interleaved"], 7)
    assert (ring_store(backend, layout, 2, 0, np.zeros((0, 64), np.uint16), [], []) == 0xFF).all()


def test_refuses_wrong_arrays():
    """Missing positions, a wrong head_dim, an id past the slab."""
    layout = make_layout(FORMATS["interleaved"], 7)
    slab, kv = poisoned_slab(layout, 2), random_bf16(np.random.default_rng(1), (2, 64))
    with pytest.raises(rs.errors.ArgumentError, match=r"kv\.shape\[1\]=32 .*head_dim=64"):
        rs.ring_store(slab, layout, 0, kv[:, :32].copy(), i32([0, 1]), i32([0, 0]))
    with pytest.raises(rs.errors.ArgumentError, match=r"state_ids\[0\]=2"):
        rs.ring_store(slab, layout, 0, kv, i32([2, 1]), i32([0, 0]))
    rope = rs.Rope(1e4, 128, "half")
    with pytest.raises(rs.errors.ArgumentError, match=r"rope\.dims=128"):
        rs.ring_store(slab, layout, 0, kv, i32([0, 1]), i32([0, 0]), rope=rope)
