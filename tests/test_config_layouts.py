"""Layers, formats and state slots that do not add up are refused with both numbers."""

import pytest
from config_edits import FLASH, QUICKSTART, edited, faults_of, one_fault, table

import ringslab as rs
from ringslab.layouts.config import packaged_configs


@pytest.mark.parametrize(
    ("old", "new", "key", "got"),
    [
        ("layers: [0]", "layers: [0, 0]", "layer_groups[0].layers", "[0, 0]"),
        ("    layers: [0]\n", "", "layer_groups[0]", "no layers"),
        ("last: 2", "last: 2\n    layers: [1, 2]", "layer_groups[1]", "layers and first and last"),
        ("    last: 2\n", "", "layer_groups[1]", "first"),
    ],
)
def test_layer_lists(tmp_path, old, new, key, got):
    """A group names its layers in one of two ways, ascending, each once."""
    lines = faults_of(edited(tmp_path, (old, new)))
    asked = "one or more ascending" if "[0, 0]" in new else "either layers, or both first and last"
    assert f" {key}: got {got}, expected {asked}" in lines[0]


def test_layers_twice_missing_or_of_another_role(tmp_path):
    """Each layer is in one group; ids below num_layers are no drafts, the others are."""
    lines = faults_of(edited(tmp_path, ("last: 5", "last: 6"), ("num_layers: 3", "num_layers: 4")))
    assert len(lines) == 2
    assert "layer_groups[2]: got [6], expected ids 0 .. 5 for role consumer" in lines[0]
    assert "got [6], expected layers that group consumers does not have" in lines[1]
    lines = faults_of(
        edited(tmp_path, ("first: 3", "first: 4"), ("num_layers: 3", "num_layers: 2"))
    )
    assert lines[0].endswith(
        "layer_groups: got no group for layers [3], expected each layer in one group"
    )
    [line] = faults_of(edited(tmp_path, ("first: 3\n    last: 5\n    num_layers: 3",
                                         "first: 3\n    last: 5\n    num_layers: 20")))  # fmt: skip
    assert "layer_groups[2].num_layers: got 20, expected the derived value 3" in line


def test_y10_d7_ring_below_the_rule(tmp_path):
    """Y10, D7: a ring of 128 with window 128 and 6 tokens a step is refused with 128 < 133; 133 is
    accepted by the rule (then 133 x 528 = 70,224 B, padded to
    70,240, is asked for)."""
    path = edited(tmp_path, ("ring_len: 134", "ring_len: 128"), base=FLASH)
    lines = faults_of(path)
    expected = (
        "slot.rings[0].ring_len: got 128, expected at least window + tokens_per_step - 1 = "
        "128 + 6 - 1 = 133 (128 < 133); write 133 or more; 134 is usual"
    )
    assert lines[0].endswith(expected)
    assert lines[1].endswith(
        "slot.rings[0].ring_bytes: got 70752, expected the derived value 67584; "
        "write 67584, or change what it follows from"
    )
    lines = faults_of(edited(tmp_path, ("ring_len: 134", "ring_len: 133"), base=FLASH))
    assert not [line for line in lines if "ring_len" in line]
    assert "slot.rings[0].ring_bytes: got 70752, expected the derived value 70240" in lines[1]


def test_y10_compression_state_below_the_rule(tmp_path):
    """Compression state of ratio 2 with 6 tokens a step needs 7 entries; 6 are refused."""
    path = edited(tmp_path, ("num_entries: 7", "num_entries: 6"), base=FLASH)
    assert (
        "num_entries: got 6, expected at least ratio + tokens_per_step - 1 = 2 + 6 - 1 = 7 (6 < 7)"
        in (faults_of(path)[0])
    )


STATED_NUMBERS = r"""
528\n    fields | 544\n    fields | record_formats[0].record_bytes | 544 | 528
528\n      scale | 544\n      scale | slot.rings[0].record_bytes | 544 | 528
offset: 512 | offset: 500 | record_formats[0].fields[1].offset | 500 | 512 (kv_scales overlaps
offset: 512 | offset: 516 | record_formats[0].fields[1].offset | 516 | 512
offset: 0\n | offset: 4\n | record_formats[0].fields[0].offset | 4 | 0
shape: [16] | shape: [15] | record_formats[0].fields[1].shape | [15] | [16]
type: e8m0 | type: e4m3 | record_formats[0].fields[1].type | e4m3 | e8m0
id: kv_scales | id: scales | record_formats[0].fields[1].id | scales | kv_scales
stored: true | stored: false | slot.rings[0].stored | false | true (only producers are stored)
padding_bytes: 0 | padding_bytes: 32 | slot.rings[0].padding_bytes | 32 | 0
ring_bytes: 70752 | ring_bytes: 70784 | slot.rings[0].ring_bytes | 70784 | 70752
offset: 141504 | offset: 141508 | slot.rings[1].offset | 141508 | 141504
offset: 3042336 | offset: 3042340 | slot.compression[0].offset | 3042340 | 3042336
entry_bytes: 4096 | entry_bytes: 2048 | slot.compression[0].entry_bytes | 2048 | 4096
ring_bytes: 28672 | ring_bytes: 28000 | slot.compression[0].ring_bytes | 28000 | 28672
stored_bytes: 1415040 | stored_bytes: 1310720 | slot.stored_bytes | 1310720 | 1415040
slot_bytes: 3128352 | slot_bytes: 3128350 | slot.slot_bytes | 3128350 | 3128352
offset: null | offset: 68608 | slot.rings[0].scale_plane_offset | 68608 | null
"""


