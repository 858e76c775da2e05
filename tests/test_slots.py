"""Slot layouts: where each ring lies in a state slot, and views of a slab onto it."""

import hashlib

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import LayoutError
from ringslab.layouts.config import packaged_configs
from ringslab.layouts.slots import Ring, build_slot_layout

# sha256 of the rings' table and of two slots filled by `test_golden_layouts`, by (name, version).
# A released layout is never edited: what would change a hash here is a new version of the layout.
GOLDEN = {
    ("deepseek_v4_1_flash", 1): "f105e484393c0c6f69093fef517460c9e081718e4d27e44825332feaf4770a1c",
    (
        "deepseek_v4_1_flash_planar",
        1,
    ): "92bb1df10beab9d769b271db1da0659e746a13948e2773bf09fc740e77124bce",
    ("quickstart", 1): "066b9563e29d852c7c484096c13c59a203e0f0561c669766813061aa08a0228e",
}


def ring(layer, *, kind="swa", stored=False, ring_len=36, record=None) -> Ring:
    record = record or rs.make_record_format("mxfp8", 128)
    is_window = kind == "swa"
    return Ring(
        name=f"layer{layer}_{kind}",
        layer=layer,
        kind=kind,
        ring_len=ring_len,
        record_bytes=record.record_bytes if is_window else 1024,
        stored=stored,
        record_format=record if is_window else None,
    )


def flash_ring(plane_order: str):
    """A slot with one ring of 134 records of 528 bytes at offset 0, and a slab of 2 slots."""
    record = rs.make_record_format("mxfp8", 512, plane_order=plane_order)
    layout = build_slot_layout([ring(0, ring_len=134, record=record)], 32)
    return layout, np.zeros(2 * layout.slot_bytes, np.uint8)


def test_order_padding_and_totals():
    """Stored rings first, then the others, then compression state, whatever the order given; 36 x
    132 = 4,752 is padded to 4,768; stored_bytes ends after the last stored ring."""
    layout = build_slot_layout(
        [
            ring(0, kind="compression", ring_len=5),
            ring(2),
            ring(1, stored=True),
            ring(0, stored=True),
        ],
        32,
    )
    assert [(r.layer, r.kind, r.offset, r.bytes) for r in layout.rings] == [
        (1, "swa", 0, 4768),
        (0, "swa", 4768, 4768),
        (2, "swa", 9536, 4768),
        (0, "compression", 14304, 5120),
    ]
    assert (layout.stored_bytes, layout.slot_bytes) == (9536, 19424)
    assert (layout.ring(0).used_bytes, layout.ring(0, "compression").record_bytes) == (4752, 1024)


@pytest.mark.parametrize("name", packaged_configs())
def test_rings_tile_the_slot(name):
    """Rings follow each other without gap or overlap, each padded by less than align_bytes, each at
    a multiple of it (D8), and the stored ones are a prefix."""
    layout = rs.load_config(name).slot_layout
    end = 0
    for r in layout.rings:
        assert r.offset == end
        assert r.offset % layout.align_bytes == 0
        assert 0 <= r.bytes - r.used_bytes < layout.align_bytes
        end += r.bytes
        assert r.stored == (end <= layout.stored_bytes)
    assert end == layout.slot_bytes


def test_b03_stored_part():
    """B03: 20 rings of 134 x 528 are 1,415,040 B, of which 1 GiB holds 758."""
    layout = rs.load_config("deepseek_v4_1_flash").slot_layout
    assert layout.stored_bytes == 20 * 70_752 == 1_415_040
    assert 2**30 // layout.stored_bytes == 758  # whole ones


