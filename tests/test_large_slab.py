"""Byte addresses past 2^31 and 2^32: every operation on a slab multiplies in 64 bits."""

import numpy as np
import pytest
from helpers import (
    encoded,
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
    values, scales = buffer_addresses(np.int64([4_067_203, 4_067_204]), FORMAT).part(0)
    assert values.tolist() == [2_147_483_184, 2_147_483_712]
    assert scales.tolist() == [2_147_483_696, 2_147_484_224]


@pytest.mark.parametrize("plane_order", ["interleaved", "planar"])
def test_o01_ring_offsets(plane_order):
    """The last record of the last ring of slot 5,000 of V4.1's shape (43 rings of 134)."""
    layout = make_layout(record_format(512, plane_order=plane_order), 134, num_layers=43)
    access = ring_access("test", layout, 41)
    (value,), (scale,) = ring_addresses(np.int64([5000 * 134 + 133]), access).part(0)
    ring = 5000 * layout.slot_bytes + layout.ring(41).offset
    if plane_order == "planar":
        assert (value, scale) == (ring + 133 * 512, ring + 134 * 512 + 133 * 16)
    else:
        assert (value, scale) == (ring + 133 * 528, ring + 133 * 528 + 512)
    assert value > 2**31


@pytest.mark.parametrize("heads", [16, 64], ids=["portable", "hopper"])
@pytest.mark.parametrize("state", [687, 1373])
@pytest.mark.parametrize("name", ["deepseek_v4_1_flash", "deepseek_v4_1_flash_planar"])
@pytest.mark.gpu
def test_o01_state_slots_past_2_31_and_2_32_bytes(name, state, heads):
    """V4.1: state slot 687 lies past 2^31 bytes, 1,373 past 2^32. What they store, load and decode
    is what the only slot of a small slab does, bit for bit, and the bytes before are untouched."""
    import cupy

    layout = rs.load_config(name).slot_layout
    assert state * layout.slot_bytes > (2**31 if state == 687 else 2**32)
    assert (state - 1) * layout.slot_bytes < (2**31 if state == 687 else 2**32)
    rng = np.random.default_rng(0)
    kv, q = random_bf16(rng, (140, 512)), random_bf16(rng, (3, heads, 512), 2.0)
    records = encoded(kv, FORMAT)
    ops, found = operations("cuda"), {}
    for count in (state + 1, 1):
        slot = count - 1
        slab = cupy.full(count * layout.slot_bytes, 0xFF, cupy.uint8)
        ids = np.full(140, slot, np.int32)
        where = to_backend(ids, "cuda"), to_backend(i32(range(140)), "cuda")
        ops.ring_store(slab, layout, 42, to_backend(kv, "cuda"), *where)
        ops.store_records(slab, layout, 41, to_backend(records, "cuda"), *where)
        plan = rs.plan_decode(ids[:3], i32([137, 138, 139]), window=128, ring_len=134)
        outputs = [cupy.empty(q.shape, cupy.uint16), cupy.empty(q.shape[:2], cupy.float32)]
        place = to_backend(plan, "cuda")
        q_there = to_backend(q, "cuda")
        ops.window_decode(q_there, slab, layout, 42, place, *outputs, softmax_scale=0.04)
        history = rs.plan_prefill([slot], [1], [141], window=128, ring_len=134)
        loaded = rs.load_history(slab, layout, 41, to_backend(history, "cuda"))
        before = slab[: slot * layout.slot_bytes]
        assert count == 1 or int(before.min()) == 0xFF
        last = slab[slot * layout.slot_bytes :]
        found[count] = [to_host(x) for x in (last, *outputs, loaded)]
        del slab, before, last
        cupy.get_default_memory_pool().free_all_blocks()
    for large, small in zip(found[state + 1], found[1], strict=True):
        np.testing.assert_array_equal(large, small)
    host, first = poisoned_slab(layout, 1), np.zeros(140, np.int32)
    operations("reference").ring_store(host, layout, 42, kv, first, i32(range(140)))
    operations("reference").store_records(host, layout, 41, records, first, i32(range(140)))
    np.testing.assert_array_equal(found[1][0], host)


@pytest.mark.parametrize("past", [2**31, 2**32])
@pytest.mark.gpu
def test_blocks_past_2_31_and_2_32_bytes(past):
    """32 layers of 8 KV heads of 128 in blocks of 16 tokens, 1,081,344 bytes: what the last three
    blocks of a pool that ends past 2^31 or 2^32 bytes store and load is what the only three of a
    small pool do, bit for bit, and the bytes before them are untouched."""
    import cupy

    fmt = record_format(128, kv_heads=8)
    layout = rs.build_paged_layout([(layer, fmt) for layer in range(32)], 16, 32)
    assert layout.block_bytes == 1_081_344
    rng = np.random.default_rng(1)
    kv = tuple(to_backend(random_bf16(rng, (40, 8, 128)), "cuda") for _ in range(2))
    ids, positions = np.zeros(40, np.int32), i32(range(40))
    places = to_backend(ids, "cuda"), to_backend(positions, "cuda")
    ops, found = operations("cuda"), []
    for first in (past // layout.block_bytes + 1, 0):
        pool = cupy.full((first + 3) * layout.block_bytes, 0xFF, cupy.uint8)
        tables = to_backend(i32([[first + 2, first, first + 1]]), "cuda")
        ops.paged_store(pool, layout, 31, kv, tables, *places)
        k, v = (cupy.zeros((40, 8, 128), cupy.uint16) for _ in range(2))
        ops.paged_load(pool, layout, 31, tables, to_backend(i32([0, 40]), "cuda"), k, v)
        before = pool[: first * layout.block_bytes]
        assert first == 0 or int(before.min()) == 0xFF
        found.append([to_host(x) for x in (pool[first * layout.block_bytes :], k, v)])
        del pool, before
        cupy.get_default_memory_pool().free_all_blocks()
    for large, small in zip(*found, strict=True):
        np.testing.assert_array_equal(large, small)
    assert (found[0][0] != 0xFF).any()
