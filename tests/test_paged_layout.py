"""Paged pools: where the records of each global layer lie in a block, and how many blocks."""

import hashlib

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import LayoutError
from ringslab.layouts.paged import build_paged_layout, max_window_blocks


def gqa(record_type: str, num_kv_heads: int, head_dim: int):
    return rs.make_record_format(record_type, head_dim, latent=False, num_kv_heads=num_kv_heads)


def test_offsets_padding_and_block_bytes():
    """gpt-oss in bf16: a record is 2 x 8 x 64 x 2 = 2,048 B, 16 of them 32,768 B a layer. MXFP8
    of 1 x 32: 2 x 33 = 66 B, 5 of them 330, padded to 352."""
    layout = build_paged_layout([(1, gqa("bf16", 8, 64)), (3, gqa("bf16", 8, 64))], 16, 32)
    assert [(part.layer, part.offset) for part in layout.layers] == [(1, 0), (3, 32_768)]
    assert layout.block_bytes == 65_536
    layout = build_paged_layout([(5, gqa("mxfp8", 1, 32)), (2, gqa("bf16", 1, 32))], 5, 32)
    assert [(part.layer, part.offset) for part in layout.layers] == [(5, 0), (2, 352)]
    assert (layout.layer_bytes(5), layout.layer_bytes(2), layout.block_bytes) == (352, 640, 992)
    assert layout.layer(2).record_bytes == 128


def test_view_writes_through_and_layers_never_overlap():
    """Layer 5's last record of block 2 ends at 2 x 992 + 330, and layer 2 begins at + 352; each
    view has the stride of a block, and filling one leaves the other and the padding alone."""
    layout = build_paged_layout([(5, gqa("mxfp8", 1, 32)), (2, gqa("bf16", 1, 32))], 5, 32)
    pool = np.zeros(3 * layout.block_bytes, np.uint8)
    first, second = layout.view(pool, 5), layout.view(pool, 2)
    assert (first.shape, second.shape) == ((3, 5, 1, 66), (3, 5, 1, 128))
    assert first.strides == (992, 66, 66, 1)
    first[2, 4, 0, 65] = 7
    assert np.flatnonzero(pool).tolist() == [2 * 992 + 329]
    first[...], second[...] = 1, 2
    assert np.bincount(pool).tolist() == [3 * 22, 3 * 330, 3 * 640]
    assert (second == 2).all()


def test_golden_block():
    """The bytes of a block of two layers, each record filled with layer + 16 * token: a released
    layout is never edited."""
    layout = build_paged_layout([(0, gqa("bf16", 2, 32)), (1, gqa("mxfp8", 2, 32))], 3, 32)
    pool = np.zeros(2 * layout.block_bytes, np.uint8)
    for layer in (0, 1):
        layout.view(pool, layer)[...] = layer + 16 * np.arange(3, dtype=np.uint8)[:, None, None] + 1
    assert layout.block_bytes == 768 + 416
    digest = hashlib.sha256(pool.tobytes()).hexdigest()
    assert digest == "a577243e83a8784f90a0a2fc805dd5ae6e1fdacce9fa395a59475076008f699f"


@pytest.mark.parametrize(
    ("seqlen", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (131_072, 8192)]
)
def test_blocks_of_a_sequence(seqlen, blocks):
    """A sequence of n tokens holds ceil(n / 16) blocks, none of them for no tokens."""
    layout = build_paged_layout([(0, gqa("bf16", 1, 32))], 16, 32)
    assert layout.blocks_of(seqlen) == blocks


def test_blocks_of_a_window():
    """Window 128 in blocks of 16: at most 9 live blocks, 144 token slots; the bound holds and is
    reached over positions 1 .. 4096, for windows that a block divides and others."""
    assert max_window_blocks(128, 16) == 9
    for window, block in ((128, 16), (100, 16), (1, 16), (5, 3), (1024, 16), (130, 64)):
        live = max(
            (last // block) - (max(0, last - window + 1) // block) + 1 for last in range(4096)
        )
        assert live == max_window_blocks(window, block) - (window % block == 1), (window, block)


def test_what_is_refused():
    """A block size of 0, an alignment of 24, no layers, a layer twice, a planar format, a pool that
    is no whole number of blocks and a layer that has no pages."""
    bf16, planar = gqa("bf16", 1, 32), rs.make_record_format("mxfp8", 64, plane_order="planar")
    for layers, block_size, align, text in (
        ([(0, bf16)], 0, 32, "block_size=0"),
        ([(0, bf16)], True, 32, "block_size=True"),
        ([(0, bf16)], 16, 24, "align_bytes=24"),
        ([], 16, 32, "at least one layer"),
        ([(0, bf16), (0, bf16)], 16, 32, "layer=0 is in the paged pool twice"),
        ([(0, planar)], 16, 32, "is planar"),
    ):
        with pytest.raises(LayoutError, match=text):
            build_paged_layout(layers, block_size, align)
    layout = build_paged_layout([(1, bf16)], 16, 32)
    with pytest.raises(LayoutError, match="layer=0 has no records in the paged pool"):
        layout.view(np.zeros(layout.block_bytes, np.uint8), 0)
    with pytest.raises(LayoutError, match="no multiple of block_bytes=2048"):
        layout.check_pool(np.zeros(layout.block_bytes + 1, np.uint8))
    with pytest.raises(LayoutError, match="flat contiguous uint8"):
        layout.check_pool(np.zeros(2 * layout.block_bytes, np.uint8)[::2])
    with pytest.raises(LayoutError, match="window=0"):
        max_window_blocks(0, 16)
