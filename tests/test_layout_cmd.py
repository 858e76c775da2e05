"""`ringslab layout`: the table, the picture and the JSON."""

import json
import re

import pytest

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
