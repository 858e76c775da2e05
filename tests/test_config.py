"""Configurations: what they say; a fault is one line with place, key, value and fix."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from config_edits import QUICKSTART, edited, faults_of, line_of, one_fault, table

import ringslab as rs
from ringslab.errors import ConfigError
from ringslab.layouts.config import packaged_configs

# What the packaged files say


@pytest.mark.parametrize("name", ["deepseek_v4_1_flash", "deepseek_v4_1_flash_planar"])
def test_flash(name):
    """V4.1-Flash: 43 rings of 134 x 528 = 70,752 B, 20 stored = 1,415,040 B, slot 3,128,352 B; 64
    heads of 512, 6 tokens a step; layers 0, 1 and drafts at theta 10,000, the rest with YaRN."""
    cfg = rs.load_config(f"{name}.yaml")
    assert (cfg.name, cfg.version) == (name, 1)
    assert (cfg.num_layers, cfg.num_draft_layers, len(cfg.layers)) == (40, 3, 43)
    assert (cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim) == (64, 1, 512)
    assert (cfg.tokens_per_step, cfg.max_seq_len) == (6, 1_048_576)
    layout = cfg.slot_layout
    assert (layout.slot_bytes, layout.stored_bytes) == (3_128_352, 1_415_040)
    assert [ring.bytes for ring in layout.rings] == [70_752] * 43 + [28_672] * 3
    assert [ring.stored for ring in layout.rings] == [True] * 20 + [False] * 26
    owners = [layer.id for layer in cfg.layers if layer.compression_ratio is not None]
    assert owners == [2, 8, 14]
    assert [ring.offset for ring in layout.rings if ring.kind == "compression"] == [
        3_042_336,
        3_071_008,
        3_099_680,
    ]
    for layer in cfg.layers:
        plain = layer.id in (0, 1, 40, 41, 42)
        yarn = None if plain else rs.Yarn(16.0, 65536, 32.0, 1.0)
        assert layer.rope == rs.Rope(10_000.0 if plain else 160_000.0, 64, "adjacent", yarn)
        assert layer.id == cfg.layers.index(layer)
        assert (layer.kind, layer.window, layer.ring_len, layer.sink) == ("swa", 128, 134, True)
        assert layer.softmax_scale == pytest.approx(512**-0.5, rel=1e-15)
        assert layer.record_format.record_bytes == 528
        assert layer.inverse_rope_out
        roles = ["producer"] * 20 + ["consumer"] * 20 + ["draft"] * 3
        assert layer.role == roles[layer.id]
        assert layer.stored == (layer.id < 20)
    order = "planar" if name.endswith("planar") else "interleaved"
    assert {layer.record_format.plane_order for layer in cfg.layers} == {order}


def test_quickstart_has_the_same_structure():
    """quickstart: 6 + 2 layers, producers, consumers, drafts, two ropes of which one has YaRN,
    compression owners, sinks; ring 36 x 132 = 4,752 B padded to 4,768."""
    cfg = rs.load_config("quickstart.yaml")
    assert (cfg.num_layers, cfg.num_draft_layers, cfg.num_q_heads) == (6, 2, 8)
    assert {layer.role for layer in cfg.layers} == {"producer", "consumer", "draft"}
    assert {layer.rope.yarn is None for layer in cfg.layers} == {True, False}
    assert {layer.rope.dims for layer in cfg.layers} == {32}
    assert [layer.id for layer in cfg.layers if layer.compression_ratio] == [1, 2]
    assert {(layer.window, layer.ring_len) for layer in cfg.layers} == {(32, 36)}
    ring = cfg.slot_layout.ring(0)
    assert (ring.used_bytes, ring.bytes) == (4752, 4768)
    assert cfg.layers[0].softmax_scale == pytest.approx(128**-0.5, rel=1e-15)
    assert cfg.record_format("swa_mxfp8") is cfg.record_formats[0]
    with pytest.raises(ConfigError, match="no record format 'x'; there are: swa_mxfp8"):
        cfg.record_format("x")


def test_frozen_and_hashable():
    """Two loads are equal with equal hashes; nothing can be assigned."""
    first, second = rs.load_config("quickstart.yaml"), rs.load_config("quickstart.yaml")
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first.layers, tuple)
    for part, field in ((first, "name"), (first.layers[0], "window"), (first.run.trace, "kind")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, "x")


def test_names_resolve(tmp_path, monkeypatch):
    """`quickstart`, `quickstart.yaml` and `configs/quickstart.yaml` mean the packaged file from any
    folder; a file at that path wins; so does Config.path, given again."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", Path("quickstart")):
        cfg = rs.load_config(name)
        assert (cfg.name, cfg.path) == ("quickstart", "configs/quickstart.yaml")
        assert rs.load_config(cfg.path) == cfg
    (tmp_path / "quickstart.yaml").write_text(
        QUICKSTART.read_text().replace("name: quickstart", "name: mine")
    )
    assert rs.load_config("quickstart.yaml").name == "mine"
    assert set(packaged_configs()) == {path.name for path in QUICKSTART.parent.glob("*.yaml")}


