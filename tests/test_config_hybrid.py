"""Hybrid configurations: local layers with rings, global layers with pages; and their faults."""

import hashlib
import math

import numpy as np
import pytest
from config_edits import QUICKSTART, edited, faults_of, one_fault, table

import ringslab as rs
from ringslab.layouts.config import packaged_configs
from ringslab.layouts.rope import rope_frequencies

HYBRID = QUICKSTART.with_name("quickstart_hybrid.yaml")

# What each model's public config.json says: layers, query heads, KV heads, head_dim, positions,
# vocabulary, window, global layers.
MODELS = {
    "mistral_7b": (32, 32, 8, 128, 32_768, 32_000, 4096, []),
    "gemma2_27b": (46, 32, 16, 128, 8_192, 256_000, 4096, list(range(1, 46, 2))),
    "gemma3_27b": (62, 32, 16, 128, 131_072, 262_208, 1024, list(range(5, 62, 6))),
    "gpt_oss_120b": (36, 64, 8, 64, 131_072, 201_088, 128, list(range(1, 36, 2))),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_say_what_their_makers_say(name):
    """Layer counts, heads, window and which layers are global, from the public config.json; ring
    and pages are bf16, a ring is as long as the window, a block holds 16 tokens."""
    cfg = rs.load_config(name)
    layers, q_heads, kv_heads, head_dim, positions, vocab, window, wide = MODELS[name]
    assert (cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads) == (layers, q_heads, kv_heads)
    assert (cfg.head_dim, cfg.max_seq_len, cfg.vocab_size) == (head_dim, positions, vocab)
    assert [layer.id for layer in cfg.layers if layer.kind == "global"] == wide
    record_bytes = 2 * kv_heads * head_dim * 2
    for layer in cfg.layers:
        is_global = layer.id in wide
        assert layer.window == (None if is_global else window)
        assert layer.ring_len == (None if is_global else window)
        assert (layer.record_format.type, layer.record_format.latent) == ("bf16", False)
        assert layer.record_format.record_bytes == record_bytes
        assert (layer.rope.dims, layer.rope.pairing) == (head_dim, "half")
        assert layer.sink == (name == "gpt_oss_120b")
    assert not cfg.latent
    assert cfg.slot_layout.slot_bytes == (layers - len(wide)) * window * record_bytes
    if not wide:
        assert cfg.paged_layout is None
        return
    assert [part.layer for part in cfg.paged_layout.layers] == wide
    assert cfg.paged_layout.block_bytes == 16 * len(wide) * record_bytes


def test_rotation_scale_and_cap_of_each_model():
    """Gemma 2: scale 144^-0.5, cap 50. Gemma 3: 168^-0.5, theta 10,000 and 1,000,000 over 8.
    gpt-oss: 64^-0.5, YaRN 32 without truncation, attention factor 0.1 ln 32 + 1."""
    mistral, gemma2, gemma3, gpt = (rs.load_config(name) for name in MODELS)
    plain = rs.Rope(10_000.0, 128, "half")
    assert {(y.rope, y.softcap) for y in mistral.layers} == {(plain, None)}
    assert mistral.layers[0].softmax_scale == 128**-0.5
    assert {(y.rope, y.softcap, y.softmax_scale) for y in gemma2.layers} == {(plain, 50.0, 1 / 12)}
    for layer in gemma3.layers:
        wide = rs.Rope(1_000_000.0, 128, "half", None, 8.0)
        assert layer.rope == (wide if layer.kind == "global" else plain)
        assert layer.softmax_scale == pytest.approx(168**-0.5, rel=1e-15)
    factor = 0.1 * math.log(32) + 1
    yarn = rs.Yarn(32.0, 4096, 32.0, 1.0, False, factor)
    assert {y.rope for y in gpt.layers} == {rs.Rope(150_000.0, 64, "half", yarn)}
    assert {y.softmax_scale for y in gpt.layers} == {0.125}


def test_yarn_of_gpt_oss():
    """Without truncation the ramp runs from c(32) = 8.09 to c(1) = 17.40: pair 8 keeps its
    frequency, pair 9 is 0.0976 into it, pair 18 turns 32 times slower. The attention factor 1.3466
    multiplies rotated vectors: (3, 4) becomes 6.73 long."""
    rope = rs.load_config("gpt_oss_120b").layers[0].rope
    low, high = (
        64 * math.log(4096 / (2 * math.pi * turns)) / (2 * math.log(150_000)) for turns in (32, 1)
    )
    assert (round(low, 2), round(high, 2)) == (8.09, 17.40)
    ratio = rope_frequencies(rope) / rope_frequencies(rs.Rope(150_000.0, 64, "half"))
    assert (ratio[:9] == 1.0).all()
    ramp = (9 - low) / (high - low)
    assert ratio[9] == pytest.approx(ramp / 32 + 1 - ramp, rel=1e-12)
    assert ratio[18:] == pytest.approx(1 / 32, rel=1e-12)
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, [5, 37]] = 3.0, 4.0  # pair 5 of "half"
    turned = rs.apply_rope(x, np.array([12_345], np.int32), rope)
    assert np.linalg.norm(turned) == pytest.approx(5 * (0.1 * math.log(32) + 1), rel=1e-6)


