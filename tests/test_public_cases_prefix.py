"""Public cases about prefix reuse and offload; docs/public-cases.md says what broke elsewhere."""

import numpy as np
import pytest
from prefix_model import FULL, Cached
from prefix_story import Run, block, cached

import ringslab as rs
from ringslab.schedules.prefix_rules import resume_rule

PROMPT = np.concatenate([block(name) for name in (1, 2, 3, 4, 5)]).astype(np.int32)


def alone(backend, prompt, new):
    """Outputs of a request in an engine without a cache, uint16 by (layer, position)."""
    with cached("none", backend=backend) as engine:
        run = Run(engine)
        run.submit("x", prompt, new)
        run.run()
    return {key[1:]: rows for key, rows in run.outputs.items()}


def assert_same(run, id, wanted, first):
    """Every output of a request from position `first` on has the bits that are wanted."""
    found = {key[1:]: rows for key, rows in run.outputs.items() if key[0] == id}
    assert set(found) >= {key for key in wanted if key[1] >= first}
    for key, rows in found.items():
        np.testing.assert_array_equal(rows, wanted[key], err_msg=str(key))


def test_x01_the_ring_of_a_hit_on_256_tokens():
    """V4.1, W = 128, a hit of 256 tokens: before position 256 runs, the keys of 129..255 are there.
    `full` goes on at 256 with the whole ring restored; `bounded` computes 128..255 again and reads
    nothing older; `exact` would have to replay 40 x 127 positions, so the hit is refused."""
    cfg = rs.load_config("deepseek_v4_1_flash.yaml")
    full = resume_rule(cfg, "full").resume(256, 300)
    assert (full.start, full.swa_valid_start, full.first_output) == (256, 0, 256)
    bounded = resume_rule(cfg, "bounded").resume(256, 300)
    assert (bounded.start, bounded.swa_valid_start, bounded.first_output) == (128, 128, 256)
    assert resume_rule(cfg, "exact").resume(256, 300) is None


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_x01_a_hit_reads_no_stale_ring(name):
    """The slab is filled with 0xFF between two requests that share 40 tokens: the second goes on at
    40 and has the bits of a run without a cache."""
    prompt = np.concatenate([PROMPT, block(9)[:5]]).astype(np.int32)
    with cached("full", backend=name) as engine:
        run = Run(engine)
        run.submit("a", PROMPT, 2)
        run.run()
        engine.prefix.flush()
        engine.slab[:] = 0xFF
        run.submit("b", prompt, 4)
        run.run()
        assert run.first_outputs["b"] == (40, 40)
    assert_same(run, "b", alone(name, prompt, 4), first=40)


def test_x03_whole_prompt_cached():
    """128 of 128 tokens cached: one token runs, at position 127, and gives the next."""
    requests = Cached(FULL, block_size=128, token_budget=1000)
    prompt = np.arange(128, dtype=np.int32)
    assert requests.run(rs.Request("a", prompt, 1)) == [(0, 128)]
    assert requests.run(rs.Request("b", prompt, 1)) == [(127, 128)]
    assert requests.scheduler.outputs("b").tolist() == [7]


def test_x05_tokens_are_counted_after_the_hit():
    """Prompt 465, 256 of them cached: 209 tokens run and the last chunk ends at 465, not 721."""
    requests = Cached(FULL, block_size=128, token_budget=1000)
    prompt = np.arange(465, dtype=np.int32)
    requests.run(rs.Request("a", prompt[:256], 1))
    chunks = requests.run(rs.Request("b", prompt, 1))
    assert sum(end - start for start, end in chunks) == 209
    assert (chunks[0][0], chunks[-1][1]) == (256, 465)


def test_x08_rings_of_several_windows():
    """A sequence of 500 tokens, another request shares 400 of them. No ring is read in place: what
    the smallest window has dropped is gone, so without a snapshot on the way nothing is reused; a
    snapshot that was taken at 384 is, and nothing past it."""
    tokens = np.arange(500, dtype=np.int32)
    for size, wanted in ((512, [(0, 400)]), (128, [(384, 400)])):
        requests = Cached(FULL, block_size=size, token_budget=1000)
        requests.run(rs.Request("a", tokens, 1))
        assert requests.run(rs.Request("b", tokens[:400], 1)) == wanted


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_x10_a_failed_restore_leaves_nothing_behind(name):
    """All snapshots cut to half: the same request runs from 0 with the bits of a fresh engine, and
    so does a second one; the damage is counted, every slot is free again."""
    other = np.concatenate([block(7), PROMPT[:11]]).astype(np.int32)
    with cached("full", backend=name) as engine:
        run = Run(engine)
        run.submit("a", PROMPT, 2)
        run.run()
        engine.prefix.flush()
        values = engine.prefix.store.shelf._values
        assert values
        for key, value in list(values.items()):
            values[key] = value[: len(value) // 2]
        engine.slab[:] = 0xFF
        for id, prompt in (("b", PROMPT), ("c", other)):
            run.submit(id, prompt, 3)
            run.run()
            assert run.first_outputs[id] == (0, 0)
        assert engine.prefix.store.stats.corrupt >= 1
        assert engine.prefix.planner.counters.failed_reads >= 1
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
    assert_same(run, "b", alone(name, PROMPT, 3), first=0)
    assert_same(run, "c", alone(name, other, 3), first=0)