def test_overrides_are_checked_like_the_file():
    """An override changes one value; what follows from it must still agree; its faults show it."""
    cfg = rs.load_config("quickstart", ("run.seed=9", "layer_groups.drafts.window=16"))
    assert cfg.run.seed == 9
    assert [layer.window for layer in cfg.layers] == [32] * 6 + [16] * 2
    assert rs.load_config("quickstart", "engine.num_state_slots=3").engine.num_state_slots == 3
    [fault] = faults_of("quickstart", ("model.tokens_per_step=0",))
    assert fault == (
        "--set model.tokens_per_step=0: model.tokens_per_step: got 0, "
        "expected an integer >= 1 and <= 1024"
    )
    assert len(faults_of("quickstart", ("model.tokens_per_step=9",))) == 5  # 4 rings, 1 state
    assert "run.sed: got an unknown key" in faults_of("quickstart", ("run.sed=1",))[0]


# Faults of single values

WINDOW_FIX = "write the number of keys that a query sees, itself included"


@pytest.mark.parametrize("text", ["0", "-1", "-128", "true", "'128'", "128.0", "[128]", "null"])
def test_m05_d6_window_of_a_ring(tmp_path, text):
    """M05, D6: a window is an integer of at least 1. 0, negatives, booleans, text and floats are
    refused; null means full attention, which has no ring, so it is refused here too."""
    path = edited(tmp_path, ("window: 32", f"window: {text}"))
    got = {"'128'": '"128"', "[128]": "a list of 1"}.get(text, text)
    line = one_fault(path, "layer_groups[0].window", got, "an integer >= 1")
    assert f":{line_of(path, 'window:')}:13: " in line
    assert WINDOW_FIX in line


def test_m05_window_of_one(tmp_path):
    """M05: window 1, the query's own key alone, is a window like any other."""
    cfg = rs.load_config(edited(tmp_path, ("window: 32", "window: 1")))
    assert [layer.window for layer in cfg.layers] == [1] + [32] * 7


def test_m08_layers_are_listed_not_counted(tmp_path):
    """M08: 26 layers, five local then one global. Layer ids are written out, so the global ones are
    5, 11, 17, 23 and 22 are local; here "global" is a window of 64 in a ring of 68."""
    wide = [5, 11, 17, 23]
    narrow = [layer for layer in range(26) if layer not in wide]
    text = QUICKSTART.read_text()
    head, groups = text.split("layer_groups:\n")
    group = re.sub(r"    layers: \[0\]\n", "", groups.split("  - id: producers_compressed")[0])
    sections = "".join(
        group.replace("producers_plain", name)
        .replace("num_layers: 1", f"num_layers: {len(ids)}")
        .replace("kind: swa", f"kind: swa\n    layers: {ids}")
        .replace("window: 32", f"window: {window}")
        for name, ids, window in (("narrow", narrow, 32), ("wide", wide, 64))
    )
    slot, rest = "slot:\n  align_bytes: 32\n  rings:\n", "engine:" + text.split("engine:")[1]
    for name, ring_len, padding, size, offset in (
        ("narrow", 36, 16, 4768, 0),
        ("wide", 68, 16, 8992, 22 * 4768),
    ):
        slot += (
            f"    - layer_group: {name}\n      ring_len: {ring_len}\n      stored: true\n"
            f"      record_bytes: 132\n      scale_plane_offset: null\n"
            f"      padding_bytes: {padding}\n      ring_bytes: {size}\n      offset: {offset}\n"
        )
    total = 22 * 4768 + 4 * 8992
    slot += f"  compression: []\n  stored_bytes: {total}\n  slot_bytes: {total}\n"
    head = head.replace("num_layers: 6 ", "num_layers: 26 ").replace(
        "num_draft_layers: 2", "num_draft_layers: 0"
    )
    path = tmp_path / "pattern.yaml"
    path.write_text(f"{head}layer_groups:\n{sections}{slot}{rest}")
    cfg = rs.load_config(path)
    assert [layer.id for layer in cfg.layers if layer.window == 64] == wide
    assert sum(layer.window == 32 for layer in cfg.layers) == 22


