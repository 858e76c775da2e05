"""The `prefix` section: optional, off with contract none, and what it asks of the rest."""

import dataclasses

import pytest
from config_edits import QUICKSTART, edited, faults_of
from engine_runs import tiny

import ringslab as rs
from ringslab.layouts.digest import layout_digest
from ringslab.schedules.prefix_rules import resume_rule

ON = ("prefix.contract=full",)


def test_a_file_without_it_loads_as_before(tmp_path):
    """No section, null and contract none are the same: no prefix cache."""
    text = QUICKSTART.read_text()
    path = tmp_path / "without.yaml"
    path.write_text(text[: text.index("\nprefix:")])
    assert rs.load_config(path).prefix is None
    path.write_text(text[: text.index("\nprefix:")] + "\nprefix: null\n")
    assert rs.load_config(path).prefix is None
    assert rs.load_config(QUICKSTART).prefix is None


def test_values_and_what_they_leave_alone():
    """The section as written; it changes no stored byte, so the layout's digest stays."""
    on, off = tiny("prefix.contract=exact", "prefix.snapshot_blocks=3"), tiny()
    assert dataclasses.astuple(on.prefix) == ("exact", 8, 3, None, "memory:")
    assert layout_digest(on) == layout_digest(off)


def test_a_section_that_the_file_lacks():
    """An optional key of a file, and a whole section, can be given by an override."""
    path = QUICKSTART.with_name("gpt_oss_120b.yaml")
    section = "contract: full, block_size: 64, snapshot_blocks: 1, budget_bytes: null"
    whole = f"prefix={{{section}, store: 'memory:'}}"
    cfg = rs.load_config(path, (whole, "run.trace.hash_block_tokens=16"))
    assert (cfg.prefix.block_size, cfg.run.trace.hash_block_tokens) == (64, 16)


def test_the_store_by_override():
    """Every address can be given as it is written, `memory:` too, which is a key to YAML."""
    for store in ("memory:", "lmdb:/tmp/a b", "redis://h:1/0"):
        cfg = tiny("prefix.contract=full", f"prefix.store={store}")
        assert cfg.prefix.store == store


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (("prefix.block_size=7",), "prefix.block_size", "a multiple of 2"),
        (("engine.chunked_prefill=false",), "engine.chunked_prefill", "true, for chunks"),
        (
            ("run.activations=file", "run.activations_path=x"),
            "run.activations",
            "seeded or stacked",
        ),
        (("prefix.contract=all",), "prefix.contract", "one of none, full, exact, bounded"),
        (("prefix.store=foo:bar",), "prefix.store", "memory:, lmdb:PATH or redis://HOST:PORT/DB"),
        (("prefix.store=lmdb:",), "prefix.store", "memory:, lmdb:PATH or"),
        (("prefix.snapshot_blocks=0",), "prefix.snapshot_blocks", "an integer >= 1"),
        (("prefix.store=null",), "prefix.store", "text"),
    ],
)
def test_what_does_not_go_together(overrides, key, expected):
    """One fault, at the key that is wrong, with what to write."""
    (line,) = faults_of(QUICKSTART, (*ON, *overrides))
    assert f" {key}: got " in line
    assert f"expected {expected}" in line


def test_a_stored_layer_above_a_rebuilt_one_needs_full(tmp_path):
    """Layer 1 a consumer below producer 2: its replay is not exact, and what stands above it is
    stored. `full` stores all rings, and takes it."""
    role = "num_layers: 1\n    role: producer"
    cfg = edited(
        tmp_path,
        (f"layers: [0]\n    {role}", f"layers: [2]\n    {role}"),
        ("first: 1\n    last: 2\n", "first: 0\n    last: 1\n"),
        ("num_layers: 2\n    role: producer", "num_layers: 2\n    role: consumer"),
        ("contract: none", "contract: exact"),
    )
    wanted = "prefix.contract: got exact, expected full where a consumer (layer 0) lies below"
    assert any(wanted in line for line in faults_of(cfg))


@pytest.mark.parametrize(
    ("contract", "block_size", "expected"),
    [
        ("exact", 16, "prefix.contract: got exact, expected full where layers see all keys"),
        ("full", 24, "prefix.block_size: got 24, expected a multiple of paged.block_size 16"),
        ("full", 32, None),
    ],
)
def test_layers_that_see_all_keys_need_full(tmp_path, contract, block_size, expected):
    """Pages are stored and never rebuilt, and blocks of the cache are whole pages."""
    path = tmp_path / "hybrid.yaml"
    rest = "snapshot_blocks: 1, budget_bytes: null, store: 'memory:'}"
    text = QUICKSTART.with_name("quickstart_hybrid.yaml").read_text()
    text = text[: text.index("\nprefix:")]
    section = f"prefix: {{contract: {contract}, block_size: {block_size}, {rest}"
    path.write_text(f"{text}\n{section}\n")
    if expected is None:
        assert rs.load_config(path).prefix.block_size == 32
    else:
        assert any(expected in line for line in faults_of(path))


def test_pinned_keys_need_full(tmp_path):
    """A window layer that keeps its first 2 keys: a replay has none of them, so exact is refused;
    full takes it, and its ring arithmetic leaves their room out."""
    path = tmp_path / "mistral.yaml"
    rest = "block_size: 16, snapshot_blocks: 1, budget_bytes: null, store: 'memory:'}"
    text = QUICKSTART.with_name("mistral_7b.yaml").read_text()
    path.write_text(f"{text}\nprefix: {{contract: exact, {rest}\n")
    cfg = rs.load_config(path)
    rule = resume_rule(cfg, "full")
    layers = tuple(dataclasses.replace(layer, sink_tokens=2) for layer in cfg.layers)
    pinned = resume_rule(dataclasses.replace(cfg, layers=layers), "full")
    assert pinned.back == rule.back - 2
    text = path.read_text()
    path.write_text(
        text.replace("    softcap: null\n", "    softcap: null\n    sink_tokens: 2\n", 1)
    )
    assert any("got exact, expected full where a layer keeps" in line for line in faults_of(path))
