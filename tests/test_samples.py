"""Which query tokens `--verify` looks at."""

import pytest
from engine_runs import tiny

import ringslab as rs
from ringslab.engine.samples import choose_samples


@pytest.mark.parametrize("name", ["deepseek_v4_1_flash.yaml", "quickstart.yaml"])
def test_every_layer_is_looked_at_in_prefill_and_in_decode(name):
    """200 requests of 8,000 prompt tokens and 40 generated ones (1 in 200 positions): each layer,
    draft layers too, has a sample of each kind with the packaged number of samples."""
    cfg = rs.load_config(name)
    ids = [f"r{i}" for i in range(200)]
    samples = choose_samples(cfg, ids, [8000] * 200, [8040] * 200)
    assert len(set(samples)) == cfg.run.verify_samples >= 2 * len(cfg.layers)
    found = {(sample.layer, sample.position >= 8000) for sample in samples}
    assert found == {(layer.id, kind) for layer in cfg.layers for kind in (False, True)}
    assert len({sample.request_id for sample in samples}) > 30


def test_samples_are_seeded_and_stay_inside_their_requests():
    """Requests of 0, 1, 3 and 9 positions, 1, 1, 4 and 5 of them prompts: more samples are asked
    for than there are, each is there once at most, and the same seed gives the same ones."""
    cfg = tiny("run.verify_samples=500")
    lengths = dict(zip("abcd", (0, 1, 3, 9), strict=True))
    arguments = (list(lengths), [1, 1, 4, 5], list(lengths.values()))
    samples = choose_samples(cfg, *arguments)
    assert all(0 <= sample.position < lengths[sample.request_id] for sample in samples)
    assert len(samples) == len(set(samples)) == 13 * len(cfg.layers)
    assert samples == choose_samples(cfg, *arguments)
    assert samples != choose_samples(tiny("run.verify_samples=500", "run.seed=99"), *arguments)
    assert choose_samples(cfg, ["a"], [1], [0]) == []


def test_prompts_alone_take_every_turn():
    """Requests that generate nothing: all samples lie in prompts, over all layers."""
    cfg = tiny("run.verify_samples=8")
    samples = choose_samples(cfg, ["a"], [100], [100])
    assert len(samples) == 8
    assert {sample.layer for sample in samples} == {0, 1, 2, 3}


def test_a_stacked_run_has_ground_samples_in_its_shortest_request():
    """64 samples at most, a quarter of them in the first 64 positions of the shortest request that
    computes anything, in the first four layers."""
    cfg = tiny("run.verify_samples=500", "run.activations=stacked")
    samples = choose_samples(cfg, ["none", "long", "short"], [5, 900, 80], [0, 1000, 90])
    ground = [sample for sample in samples if sample.whole_stack]
    assert (len(samples), len(ground)) == (64, 16)
    assert all(s.request_id == "short" and s.position < 64 and s.layer < 4 for s in ground)