def test_linear_scaling_divides_positions():
    """Position 8,000 of Gemma 3's global rope turns as far as position 1,000 without scaling."""
    rope = rs.load_config("gemma3_27b").layers[5].rope
    x = np.random.default_rng(0).standard_normal((1, 2, 128)).astype(np.float32)
    far = rs.apply_rope(x, np.array([8000], np.int32), rope)
    near = rs.apply_rope(x, np.array([1000], np.int32), rs.Rope(1_000_000.0, 128, "half"))
    assert np.abs(far - near).max() < 1e-6


def test_quickstart_hybrid():
    """MXFP8 rings of 27 = 24 + 3 records of 2 x 528 = 1,056 B, bf16 pages of 2,048 B a token and
    layer, a draft layer, and fewer blocks than 8 sequences of 240 tokens need."""
    cfg = rs.load_config("quickstart_hybrid")
    kinds = [layer.kind for layer in cfg.layers]
    assert kinds == ["swa", "swa", "global", "swa", "swa", "global", "swa"]
    assert cfg.slot_layout.slot_bytes == 5 * 27 * 1056 == 142_560
    assert (cfg.slot_layout.stored_bytes, cfg.paged_layout.block_bytes) == (114_048, 65_536)
    assert cfg.layers[2].softcap == 30.0
    assert cfg.engine.num_blocks * 16 < 8 * 240


GOLDEN = {
    ("gemma2_27b", 1): "fa6f4f7be7576fb60d1cdb4acf9767efd9ed15286c2f58c49aecc76efcbdc8a6",
    ("gemma3_27b", 1): "ce46a9a52684808ff9ff2a9b3e38600268b4aa157f331ad8a2f664a03d53b35e",
    ("gpt_oss_120b", 1): "e5006062d081a759a1fbdcae805349b2e5cecdb452c64680c8fb16ddcdadbd1c",
    ("mistral_7b", 1): "d970f146ddb1071c8a27520673fc34bc4d0bfe9b1ea74b33b2afcf8f761bf9bc",
    ("quickstart_hybrid", 1): "bf3f86ebcacbcdef58f4489832d5b1b37b4916942e2c8a3a129dcc819af81e23",
}


@pytest.mark.parametrize("name", [name for name, _ in GOLDEN])
def test_golden_layouts(name):
    """A released layout is never edited: the place and size of every ring, of every global layer in
    a block, and of every field of a record."""
    cfg = rs.load_config(name)
    rows = [(cfg.slot_layout.stored_bytes, cfg.slot_layout.slot_bytes)]
    rows += [
        (r.name, r.ring_len, r.record_bytes, r.stored, r.offset, r.bytes)
        for r in cfg.slot_layout.rings
    ]
    if cfg.paged_layout is not None:
        rows += [(cfg.paged_layout.block_size, cfg.paged_layout.block_bytes)]
        rows += [(part.layer, part.offset) for part in cfg.paged_layout.layers]
    for layer in cfg.layers:
        fields = layer.record_format.fields
        rows += [(layer.id, field.id, field.type, field.shape, field.offset) for field in fields]
    digest = hashlib.sha256("".join(f"{row}\n" for row in rows).encode()).hexdigest()
    assert digest == GOLDEN[cfg.name, cfg.version]