def test_view_is_strided_and_writes_through():
    """The view of a layer is [num_state_slots, 134, 1, 528], row stride slot_bytes, no copy: a byte
    written at (1, 133, 0, 527) is the ring's last byte of slot 1."""
    cfg = rs.load_config("deepseek_v4_1_flash")
    layout = cfg.slot_layout
    slab = np.zeros(2 * layout.slot_bytes, np.uint8)
    view = layout.view(slab, layer=3, kind="swa")
    assert view.shape == (2, 134, 1, 528)
    assert view.strides == (3_128_352, 528, 528, 1)
    assert np.shares_memory(view, slab)
    view[1, 133, 0, 527] = 7
    assert np.flatnonzero(slab).tolist() == [layout.slot_bytes + 3 * 70_752 + 70_751]
    state = layout.view(slab, layer=2, kind="compression")
    assert state.shape == (2, 7, 1, 4096)
    assert np.shares_memory(state, slab)


def test_layers_of_a_slab_never_overlap():
    """Filling every ring of every slot with its own value leaves each view with that value alone,
    for interleaved and planar rings."""
    for name in ("quickstart", "deepseek_v4_1_flash_planar"):
        layout = rs.load_config(name).slot_layout
        slab = np.full(2 * layout.slot_bytes, 0xFF, np.uint8)
        views = []
        for r in layout.rings:
            if r.record_format is None:
                views.append([layout.view(slab, r.layer, r.kind)])
            else:
                views.append(layout.planes(slab, r.layer, r.kind))
        for i, parts in enumerate(views):
            for part in parts:
                part[...] = i
        assert all((part == i).all() for i, parts in enumerate(views) for part in parts)
        used = sum(r.used_bytes for r in layout.rings)
        padding = layout.slot_bytes - used
        assert np.count_nonzero(slab == 0xFF) == 2 * padding  # nobody wrote there


