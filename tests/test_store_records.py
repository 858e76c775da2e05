"""store_records on every backend: the right bytes change in the slab, and no other."""

import zlib

import numpy as np
import pytest
from helpers import (
    Guarded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    record_format,
    to_backend,
)

import ringslab as rs

FORMATS = {
    "interleaved": record_format(64),
    "planar": record_format(64, plane_order="planar"),
    "bf16": record_format(64, "bf16"),
}


def store(backend, layout, num_slots, layer, records, state_ids, positions):
    """A poisoned slab between sentinels after one call; uint8 host array."""
    slab = Guarded((num_slots * layout.slot_bytes,), np.uint8, backend)
    operations(backend).store_records(
        slab.array,
        layout,
        layer,
        to_backend(records, backend),
        to_backend(i32(state_ids), backend),
        to_backend(i32(positions), backend),
    )
    return slab.host()


def random_records(count, fmt, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, fmt.record_bytes), dtype=np.uint8)


def expected_slab(layout, num_slots, layer, records, state_ids, positions):
    """Independent model: later tokens overwrite earlier ones, through the layout's own views."""
    slab = poisoned_slab(layout, num_slots)
    values, scales = layout.planes(slab, layer)
    split = values.shape[3]
    for record, state_id, position in zip(records, state_ids, positions, strict=True):
        if state_id >= 0:
            values[state_id, position % values.shape[1], 0] = record[:split]
            scales[state_id, position % values.shape[1], 0] = record[split:]
    return slab


@pytest.mark.parametrize("fmt", FORMATS)
def test_wrap_and_padding(backend, fmt):
    """Ring of 7, 3 slots, layer 1 of 2: positions 5..8 wrap to rows 5, 6, 0, 1; padding (-1) and
    its position are ignored; every other byte keeps its poison."""
    layout = make_layout(FORMATS[fmt], 7)
    records = random_records(7, FORMATS[fmt])
    state_ids, positions = [2, 2, 2, 2, -1, 0, -1], [5, 6, 7, 8, 3, 2**31 - 2, -1]
    found = store(backend, layout, 3, 1, records, state_ids, positions)
    np.testing.assert_array_equal(found, expected_slab(layout, 3, 1, records, state_ids, positions))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("count", [6, 7, 8, 14, 15, 40])
def test_chunk_longer_than_the_ring(backend, fmt, count):
    """A chunk of up to 40 tokens, two sequences one after the other, into a ring of 7: the last 7
    of each stay, in any order of execution."""
    layout = make_layout(FORMATS[fmt], 7)
    records = random_records(2 * count, FORMATS[fmt])
    state_ids = [1] * count + [0] * count
    positions = [*range(3, 3 + count), *range(100, 100 + count)]
    found = store(backend, layout, 2, 0, records, state_ids, positions)
    np.testing.assert_array_equal(found, expected_slab(layout, 2, 0, records, state_ids, positions))


@pytest.mark.parametrize("fmt", FORMATS)
def test_stage(backend, fmt):
    """A chunk of 40 tokens of two sequences into rings of 7; a stage of 4 places takes the 7 before
    three boundaries: in the first ring's last turn, so in both slabs, in the middle, so in the
    stage only, and of the other sequence fewer than a ring. Slab and stage hold what a call each
    gives, padding of one is none of the other's, and nothing else is written."""
    layout = make_layout(FORMATS[fmt], 7)
    records = random_records(42, FORMATS[fmt])
    state_ids = i32([1] * 25 + [0] * 15 + [-1] * 2)
    positions = i32([*range(3, 28), *range(100, 115), 5, 6])
    places = np.full(42, -1, np.int32)
    places[15:22], places[3:10], places[25:29], places[40] = 2, 0, 3, 1
    slab, stage = (Guarded((slots * layout.slot_bytes,), np.uint8, backend) for slots in (2, 4))
    rows = [to_backend(x, backend) for x in (records, state_ids, positions, places)]
    operations(backend).store_records(
        slab.array, layout, 1, *rows[:3], stage=(stage.array, rows[3])
    )
    wanted = expected_slab(layout, 2, 1, records, state_ids, positions)
    np.testing.assert_array_equal(slab.host(), wanted)
    wanted = expected_slab(layout, 4, 1, records, places, positions)
    np.testing.assert_array_equal(stage.host(), wanted)


