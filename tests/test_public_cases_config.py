"""Public cases about configurations, requests and budgets that no other test names;
docs/public-cases.md says what broke elsewhere."""

import math

import numpy as np
import pytest
from config_edits import edited, faults_of, one_fault
from engine_runs import Story, tiny

import ringslab as rs
from ringslab.errors import RequestError
from ringslab.layouts.rings import MAX_POSITION, ring_index
from ringslab.layouts.rope import rope_frequencies
from ringslab.schedules.scheduler import Scheduler, SchedulerLimits


def test_p02_linear_scale_on_global_layers_alone(tmp_path):
    """Position 1,000, pair 8 of 32: a local layer of theta 10,000 turns by 100.0, a global one of
    theta 1e6 and factor 8 by 3.952847; 12.5 (the factor on a local layer) and 31.622777 (none on a
    global one) are what was wrong. Each layer group states its own; another name is refused."""
    for theta, factor, angle in ((1e4, None, 100.0), (1e6, 8.0, 3.952847)):
        rope = rs.Rope(theta, 64, "half", linear_factor=factor)
        assert 1000 * rope_frequencies(rope)[8] == pytest.approx(angle, abs=1e-6)
        x = np.zeros((1, 1, 64), np.float32)
        x[..., 8] = 1
        out = rs.apply_rope(x, [1000], rope)[0, 0]
        assert out[8] == pytest.approx(math.cos(angle), abs=2e-6)
    cfg = rs.load_config("gemma3_27b")
    factors = {(layer.kind, layer.rope.linear_factor) for layer in cfg.layers}
    assert factors == {("swa", None), ("global", 8.0)}
    path = edited(tmp_path, ("theta: 10000.0", "theta: 10000.0\n      factor: 8.0"))
    one_fault(path, "layer_groups[0].rope.factor", "an unknown key", "one of theta")


@pytest.mark.parametrize(
    ("factor", "given", "wanted"),
    [(64.0, 1.0, 1.0), (32.0, 1.3465735903, 1.346574), (128.0, 1.485203, 1.485203)],
)
def test_p03_attention_factor_is_used_once(factor, given, wanted):
    """What is written is what rotated vectors are multiplied by, once: 1.0 and 1.346574 stay what
    they are, where the formula run on them gives 1.415888 and 1.466687. It is never guessed from
    the factor (for 128: 1.485203): left out, it is 1, as DeepSeek's models have it."""
    yarn = rs.Yarn(factor, 4096, 32.0, 1.0, attention_factor=given)
    x = np.ones((1, 1, 64), np.float32)
    out = rs.apply_rope(x, [1000], rs.Rope(1e4, 64, "half", yarn))
    assert np.linalg.norm(out) / 8 == pytest.approx(wanted, abs=1e-6)
    back = rs.apply_rope(out, [1000], rs.Rope(1e4, 64, "half", yarn), inverse=True)
    assert np.linalg.norm(back) / 8 == pytest.approx(wanted**2, rel=1e-5)
    assert rs.Yarn(factor, 4096, 32.0, 1.0).attention_factor == 1.0


def test_p03_attention_factor_of_the_packaged_models(tmp_path):
    """gpt-oss: 1.346574 as written; V4.1 and quickstart: 1. Beside an output that is rotated back
    the factor would come in a second time, and is refused."""
    yarns = [layer.rope.yarn for layer in rs.load_config("gpt_oss_120b").layers]
    assert {round(yarn.attention_factor, 6) for yarn in yarns} == {1.346574}
    assert rs.load_config("quickstart.yaml").layers[1].rope.yarn.attention_factor == 1.0
    line = "factor: 16.0\n        attention_factor: 1.2"
    path = edited(tmp_path, ("factor: 16.0", line))
    name = "layer_groups[1].rope.yarn.attention_factor"
    one_fault(path, name, "1.2", "1.0 with inverse_rope_out, which would apply it again")


def test_p10_no_context_past_the_table():
    """max_seq_len 4,096: 4,090 prompt tokens and 64 new ones are refused at submit with both
    numbers; 6 new ones end at position 4,095 and run. Tables hold every position of an int32, so
    none is read past its end: 4,096 turns by its own angle."""
    limits = SchedulerLimits(2, 4096, 2, 2, 6, 4096)
    scheduler = Scheduler(limits)
    prompt = np.ones(4090, np.int32)
    with pytest.raises(RequestError, match=r"4090 prompt .* 64 new .* 4154, .*max_seq_len=4096"):
        scheduler.submit(rs.Request("long", prompt, 64))
    scheduler.submit(rs.Request("fits", prompt, 6))
    batch = scheduler.next_batch()
    assert batch.positions[-1] == 4089
    scheduler.commit(batch, [0], [2], [[3, 4, 5, 6, 7]])
    assert scheduler.next_batch().positions.tolist() == list(range(4090, 4096))
    rope, x = rs.Rope(1e4, 2, "half"), np.array([[[1, 0]]] * 4, np.float32)
    positions = np.array([4095, 4096, MAX_POSITION - 1, MAX_POSITION], np.int32)
    found = rs.apply_rope(x, positions, rope)[:, 0]
    angles = positions.astype(np.float64)
    np.testing.assert_allclose(found, np.stack([np.cos(angles), np.sin(angles)], 1), atol=1e-6)


