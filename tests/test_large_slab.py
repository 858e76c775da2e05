"""Byte addresses past 2^31: every operation on a slab multiplies in 64 bits."""

import numpy as np
import pytest
from helpers import (
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_bf16,
    record_format,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.rawkernels.cpu.record_kernels import buffer_addresses, ring_addresses
from ringslab.rawkernels.ring_access import ring_access

FORMAT = record_format(512)


def test_o01_record_offsets():
    """Records 4,067,203 and 4,067,204 of 528 bytes: 2,147,483,184 and 2,147,483,712."""
    values, scales = buffer_addresses(np.int64([4_067_203, 4_067_204]), FORMAT)
    assert values.tolist() == [2_147_483_184, 2_147_483_712]
    assert scales.tolist() == [2_147_483_696, 2_147_484_224]


@pytest.mark.parametrize("plane_order", ["interleaved", "planar"])
def test_o01_ring_offsets(plane_order):
    """The last record of the last ring of slot 5,000 of V4.1's shape (43 rings of 134)."""
    layout = make_layout(record_format(512, plane_order=plane_order), 134, num_layers=43)
    access = ring_access("test", layout, 41)
    (value,), (scale,) = ring_addresses(np.int64([5000 * 134 + 133]), access)
    ring = 5000 * layout.slot_bytes + layout.ring(41).offset
    if plane_order == "planar":
        assert (value, scale) == (ring + 133 * 512, ring + 134 * 512 + 133 * 16)
    else:
        assert (value, scale) == (ring + 133 * 528, ring + 133 * 528 + 512)
    assert value > 2**31


@pytest.mark.gpu
@pytest.mark.parametrize("plane_order", ["interleaved", "planar"])
def test_o01_slab_of_two_and_a_half_gigabytes(plane_order):
    """The last slot of a 2.4 GB slab holds, reads and decodes what the only slot of a small slab
    does, bit for bit; the bytes before it are untouched."""
    import cupy

    layout = make_layout(record_format(512, plane_order=plane_order), 134, num_layers=30)
    slots = 1150
    assert (slots - 1) * layout.slot_bytes > 2**31
    rng = np.random.default_rng(0)
    kv, q = random_bf16(rng, (140, 512)), random_bf16(rng, (3, 16, 512), 2.0)
    found = {}
    for name, count in (("large", slots), ("small", 1)):
        state = count - 1
        slab = cupy.full(count * layout.slot_bytes, 0xFF, cupy.uint8)
        ops = operations("cuda")
        ids, positions = np.full(140, state, np.int32), i32(range(140))
        ops.ring_store(
            slab,
            layout,
            29,
            to_backend(kv, "cuda"),
            to_backend(ids, "cuda"),
            to_backend(positions, "cuda"),
        )
        plan = rs.plan_decode(ids[:3], i32([137, 138, 139]), window=128, ring_len=134)
        outputs = [cupy.empty(q.shape, cupy.uint16), cupy.empty(q.shape[:2], cupy.float32)]
        ops.window_decode(
            to_backend(q, "cuda"),
            slab,
            layout,
            29,
            to_backend(plan, "cuda"),
            *outputs,
            softmax_scale=0.04,
        )
        history = rs.plan_prefill([state], [1], [141], window=128, ring_len=134)
        records = rs.load_history(slab, layout, 29, to_backend(history, "cuda"))
        before = slab[: state * layout.slot_bytes]
        assert count == 1 or int(before.min()) == 0xFF
        last = slab[state * layout.slot_bytes :]
        found[name] = [to_host(x) for x in (last, *outputs, records)]
    for large, small in zip(found["large"], found["small"], strict=True):
        np.testing.assert_array_equal(large, small)
    host = poisoned_slab(layout, 1)
    operations("reference").ring_store(
        host, layout, 29, kv, np.zeros(140, np.int32), i32(range(140))
    )
    np.testing.assert_array_equal(found["large"][0], host)
