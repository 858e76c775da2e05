"""Record formats: what the bytes of one token are."""

import pytest

from ringslab.errors import LayoutError
from ringslab.layouts.formats import MX_BLOCK, derive_fields, make_record_format


def test_window_record_of_v4_1():
    """One 512-wide latent vector is 512 E4M3 bytes, then 16 E8M0 bytes: 528, not 1,056 (K and V
    apart) and not 2,048 (a bf16 pair); B05."""
    record = make_record_format("mxfp8", 512)
    assert (record.record_bytes, record.value_bytes, record.scale_bytes) == (528, 512, 16)
    assert [(f.id, f.type, f.shape, f.offset, f.bytes) for f in record.fields] == [
        ("kv_values", "e4m3", (512,), 0, 512),
        ("kv_scales", "e8m0", (16,), 512, 16),
    ]
    assert (record.scale_rounding, record.amax_floor) == ("ceil", 1e-4)
    assert record.num_vectors == 1
    assert hash(record) == hash(make_record_format("mxfp8", 512))


def test_bf16_record():
    """A bf16 latent record of 512 is 1,024 bytes, without scales and scale rule."""
    record = make_record_format("bf16", 512)
    assert (record.record_bytes, record.value_bytes, record.scale_bytes) == (1024, 1024, 0)
    assert (record.scale_rounding, record.amax_floor) == (None, None)


def test_grouped_query_record():
    """K values, K scales, V values, V scales of 8 heads of 128: offsets 0, 1024, 1056, 2080 of
    2,112 bytes; in fp16 K then V, 4,096 bytes."""
    record = make_record_format("mxfp8", 128, latent=False, num_kv_heads=8)
    assert [field.offset for field in record.fields] == [0, 1024, 1056, 2080]
    assert [field.shape for field in record.fields] == [(8, 128), (8, 4)] * 2
    assert record.record_bytes == 2112
    assert record.num_vectors == 16
    half = make_record_format("fp16", 128, latent=False, num_kv_heads=8)
    assert (half.record_bytes, half.fields[1].offset) == (4096, 2048)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 512, 4096])
@pytest.mark.parametrize("latent", [True, False])
def test_fields_tile_the_record(head_dim, latent):
    """Fields follow each other without gap or overlap, and every block of 32 values has a scale."""
    heads = 1 if latent else 3
    record = make_record_format("mxfp8", head_dim, latent=latent, num_kv_heads=heads)
    end = 0
    for field in record.fields:
        assert field.offset == end
        end += field.bytes
    assert end == record.record_bytes
    assert record.value_bytes == MX_BLOCK * record.scale_bytes


def test_q13_width_that_is_no_multiple_of_32():
    """Q13: head_dim 500 leaves 20 values after whole blocks; a record of it is refused with both
    numbers, while bf16 takes any width."""
    with pytest.raises(LayoutError, match=r"head_dim=500 leaves 20 values after blocks of 32"):
        make_record_format("mxfp8", 500)
    assert make_record_format("bf16", 500).record_bytes == 1000


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"record_type": "fp8"}, "record type 'fp8' is unknown; use one of mxfp8, bf16, fp16"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"head_dim": -32}, "head_dim=-32"),
        ({"latent": False, "num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": 2}, "num_kv_heads=2 but a latent record is one vector"),
        ({"plane_order": "split"}, "plane_order='split' but must be one of interleaved, planar"),
        ({"scale_rounding": "nearest"}, "scale_rounding='nearest' but must be one of ceil, floor"),
        ({"amax_floor": -1.0}, "amax_floor=-1.0"),
        ({"amax_floor": float("nan")}, "amax_floor=nan"),
        ({"record_type": "bf16", "plane_order": "planar"}, "has no scales"),
    ],
)
def test_wrong_arguments(kwargs, message):
    """Each wrong argument is a LayoutError that shows it."""
    arguments = {"record_type": "mxfp8", "head_dim": 64, **kwargs}
    with pytest.raises(LayoutError, match=message):
        make_record_format(arguments.pop("record_type"), arguments.pop("head_dim"), **arguments)


def test_derive_fields_leaves_docs_open():
    """Derived fields carry no text; the file's text is kept by the loader."""
    fields = derive_fields("mxfp8", latent=True, num_kv_heads=1, head_dim=64)
    assert [field.doc for field in fields] == ["", ""]