@pytest.mark.parametrize(("old", "new", "key", "stated", "derived"), table(STATED_NUMBERS))
def test_y10_stated_numbers_are_derived_again(tmp_path, old, new, key, stated, derived):
    """Y10: each stated number that differs from the derived one is refused, alone, with both."""
    path = edited(tmp_path, (old, new), base=FLASH)
    fault = one_fault(path, key, stated, f"the derived value {derived}")
    assert f"; write {derived.split(' (')[0]}, or change" in fault


def test_y10_alignment(tmp_path):
    """An alignment that is no multiple of 16 is refused; D8: every ring starts at a multiple of
    16 (here 32)."""
    path = edited(tmp_path, ("align_bytes: 32", "align_bytes: 40"))
    one_fault(path, "slot.align_bytes", "40", "a multiple of 16")
    for name in packaged_configs():
        assert all(ring.offset % 32 == 0 for ring in rs.load_config(name).slot_layout.rings)


def test_q13_head_dim_of_500(tmp_path):
    """Q13: an mxfp8 record of 500 values would leave 500 % 32 = 20 after whole blocks: refused."""
    text = FLASH.read_text().replace("head_dim: 512", "head_dim: 500")
    path = tmp_path / "d500.yaml"
    path.write_text(text)
    fault = one_fault(path, "record_formats[0].head_dim", "500", "a multiple of 32 for type mxfp8")
    assert "500 % 32 = 20" in fault


def test_planar_states_its_scale_plane(tmp_path):
    """The planar file states where a ring's scales begin, 134 x 512 = 68,608; a difference is
    refused."""
    planar = QUICKSTART.with_name("deepseek_v4_1_flash_planar.yaml")
    path = edited(tmp_path, ("scale_plane_offset: 68608", "scale_plane_offset: 512"), base=planar)
    one_fault(path, "slot.rings[0].scale_plane_offset", "512", "the derived value 68608")


def test_rings_for_each_group_once(tmp_path):
    """A layer group without rings, with two ring sections, or a ring section for no group."""
    again = edited(tmp_path, ("layer_group: consumers", "layer_group: drafts"))
    lines = faults_of(again)
    assert any("got drafts, expected once each one of" in line for line in lines)
    assert any("slot.rings: got no rings for consumers" in line for line in lines)
    lines = faults_of(edited(tmp_path, ("layer_group: drafts", "layer_group: draft")))
    assert "slot.rings[3].layer_group: got draft, expected one of producers_plain" in lines[0]


def test_record_formats_are_named_and_used_once(tmp_path):
    """A second format of the same id, and one that no layer group uses, are refused."""
    text = QUICKSTART.read_text()
    section = text[text.index("  - id: swa_mxfp8") : text.index("# Layers without")]
    lines = faults_of(edited(tmp_path, (section, section.rstrip() + "\n" + section)))
    assert (
        "record_formats[1].id: got swa_mxfp8, expected an id that record_formats[0] has not"
        in lines[0]
    )
    other = section.replace("swa_mxfp8", "other")
    lines = faults_of(edited(tmp_path, (section, section.rstrip() + "\n" + other)))
    assert "[1].id: got other, expected a format that a layer group uses" in lines[0]


@pytest.mark.parametrize(
    "section", ["model", "record_formats", "layer_groups", "slot", "engine", "run"]
)
@pytest.mark.parametrize("value", ["null", "5", "text", "[]", "{}", "[1, {a: b}]"])
def test_sections_of_another_kind(section, value):
    """Any section replaced by null, a number, text, an empty or foreign list or mapping is a
    ConfigError, never another exception."""
    lines = faults_of("quickstart", (f"{section}={value}",))
    assert all(line.startswith(f"--set {section}={value}: {section}") for line in lines)


def test_b01_heads_of_model_and_record(tmp_path):
    """B01: 8 query heads are no multiple of 3 KV heads; a record states the model's KV heads, and a
    latent one has one."""
    lines = faults_of(edited(tmp_path, ("num_kv_heads: 1", "num_kv_heads: 3")))
    assert len(lines) == 2
    assert "model.num_q_heads: got 8, expected a multiple of num_kv_heads 3" in lines[0]
    assert "record_formats[0].num_kv_heads: got 1, expected the model's num_kv_heads 3" in lines[1]
    path = edited(tmp_path, ("    num_kv_heads: 1", "    num_kv_heads: 2"))
    assert "expected 1 for a latent record" in faults_of(path)[1]