def test_a_stage_of_long_turns(backend):
    """A place takes two turns of a ring of 7 in one call: the later one stays, whatever goes into
    the slab."""
    layout = make_layout(FORMATS["interleaved"], 7)
    records = random_records(20, FORMATS["interleaved"])
    state_ids, positions = i32([-1] * 20), i32(range(20))
    places = i32([-1] * 2 + [1] * 14 + [-1] * 4)
    slab, stage = (Guarded((2 * layout.slot_bytes,), np.uint8, backend) for _ in range(2))
    rows = [to_backend(x, backend) for x in (records, state_ids, positions, places)]
    operations(backend).store_records(
        slab.array, layout, 0, *rows[:3], stage=(stage.array, rows[3])
    )
    assert (slab.host() == 0xFF).all()
    wanted = expected_slab(layout, 2, 0, records, places, positions)
    np.testing.assert_array_equal(stage.host(), wanted)


def test_a_stage_that_is_wrong():
    """No pair, a slab of another layout, places of another length or dtype, ids of no place: errors
    that name it, and nothing is written."""
    layout = make_layout(FORMATS["interleaved"], 7)
    slab, stage, ids = poisoned_slab(layout, 2), poisoned_slab(layout, 1), i32([0, 1])
    records = random_records(2, FORMATS["interleaved"])
    for wrong, says in (
        (stage, "stage must be the pair"),
        ((stage, ids, ids), "stage must be the pair"),
        ((stage[:-1], i32([0, -1])), "stage slab.*slot_bytes"),
        ((stage, ids[:1]), r"places\.shape\[0\]=1"),
        ((stage, ids.astype(np.int64)), r"places\.dtype=int64"),
        ((stage, ids), r"places\[1\]=1 "),
        ((stage, i32([0, -2])), r"places\[1\]=-2"),
    ):
        with pytest.raises(rs.errors.ArgumentError, match=says):
            rs.store_records(slab, layout, 0, records, ids, ids, stage=wrong)
    assert (slab == 0xFF).all()
    assert (stage == 0xFF).all()
    rs.store_records(slab, layout, 0, records, ids, ids, stage=(stage, i32([-1, 0])))
    assert (stage != 0xFF).any()


def test_r13_padding_row(backend):
    """Ten slots of one record each, write list [3, -1, 4]: records 3 and 4 change, the other eight
    keep their CRC (record 9 too, which is where an index of -1 would land)."""
    layout = make_layout(FORMATS["interleaved"], 1, num_layers=1)
    records = random_records(3, FORMATS["interleaved"])
    before = [zlib.crc32(slot) for slot in poisoned_slab(layout, 10).reshape(10, -1)]
    found = store(backend, layout, 10, 0, records, [3, -1, 4], [0, 0, 0]).reshape(10, -1)
    changed = [i for i in range(10) if zlib.crc32(found[i]) != before[i]]
    assert changed == [3, 4]
    np.testing.assert_array_equal(found[3, : records.shape[1]], records[0])
    np.testing.assert_array_equal(found[4, : records.shape[1]], records[2])


def test_q14_where_a_byte_of_a_record_lives(backend):
    """Record 2 of a ring of 134, head_dim 512: element 100 is at byte 1156 of the ring, its scale
    (index 3) at 1571; planar: 1124 and 68643."""
    record = np.zeros((1, 528), np.uint8)
    record[0, 100], record[0, 512 + 3] = 0x38, 0x7F
    for plane_order, places in (("interleaved", [1156, 1571]), ("planar", [1124, 68643])):
        fmt = record_format(512, plane_order=plane_order)
        layout = make_layout(fmt, 134, num_layers=1)
        found = store(backend, layout, 1, 0, record, [0], [134 * 5 + 2])
        assert np.isin(found, (0x38, 0x7F)).sum() == 2
        assert [found[places[0]], found[places[1]]] == [0x38, 0x7F]


