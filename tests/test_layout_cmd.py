"""`ringslab layout`: the table, the picture and the JSON."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

import ringslab as rs
from ringslab.layouts.config import packaged_configs
from ringslab.tools.main import main


def output_of(capsys, *arguments: str) -> str:
    assert main(["layout", *arguments]) == 0
    return capsys.readouterr().out


def test_table_and_totals(capsys, monkeypatch):
    """V4.1-Flash: 46 rows with offset, bytes, padding and stored flag; ring 3 at 212,256; totals
    1,415,040 and 3,128,352; nothing is cut off at 100 columns, nor in a narrower terminal."""
    for columns in ("100", "60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        text = output_of(capsys, "configs/deepseek_v4_1_flash.yaml")
        rows = re.findall(r"^ *(layer\d+_\w+) +(\w+) +(.*?) *$", text, re.MULTILINE)
        assert len(rows) == 46
        assert rows[3] == ("layer3_swa", "producer", rows[3][2])
        assert rows[3][2].split() == ["128", "134", "528", "212,256", "70,752", "0", "yes"]
        assert rows[42][2].split() == ["128", "134", "528", "2,971,584", "70,752", "0", "no"]
        assert rows[45][2].split() == ["7", "4,096", "3,099,680", "28,672", "0", "no"]
        assert "…" not in text
        assert "stored_bytes 1,415,040" in text
        assert "slot_bytes 3,128,352 (align_bytes 32)" in text


def test_picture(capsys, monkeypatch):
    """The bar's parts follow their bytes: 45 % stored, 52 % not stored, 3 % compression state, in
    86 cells; the record's fields stand with their offsets."""
    monkeypatch.setenv("COLUMNS", "120")
    text = output_of(capsys, "deepseek_v4_1_flash.yaml")
    [bar] = re.findall(r"^0 \|([^|]+)\| 3,128,352$", text, re.MULTILINE)
    marks = sorted(set(bar), key=bar.index)
    assert [bar.count(mark) for mark in marks] == [39, 45, 2]
    assert f"{marks[0]} stored: 20 rings, 1,415,040 bytes, 0 .. 1,415,040" in text
    assert f"{marks[1]} not stored: 23 rings, 1,627,296 bytes, 1,415,040 .. 3,042,336" in text
    assert "0 | kv_values e4m3 [512] | 512 | kv_scales e8m0 [16] | 528" in text
    planar = output_of(capsys, "deepseek_v4_1_flash_planar.yaml")
    assert "ring of 134: 0 | 134 x 512 values | 68,608 | 134 x 16 scales | 70,752" in planar


def test_m09_the_window_of_each_layer_is_printed(capsys):
    """M09: the resolved window of each layer stands in its row, once."""
    text = output_of(capsys, "quickstart", "--set", "layer_groups.drafts.window=16")
    rows = re.findall(r"layer(\d)_swa +\w+ +(\d+)", text)
    assert rows == [(str(layer), "32" if layer < 6 else "16") for layer in range(8)]


def test_json(capsys):
    """--json prints one object with the fixed keys and the same numbers, and nothing else."""
    report = json.loads(output_of(capsys, "deepseek_v4_1_flash.yaml", "--json"))
    assert (report["slot_bytes"], report["stored_bytes"]) == (3_128_352, 1_415_040)
    assert len(report["rings"]) == 46
    keys = {"name", "layer", "kind", "ring_len", "record_bytes", "offset", "bytes", "stored"}
    assert all(keys <= set(ring) for ring in report["rings"])
    ring = report["rings"][3]
    found = [ring[key] for key in ("layer", "kind", "offset", "bytes", "padding", "stored")]
    assert found == [3, "swa", 212_256, 70_752, 0, True]
    assert report["rings"][45]["window"] is None
    assert report["slab_bytes"] == 256 * 3_128_352
    small = json.loads(output_of(capsys, "quickstart", "--json"))
    assert [ring["padding"] for ring in small["rings"]] == [16] * 8 + [0] * 2


def test_wrong_files(capsys, tmp_path):
    """A wrong file or override gives the faults on stderr, nothing on stdout and status 2."""
    path = tmp_path / "a.yaml"
    path.write_text("name: x\nname: y\n")
    for arguments in ([str(path)], ["nope.yaml"], ["quickstart", "--set", "model.head_dim=500"]):
        assert main(["layout", *arguments, "--json"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("ringslab: ")
    with pytest.raises(SystemExit):
        main(["layout"])


@pytest.mark.parametrize("name", packaged_configs())
def test_svg(name, tmp_path, capsys):
    """--svg: well-formed, a box for every ring, field and layer of a block with its offset and size
    in its tip, as wide as its share; the table is printed as ever."""
    path = tmp_path / "slot.svg"
    assert "slot_bytes" in output_of(capsys, name, "--svg", str(path))
    cfg, tips = rs.load_config(name), {}
    for element in ElementTree.parse(path).getroot():
        if element.tag.endswith("}rect") and len(element):
            tips[element[0].text] = float(element.get("width"))
    layout = cfg.slot_layout
    for ring in layout.rings:
        (tip,) = [tip for tip in tips if tip.startswith(f"{ring.name}: offset {ring.offset:,},")]
        assert f"{ring.bytes:,} bytes" in tip
        assert tips[tip] == pytest.approx(940 * ring.bytes / layout.slot_bytes, abs=0.01)
    for record_format in cfg.record_formats:
        for field in record_format.fields:
            tip = f"{field.id}: {field.type}, offset {field.offset:,}, {field.bytes:,} bytes"
            assert tip in tips
    blocks = [tip for tip in tips if "_global: offset" in tip]
    assert len(blocks) == (0 if cfg.paged_layout is None else len(cfg.paged_layout.layers))


def test_svg_of_a_ring_that_wraps(tmp_path, capsys):
    """quickstart, ring 36, window 32, 4 tokens a step: the picture's step begins at position 82,
    ring index 10; 4 records of it, 31 older keys and 1 spare record are drawn."""
    path = tmp_path / "slot.svg"
    output_of(capsys, "quickstart", "--svg", str(path))
    text = path.read_text()
    assert "position 82 at ring index 10" in text
    arcs = re.findall(r'Z" fill="(#\w+)"', text)
    assert [arcs.count(colour) for colour in ("#1f77b4", "#d62728", "#eeeeee")] == [31, 4, 1]
    assert arcs[10:14] == ["#d62728"] * 4
    assert arcs[14] == "#eeeeee"
    missing = tmp_path / "nowhere" / "slot.svg"
    assert main(["layout", "quickstart", "--svg", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err