def test_every_packaged_layout_is_golden():
    """Each packaged file is in this table of layouts or in that of test_slots.py."""
    here = {f"{name}.yaml" for name, _ in GOLDEN}
    there = {"deepseek_v4_1_flash.yaml", "deepseek_v4_1_flash_planar.yaml", "quickstart.yaml"}
    assert set(packaged_configs()) == here | there


# replaced text | by | key | value | what is expected
WRONG = """
window: 24 | window: null | layer_groups[0].window | null | an integer >= 1 for kind swa
window: null | window: 64 | layer_groups[1].window | 64 | null for kind global
kind: global | kind: gobal | layer_groups[1].kind | gobal | one of swa, global
role: producer\\n    kind: g | role: draft\\n    kind: g | layer_groups[1].role | draft | producer
linear_factor: 8.0 | linear_factor: 0.5 | layer_groups[1].rope.linear_factor | 0.5 | a number >= 1.0
window: 24 | window: 24\\n    sink_tokens: 2 | slot.rings[0].ring_len | 27 | at least window +
window: null | window: null\\n    sink_tokens: 2 | layer_groups[1].sink_tokens | 2 | 0 for kind
softcap: 30.0 | softcap: -30.0 | layer_groups[1].softcap | -30.0 | a number > 0.0
inverse_rope_out: false | inverse_rope_out: true | layer_groups[0].inverse_rope_out | true | false
block_size: 16 | block_size: 0 | paged.block_size | 0 | an integer >= 1
align_bytes: 32\\n  layers | align_bytes: 40\\n  layers | paged.align_bytes | 40 | a multiple of 16
layer_group: global | layer_group: local | paged.layers[0].layer_group | local | one of global
2048\\n      padding | 2047\\n      padding | paged.layers[0].record_bytes | 2047 | the derived
layer_bytes: 32768 | layer_bytes: 32000 | paged.layers[0].layer_bytes | 32000 | the derived
block_bytes: 65536 | block_bytes: 65537 | paged.block_bytes | 65537 | the derived value 65536
num_blocks: 32 | num_blocks: 0 | engine.num_blocks | 0 | an integer >= 1
ring_len: 27 | ring_len: 25 | slot.rings[0].ring_len | 25 | at least window + tokens_per_step - 1
latent: false  # K | latent: true  # K | record_formats | latent and other formats | either
"""


@pytest.mark.parametrize(("old", "new", "key", "got", "expected"), table(WRONG))
def test_one_wrong_value(tmp_path, old, new, key, got, expected):
    """One wrong value of a hybrid file is told with place, key, value and what is expected."""
    path = edited(tmp_path, (old, new), base=HYBRID)
    lines = faults_of(path)
    assert all(line.startswith(f"{path}:") for line in lines)
    assert any(f" {key}: got {got}, expected {expected}" in line for line in lines), lines


def test_paged_section_is_there_where_it_is_needed(tmp_path):
    """No `paged`, no `num_blocks`: a fault each that names the global groups. Both in a file
    without global layers are refused too."""
    text = HYBRID.read_text()
    start, end = text.index("paged:\n"), text.index("engine:\n")
    path = tmp_path / "edited.yaml"
    path.write_text(text[:start] + text[end:])
    assert "got no key paged, expected one for the global layer groups global" in faults_of(path)[0]
    [line] = [line for line in text.splitlines() if "num_blocks" in line]
    path.write_text(text.replace(line + "\n", ""))
    assert "engine: got no num_blocks" in faults_of(path)[0]
    plain = edited(tmp_path, ("chunked_prefill: true", "chunked_prefill: true\n  num_blocks: 8"))
    one_fault(plain, "engine.num_blocks", "8", "no such key where no layer group is global")