def test_m09_no_switch_beside_the_window(tmp_path):
    """M09: `use_window: false` beside a window is a contradiction: the key does not exist. A file
    with only a window has it on every layer."""
    path = edited(tmp_path, ("    window: 32", "    use_window: false\n    window: 32"))
    one_fault(path, "layer_groups[0].use_window", "an unknown key", "one of id, num_layers")
    assert all(layer.window == 32 for layer in rs.load_config("quickstart").layers)


@pytest.mark.parametrize("text", ["0", "0.0", "-1", "-1.0", ".inf", ".nan", "true", "'30'"])
def test_k08_softcap(tmp_path, text):
    """K08: null turns the softcap off; 0, negatives, infinity and other types are errors."""
    path = edited(tmp_path, ("softcap: null", f"softcap: {text}"))
    lines = faults_of(path)
    assert len(lines) == 1
    assert f"layer_groups[0].softcap: got {text.replace(chr(39), chr(34))}, expected a" in lines[0]
    assert "null turns it off" in lines[0]


def test_k08_softcap_that_no_kernel_computes(tmp_path):
    """A positive softcap is refused for latent layers, whose kernels compute none."""
    path = edited(tmp_path, ("softcap: null", "softcap: 50.0"))
    one_fault(path, "layer_groups[0].softcap", "50.0", "null: latent layers compute no softcap")
    assert rs.load_config("quickstart").layers[0].softcap is None


WRONG_VALUES = r"""
tokens_per_step: 4 | tokens_per_step: 4.0 | model.tokens_per_step | 4.0 | an integer
head_dim: 128 | head_dim: wide | model.head_dim | wide | an integer >= 1
num_q_heads: 8 | num_q_heads: -8 | model.num_q_heads | -8 | an integer >= 1
max_seq_len: 4096 | max_seq_len: 2147483648 | model.max_seq_len | 2147483648 | an int
sink: true | sink: 1 | layer_groups[0].sink | 1 | true or false
sink: true | sink: null | layer_groups[0].sink | null | true or false
theta: 10000.0 | theta: '1e6' | layer_groups[0].rope.theta | "1e6" | a number > 1
theta: 10000.0 | theta: -1.0 | layer_groups[0].rope.theta | -1.0 | a number > 1
theta: 10000.0 | theta: .nan | layer_groups[0].rope.theta | .nan | a finite number
dims: 32 | dims: 31 | layer_groups[0].rope.dims | 31 | an even number up to head_dim
dims: 32 | dims: 130 | layer_groups[0].rope.dims | 130 | an even number up to head_dim
pairing: adjacent | pairing: ajacent | layer_groups[0].rope.pairing | ajacent | one of
yarn: null | yarn: [] | layer_groups[0].rope.yarn | a list of 0 | a mapping of factor
scale_rounding: ceil | scale_rounding: up | record_formats[0].scale_rounding | up | one of ceil
scale_rounding: ceil | scale_rounding: null | record_formats[0].scale_rounding | null | a value
amax_floor: 0.0001 | amax_floor: 0.5 | record_formats[0].amax_floor | 0.5 | 0.0 (OCP
record_format: swa_mxfp8 | record_format: swa | layer_groups[0].record_format | swa | one of swa_
kind: swa | kind: full | layer_groups[0].kind | full | one of swa
role: draft | role: drafts | layer_groups[3].role | drafts | one of producer
beta_fast: 32.0 | beta_fast: 0.5 | layer_groups[1].rope | a mapping | a rotation
accept_rate: 0.7 | accept_rate: 1.5 | run.accept_rate | 1.5 | a number >= 0.0 and
seed: 1 | seed: -1 | run.seed | -1 | an integer >= 0
prompt_len: [1, 300] | prompt_len: [0, 300] | run.trace.prompt_len[0] | 0 | an integer
prompt_len: [1, 300] | prompt_len: [9, 3] | run.trace.prompt_len | [9, 3] | [first
prompt_len: [1, 300] | prompt_len: [9] | run.trace.prompt_len | a list of 1 | a list of 2
prompt_len: [1, 300] | prompt_len: [1, 4090] | run.trace.output_len | [1, 40] | prompt_len +
kind: synthetic | kind: azure | run.trace.path | null | a path for trace kind azure
path: null\n    num | path: a.csv\n    num | run.trace.path | a.csv | null for trace kind
activations: seeded | activations: file | run.activations_path | null | a path for act
num_requests: 16 | num_requests: null | run.trace.num_requests | null | a number for
name: quickstart | name: '' | name | "" | text
version: 1 | version: 0 | version | 0 | an integer >= 1
token_budget: 128 | token_budget: 0 | engine.token_budget | 0 | an integer >= 1
"""