def test_nothing_to_store(backend):
    """No tokens, and only padding: the slab keeps every byte."""
    layout = make_layout(FORMATS["interleaved"], 7)
    for count in (0, 3):
        records = random_records(count, FORMATS["interleaved"])
        found = store(backend, layout, 2, 0, records, [-1] * count, [0] * count)
        assert (found == 0xFF).all()


@pytest.mark.parametrize("bad", [-2, 2, 2**31 - 1])
def test_state_ids_out_of_range_on_the_host(bad):
    """-2, num_state_slots and INT_MAX are errors that name the token, and nothing is written."""
    layout = make_layout(FORMATS["interleaved"], 7)
    slab = poisoned_slab(layout, 2)
    records = random_records(2, FORMATS["interleaved"])
    with pytest.raises(rs.errors.ArgumentError, match=rf"state_ids\[1\]={bad}"):
        rs.store_records(slab, layout, 0, records, i32([0, bad]), i32([0, 0]))
    with pytest.raises(rs.errors.ArgumentError, match=r"positions\[0\]=-1"):
        rs.store_records(slab, layout, 0, records, i32([0, 1]), i32([-1, 0]))
    assert (slab == 0xFF).all()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-2, 2, 2**31 - 1, -(2**31)])
def test_state_ids_out_of_range_on_the_gpu(bad):
    """The token is skipped: every byte around and in the slab keeps its value."""
    layout = make_layout(FORMATS["interleaved"], 7)
    records = random_records(1, FORMATS["interleaved"])
    assert (store("cuda", layout, 2, 0, records, [bad], [3]) == 0xFF).all()


@pytest.mark.gpu
def test_o04_misaligned_slab_is_refused():
    """A slab view that starts 8 bytes in: kernels move pieces of 16 bytes."""
    import cupy

    layout = make_layout(FORMATS["interleaved"], 7)
    slab = cupy.zeros(layout.slot_bytes + 8, cupy.uint8)[8:]
    ids = cupy.zeros(1, cupy.int32)
    records = to_backend(random_records(1, FORMATS["interleaved"]), "cuda")
    with pytest.raises(rs.errors.ArgumentError, match="multiple of 16"):
        rs.store_records(slab, layout, 0, records, ids, ids)


def test_refuses_wrong_arrays():
    """Wrong record size, a slab of another layout, a strided slab, mismatched lengths."""
    layout = make_layout(FORMATS["interleaved"], 7)
    slab, ids = poisoned_slab(layout, 2), i32([0, 1])
    records = random_records(2, FORMATS["interleaved"])
    with pytest.raises(rs.errors.ArgumentError, match=r"records\.shape\[1\]=65 .*66"):
        rs.store_records(slab, layout, 0, records[:, :65].copy(), ids, ids)
    with pytest.raises(rs.errors.ArgumentError, match="slot_bytes"):
        rs.store_records(slab[:-1], layout, 0, records, ids, ids)
    with pytest.raises(rs.errors.ArgumentError, match="C-contiguous"):
        rs.store_records(slab[::2], layout, 0, records, ids, ids)
    with pytest.raises(rs.errors.ArgumentError, match=r"positions\.shape\[0\]=1"):
        rs.store_records(slab, layout, 0, records, ids, ids[:1])
    with pytest.raises(rs.errors.LayoutError, match="layer=9"):
        rs.store_records(slab, layout, 9, records, ids, ids)
    slab.flags.writeable = False
    with pytest.raises(rs.errors.ArgumentError, match="read-only"):
        rs.store_records(slab, layout, 0, records, ids, ids)