def test_q14_where_a_byte_lives():
    """Q14: record 2 of a ring of 134, element 100. Interleaved: value byte 2*528 + 100 = 1156, its
    scale (index 3) at 1571. Planar: value byte 1124, scale byte 134*512 + 2*16 + 3 = 68643."""
    for plane_order, value_at, scale_at in (("interleaved", 1156, 1571), ("planar", 1124, 68643)):
        layout, slab = flash_ring(plane_order)
        values, scales = layout.planes(slab, layer=0)
        assert values.shape == (2, 134, 1, 512)
        assert scales.shape == (2, 134, 1, 16)
        values[1, 2, 0, 100], scales[1, 2, 0, 100 // 32] = 1, 2
        expected = [layout.slot_bytes + value_at, layout.slot_bytes + scale_at]
        assert np.flatnonzero(slab).tolist() == expected


def test_o01_offsets_are_wider_than_32_bits():
    """O01: record 4,067,203 starts at 2,147,483,184 and the next at 2,147,483,712, above 2^31: the
    arithmetic of layouts is on Python integers, which do not wrap."""
    record = rs.make_record_format("mxfp8", 512)
    big = build_slot_layout([ring(0, ring_len=4_100_000, record=record), ring(1)], 32)
    record_bytes = big.ring(0).record_bytes
    assert [4_067_203 * record_bytes, 4_067_204 * record_bytes] == [2_147_483_184, 2_147_483_712]
    assert big.ring(1).offset == 2_164_800_000 > 2**31


def test_planar_ring_has_no_whole_records():
    """A planar ring is refused by `view`, which names `planes`; compression state by `planes`."""
    layout, slab = flash_ring("planar")
    with pytest.raises(LayoutError, match=r"planar.*use SlotLayout\.planes"):
        layout.view(slab, layer=0)
    layout = rs.load_config("quickstart").slot_layout
    slab = np.zeros(layout.slot_bytes, np.uint8)
    with pytest.raises(LayoutError, match="holds float32 state"):
        layout.planes(slab, layer=1, kind="compression")


def test_planes_of_grouped_query_records_are_refused():
    """K scales lie between K values and V values, so two planes cannot show such a record."""
    record = rs.make_record_format("mxfp8", 64, latent=False, num_kv_heads=2)
    layout = build_slot_layout([ring(0, record=record)], 32)
    slab = np.zeros(layout.slot_bytes, np.uint8)
    assert layout.view(slab, layer=0).shape == (1, 36, 1, 264)
    with pytest.raises(LayoutError, match="scales of K between K and V"):
        layout.planes(slab, layer=0)


def test_slabs_that_do_not_fit():
    """A slab of another dtype, shape, stride or a size that is no whole number of slots."""
    layout, slab = flash_ring("interleaved")
    for wrong, message in (
        (slab.astype(np.int8), "dtype=int8"),
        (slab.reshape(2, -1), "must be a flat contiguous uint8 array"),
        (slab[::2], "must be a flat contiguous"),
        (slab[:-1], "141503 bytes is no multiple of slot_bytes=70752"),
        (b"abc", "must be a flat contiguous"),
        (None, "must be a flat contiguous"),
    ):
        with pytest.raises(LayoutError, match=message):
            layout.view(wrong, layer=0)
    assert layout.check_slab(slab) == 2
    assert layout.view(slab[:0], layer=0).shape == (0, 134, 1, 528)


def test_rings_that_are_not_there():
    """A layer without a ring of that kind is refused with the layers that have one."""
    layout = rs.load_config("quickstart").slot_layout
    with pytest.raises(LayoutError, match=r"layer=0 has no ring of kind='compression'.*\[1, 2\]"):
        layout.ring(0, "compression")
    with pytest.raises(LayoutError, match="layer=8 has no ring of kind='swa'"):
        layout.ring(8)
    with pytest.raises(LayoutError, match="layer=-1"):
        layout.ring(-1)


def test_layouts_that_do_not_add_up():
    """Alignment, no rings, empty rings, foreign record sizes, two rings of one layer and kind,
    stored compression state: each a LayoutError with the numbers."""
    record = rs.make_record_format("mxfp8", 128)
    foreign = Ring("x", 0, "swa", 36, 544, False, record)
    for rings, align, message in (
        ([ring(0)], 24, "align_bytes=24 but must be a positive multiple of 16"),
        ([ring(0)], 0, "align_bytes=0"),
        ([], 32, "at least one ring"),
        ([ring(0, ring_len=0)], 32, "ring_len=0"),
        ([foreign], 32, "record_bytes=544 but record format mxfp8 has 132"),
        ([ring(0), ring(0)], 32, "layer=0 has two rings of kind='swa'"),
        ([ring(0, kind="compression", stored=True)], 32, "never stored"),
    ):
        with pytest.raises(LayoutError, match=message):
            build_slot_layout(rings, align)


LATENT = ("deepseek_v4_1_flash", "deepseek_v4_1_flash_planar", "quickstart")


@pytest.mark.parametrize("name", LATENT)
def test_golden_layouts(name):
    """Every released layout keeps each ring's place and size, and where the values and scales of
    each record lie: ring r, byte i of its values (or scales) is (7 i + 13 layer + part) % 251."""
    cfg = rs.load_config(name)
    layout = cfg.slot_layout
    slab = np.zeros(2 * layout.slot_bytes, np.uint8)
    digest = hashlib.sha256(f"{layout.stored_bytes} {layout.slot_bytes}\n".encode())
    for r in layout.rings:
        row = (r.name, r.layer, r.kind, r.ring_len, r.record_bytes, r.stored, r.offset, r.bytes)
        digest.update(f"{row}\n".encode())
        is_state = r.record_format is None
        read = layout.view if is_state else layout.planes
        views = read(slab, r.layer, r.kind)
        for i, part in enumerate((views,) if is_state else views):
            numbers = np.arange(part.size, dtype=np.int64) * 7 + r.layer * 13 + i
            part[...] = (numbers % 251).astype(np.uint8).reshape(part.shape)
    digest.update(slab.tobytes())
    assert digest.hexdigest() == GOLDEN[cfg.name, cfg.version]