@pytest.mark.parametrize(("old", "new", "key", "got", "expected"), table(WRONG_VALUES))
def test_one_wrong_value(tmp_path, old, new, key, got, expected):
    """One wrong value is one line: file:line:column, key path, the value as written, the fix."""
    path = edited(tmp_path, (old, new))
    one_fault(path, key, got, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0128", "got 0128, octal to some YAML readers, decimal to others; write 128"),
        ("on", "got on, a boolean to some YAML readers"),
        ("1e6", "got 1e6, text to some YAML readers, a number to others; write 1000000.0"),
        ("", "got nothing, expected a value"),
        ("!!int 128", "got the tag"),
    ],
)
def test_y02_y03_ambiguous_values(tmp_path, text, message):
    """0128, on, 1e6 and a forgotten value are one line each, with the place and what to write."""
    path = edited(tmp_path, ("token_budget: 128 ", f"token_budget: {text} "))
    lines = faults_of(path)
    assert len(lines) == 1
    assert lines[0].startswith(f"{path}:{line_of(path, 'token_budget')}:")
    assert message in lines[0]


def test_y02_theta_forms(tmp_path):
    """Y02: 1.0e+6 and the integer 1000000 are 1000000.0; 1e6 is refused with the form to write."""
    for text in ("1.0e+6", "1000000", "1000000.0"):
        cfg = rs.load_config(edited(tmp_path, ("theta: 10000.0", f"theta: {text}")))
        assert cfg.layers[0].rope.theta == 1_000_000.0
    [fault] = faults_of(edited(tmp_path, ("theta: 10000.0", "theta: 1e6")))
    assert "write 1000000.0" in fault


def test_y03_a_word_in_a_list_of_layers(tmp_path):
    """Y03: `layers: [6, no]` names the entry's place, `layers: [6, seven]` its path."""
    [fault] = faults_of(edited(tmp_path, ("layers: [6, 7]", "layers: [6, no]")))
    assert re.search(r":17: got no, a boolean", fault)
    path = edited(tmp_path, ("layers: [6, 7]", "layers: [6, seven]"))
    one_fault(path, "layer_groups[3].layers[1]", "seven", "an integer >= 0")


def test_y05_unknown_keys(tmp_path):
    """Y05: a misspelled key names the nearest known one; a known key one level too deep says where
    it belongs. The missing key is told as well."""
    lines = faults_of(edited(tmp_path, ("    window: 32", "    windw: 32")))
    assert len(lines) == 2
    assert "layer_groups[0].window: got no such key, expected it here; add window" in lines[0]
    assert "layer_groups[0].windw: got an unknown key" in lines[1]
    assert lines[1].endswith("did you mean window?")
    path = edited(
        tmp_path, ("      pairing: adjacent", "      pairing: adjacent\n      window: 32")
    )
    fault = one_fault(path, "layer_groups[0].rope.window", "an unknown key", "one of theta")
    assert fault.endswith("window belongs at layer_groups[].window")
    path = edited(tmp_path, ("run:\n", "zzz: 1\nrun:\n"))
    assert one_fault(path, "zzz", "an unknown key", "one of name").endswith("remove it")


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ("version: 1\n", "version"),
        ("  vocab_size: 32000\n", "model.vocab_size"),
        ("    softcap: null\n", "layer_groups[0].softcap"),
        ("    amax_floor: 0.0001  # an all-zero block gets scale byte 105\n",
         "record_formats[0].amax_floor"),
        ("  slot_bytes: 48384\n", "slot.slot_bytes"),
        ("      yarn: null\n", "layer_groups[0].rope.yarn"),
        ("    max_prompt_len: null\n", "run.trace.max_prompt_len"),
    ],
)  # fmt: skip
def test_missing_keys(tmp_path, old, key):
    """There are no silent defaults: a key that is not there is told by its path."""
    one_fault(edited(tmp_path, (old, "")), key, "no such key", "it here; add ")


