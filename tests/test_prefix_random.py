"""Random schedules over a prefix cache: arrivals, chunks, drafts, rejections, evictions, restores,
preemption, slot reuse. Outputs equal those of a run with no cache, no drafts and no batches."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefix_story import Run, block, cached, errors, tiny_alone

WINDOW = 8


@st.composite
def prompts(draw):
    """Prompts that share blocks from the front: of two names each, so that they often meet."""
    names = draw(st.lists(st.integers(0, 1), min_size=0, max_size=6))
    tail = draw(st.integers(0, 7))
    whole = [block(10 * k + name) for k, name in enumerate(names)]
    tokens = np.concatenate([*whole, block(99)[:tail]]).astype(np.int32)
    return tokens if len(tokens) else block(98)[:1].astype(np.int32)


def play(draw, contract, backend):
    """A run of random requests to their end."""
    overrides = (
        f"engine.token_budget={draw(st.sampled_from([5, 8, 13, 32]))}",
        f"engine.num_state_slots={draw(st.integers(1, 3))}",
        f"engine.max_prefill_seqs={draw(st.integers(1, 3))}",
        f"prefix.snapshot_blocks={draw(st.integers(1, 3))}",
        f"prefix.budget_bytes={draw(st.sampled_from(['null', 4_000, 13_000, 30_000]))}",
    )
    requests = draw(st.lists(st.tuples(prompts(), st.integers(0, 12)), min_size=2, max_size=6))

    def drafts(id, room):
        wanted = min(draw(st.integers(0, 2)), room)
        return wanted, draw(st.integers(0, wanted))

    with cached(contract, *overrides, backend=backend) as engine:
        run, waiting = Run(engine), list(enumerate(requests))
        while waiting or not engine.done:
            act = draw(st.integers(0, 9))
            live = [id for id in run.known if engine.scheduler.state(id) in ("prefill", "decode")]
            if waiting and (engine.done or act < 3):
                at, (prompt, new) = waiting.pop(0)
                run.submit(f"r{at}", prompt, new)
            elif act == 3 and live:
                engine.preempt(draw(st.sampled_from(live)))
            elif act == 4 and live and len(run.known) > 2:
                engine.abort(draw(st.sampled_from(live)))
            else:
                run.step(drafts=drafts)
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
        assert engine.prefix.index.used_bytes <= (engine.prefix.config.budget_bytes or 1 << 40)
    return run


def is_promised(run, contract, id, layer, position):
    """Whether an output must be that of a run alone. After a hit `bounded` promises its two stored
    layers, from the boundary on (the last token of a prompt that is cached whole comes from the
    replay)."""
    start = run.starts[id, position]
    return contract != "bounded" or start == 0 or (layer < 2 and position >= start + WINDOW)


@pytest.mark.parametrize("contract", ["full", "exact", "bounded"])
@settings(max_examples=25, report_multiple_bugs=False)
@given(data=st.data())
def test_random_schedules(contract, data):
    """On the CPU the promised outputs are the bits of each request alone."""
    run = play(data.draw, contract, "cpu")
    alone = {id: tiny_alone(tuple(known.tolist())) for id, known in run.known.items()}
    for (id, layer, position), rows in run.outputs.items():
        if is_promised(run, contract, id, layer, position):
            wanted = alone[id][layer, position]
            assert np.array_equal(rows, wanted), (id, layer, position)


@pytest.mark.parametrize("contract", ["full", "exact", "bounded"])
@settings(
    max_examples=3,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_schedules_are_within_the_bound(backend, contract, data):
    """On every backend they are within the bound of the float64 stack."""
    run = play(data.draw, contract, backend)
    for id in run.known:
        for (layer, position), error in errors(run, id).items():
            if is_promised(run, contract, id, layer, position):
                assert error <= 1, (id, layer, position)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_hits_are_within_the_bound(backend, data):
    """Three requests, the last two after snapshots of the first, with random drafts."""
    contract = data.draw(st.sampled_from(["full", "exact"]))
    with cached(contract, backend=backend) as engine:
        run = Run(engine)
        for id in "abc":
            prompt = np.concatenate([block(k) for k in range(4)] + [block(ord(id))[:3]])
            run.submit(id, prompt.astype(np.int32), 6)
            right = data.draw(st.integers(0, 2))
            run.run(drafts=lambda id, room, right=right: (min(2, room), min(right, room)))
            assert max(errors(run, id).values()) <= 1
        assert engine.prefix.planner.counters.hits == 2