def test_k11_a_sink_is_not_a_pinned_token(tmp_path):
    """2 pinned tokens in a ring of 6: positions 1, 2, 5, 6, 9, 12 live at 1, 2, 5, 2, 5, 4, not at
    p % 6. In YAML `sink` is the logit, true or false; a count there, or as `sink_tokens` of a ring
    that pins none, is refused and not taken for the other."""
    positions = np.array([1, 2, 5, 6, 9, 12])
    assert ring_index(positions, 6, sink_tokens=2).tolist() == [1, 2, 5, 2, 5, 4]
    assert (positions % 6).tolist() == [1, 2, 5, 0, 3, 0]
    assert rs.required_ring_len(128, 6, sink_tokens=2) == 135
    path = edited(tmp_path, ("sink: true", "sink: 2"))
    one_fault(path, "layer_groups[0].sink", "2", "true or false")
    for line in ("sinks: true", "sink_token: 2"):
        lines = faults_of(edited(tmp_path, ("sink: true", line)))
        assert any("sink: got no such key" in fault for fault in lines)


def test_b01_kv_heads_count_not_query_heads():
    """32 layers, 32 query heads, 8 KV heads of 128 in bf16: 131,072 bytes a token, not 524,288 (all
    heads) nor 65,536 (KV heads as a group size); so says the packaged model of that shape."""
    fmt = rs.make_record_format("bf16", 128, latent=False, num_kv_heads=8)
    assert 32 * fmt.record_bytes == 131_072
    assert [field.shape for field in fmt.fields] == [(8, 128), (8, 128)]
    cfg = rs.load_config("mistral_7b")
    assert (cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim) == (32, 32, 8, 128)
    assert rs.kv_bytes(cfg, 1).hybrid_bytes == 131_072


def test_b02_window_layers_stop_growing():
    """36 layers, 18 with a window of 128, 8 KV heads of 64 in bf16: 4.504395 GiB at 131,072 tokens
    (9.0 by one rate for all), 73,728 bytes at length 1 (36,864 without the window layers)."""
    cfg = rs.load_config("gpt_oss_120b")
    assert (cfg.num_layers, cfg.num_kv_heads, cfg.head_dim) == (36, 8, 64)
    assert sum(layer.window == 128 for layer in cfg.layers) == 18
    assert rs.kv_bytes(cfg, 1).hybrid_bytes == 73_728
    at_end = rs.kv_bytes(cfg, 131_072)
    assert at_end.hybrid_bytes / 2**30 == pytest.approx(4.504395, abs=1e-6)
    assert at_end.all_global_bytes == 9 * 2**30


def test_b05_one_shared_vector():
    """One 512-wide vector a token and layer: 528 bytes as a record, not 1,056 (K and V) nor 2,048
    (a bf16 pair); 1,024 as bf16."""
    fmt = rs.make_record_format("mxfp8", 512)
    assert (fmt.record_bytes, fmt.num_vectors) == (528, 1)
    assert rs.make_record_format("bf16", 512).record_bytes == 1024
    cfg = rs.load_config("deepseek_v4_1_flash.yaml")
    assert {layer.record_format.record_bytes for layer in cfg.layers} == {528}


def test_c07_an_engine_with_nothing_to_do():
    """No request: None, nothing launched. max_new_tokens 0 beside one that decodes: no token comes
    out of it, every layer is attended once, both slots are free again."""
    cfg = tiny()
    story = Story()
    with rs.Engine(cfg, "reference", 2) as engine:
        assert engine.next_batch() is None
        engine.submit(rs.Request("none", story.prompt("none", 5), 0))
        engine.submit(rs.Request("some", story.prompt("some", 5), 3))
        story.run(engine)
        assert engine.tokens("none").tolist() == story.prompt("none", 5).tolist()
        assert len(engine.tokens("some")) == 8
        assert engine.scheduler.free_slots == 2
        assert engine.next_batch() is None


@pytest.mark.parametrize("block_size", [1, 10])
def test_c02_c03_a_paged_pool_of_100_tokens(block_size):
    """101 tokens are refused at submit with both numbers and block nobody; of A 60 + 30 and B 40 +
    30, A runs to its end while B waits, nothing is preempted, and B runs after it."""
    pool = {"num_blocks": 100 // block_size, "block_size": block_size}
    scheduler = Scheduler(SchedulerLimits(4, 200, 4, 4, 1, 200, **pool))
    with pytest.raises(RequestError, match=r"101, more than the 100 tokens of the paged pool"):
        scheduler.submit(rs.Request("big", [1] * 71, 30))
    scheduler.submit(rs.Request("A", [1] * 60, 30))
    scheduler.submit(rs.Request("B", [1] * 40, 30))
    while (batch := scheduler.next_batch()) is not None:
        if scheduler.state("A") != "finished":
            assert batch.request_ids == ("A",)
            assert scheduler.state("B") == "waiting"
        scheduler.commit(batch, [0] * batch.num_seqs, [1] * batch.num_seqs)
    assert len(scheduler.outputs("A")) == len(scheduler.outputs("B")) == 30
    assert scheduler.counters.preempted == 0
    assert scheduler.free_slots == 4