def test_y01_duplicate_key_in_a_file(tmp_path):
    """Y01: the second `window` is told with both lines, and nothing else is wrong."""
    path = edited(tmp_path, ("    window: 32", "    window: 32\n    window: 64"))
    first = line_of(path, "window: 32")
    [fault] = faults_of(path)
    assert fault.startswith(f"{path}:{first + 1}:5: duplicate key window, first at line {first}")


def test_y06_files_that_are_not_there(tmp_path):
    """Y06: no file, zero bytes, only comments, a list at the top, a folder, an unreadable file: one
    line that names the path."""
    for name, text in (
        ("none.yaml", None),
        ("zero.yaml", ""),
        ("c.yaml", "# x\n"),
        ("l.yaml", "- 1"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        [fault] = faults_of(path)
        assert fault.startswith(str(path))
    [fault] = faults_of("no_such_config.yaml")
    assert "packaged configurations: deepseek_v4_1_flash.yaml" in fault
    assert faults_of(tmp_path)[0].startswith(f"{tmp_path}: cannot be read: Is a directory")
    assert "no such file" in faults_of("a\0b")[0]
    os.symlink(tmp_path / "gone", tmp_path / "link.yaml")
    assert "cannot be read" in faults_of(tmp_path / "link.yaml")[0]
    (tmp_path / "long.yaml").write_text("#" * (2 << 20))
    assert "more than 1048576 bytes" in faults_of(tmp_path / "long.yaml")[0]


def test_all_faults_at_once(tmp_path):
    """Five faults of different kinds give five lines, so that one run mends a file."""
    path = edited(
        tmp_path,
        ("window: 32", "window: 0"),
        ("sink: true", "sink: off"),
        ("accept_rate: 0.7", "accept_rate: high"),
        ("seed: 1", "sed: 1"),
    )
    assert len(faults_of(path)) == 5  # `seed` is missing as well


def test_a_section_that_the_file_leaves_out_is_made_by_overrides():
    """Each key of it by its own override; those that lack are named together, and so is a section
    that there is none of."""
    whole = ("contract=full", "block_size=32", "snapshot_blocks=1", "budget_bytes=null")
    given = tuple(f"prefix.{one}" for one in (*whole, "store=memory:"))
    assert rs.load_config("mistral_7b.yaml", given).prefix.block_size == 32
    faults = faults_of("mistral_7b", given[:2])
    lacking = ("snapshot_blocks", "budget_bytes", "store")
    assert all(fault.startswith(f"--set {given[0]}: prefix.") for fault in faults)
    assert faults_of("mistral_7b", ("prefix=null", given[1]))[0].startswith(f"--set {given[1]}: ")
    assert [name in fault for name, fault in zip(lacking, faults, strict=True)] == [True] * 3
    for overrides in (("rum.a=1",), ("rum.a.b.c=1", "rum.a.d=2", "rum.e=3")):
        (fault,) = faults_of("quickstart", overrides)
        assert "rum: got an unknown key, expected one of name" in fault


def test_a_path_of_many_parts_is_a_fault():
    """Longer than a file can be deep, and numbers longer than a list: one fault each."""
    (fault,) = faults_of("quickstart", ("a." * 1500 + "b=1",))
    assert "got 1501 parts, expected 32 at most" in fault
    assert len(fault) < 200
    (fault,) = faults_of("quickstart", (f"layer_groups.{'9' * 5000}.window=3",))
    assert "expected one of" in fault


def test_a_section_that_is_null_is_made_by_overrides():
    """As one that is left out; where a value is wanted a section is one fault, and a path into a
    value is another."""
    whole = ("contract=full", "block_size=32", "snapshot_blocks=1", "budget_bytes=null")
    given = ("prefix=null", *(f"prefix.{one}" for one in (*whole, "store=memory:")))
    assert rs.load_config("mistral_7b.yaml", given).prefix.block_size == 32
    assert rs.load_config("mistral_7b.yaml", (*given, "prefix=null")).prefix is None
    (fault,) = faults_of("quickstart", ("layer_groups.0.softcap.x=3",))
    assert "softcap: got a mapping" in fault
    (fault,) = faults_of("quickstart", ("prefix.contract.a=3",))
    assert "got the unknown key a, expected nothing" in fault
