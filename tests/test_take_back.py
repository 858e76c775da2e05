"""Batches that cannot begin: the scheduler takes them back, and all goes on with the right bits."""

from dataclasses import replace

import numpy as np
import pytest
from engine_runs import tiny
from prefix_story import STACKED, Run, cached, check_alone, prompt_of
from test_prefix_hybrid import hybrid

import ringslab as rs
from ringslab.engine import engine as engine_module
from ringslab.schedules.scheduler import Scheduler, SchedulerLimits


class Faults:
    """Raises at chosen calls of what a batch needs to begin, before or after the call."""

    def __init__(self, rng, share):
        self.rng, self.share, self.raised = rng, share, 0

    def around(self, call):
        def run(*given, **named):
            late = self.rng.random() < 0.5
            if self.rng.random() >= self.share:
                return call(*given, **named)
            self.raised += 1
            if late:
                call(*given, **named)
            raise MemoryError("no room")

        return run


def break_engine(engine, faults, monkeypatch):
    """Uploads of block tables and batches, resets and copies into slots and pages may fail, in the
    middle of several as well."""
    engine._build = faults.around(engine._build)
    monkeypatch.setattr(engine_module, "reset_states", faults.around(engine_module.reset_states))
    uploads = replace(engine.memory, upload=faults.around(engine.memory.upload))
    engine.tools = replace(engine.tools, paged=replace(engine.tools.paged, memory=uploads))
    if engine.prefix is not None:
        engine.prefix.values.load = faults.around(engine.prefix.values.load)


def alone(known):
    with hybrid("none") as engine:
        run = Run(engine)
        for id, tokens in known.items():
            run.submit(id, tokens, 0)
            run.run()
        return run.outputs


@pytest.mark.parametrize("contract", ["none", "full"])
@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(contract, seed, monkeypatch):
    """Pages that move between sequences of a small pool, drafts kept and dropped, preemptions,
    hits, aborts, and batches that cannot begin, also twice in a row: outputs have the bits of
    requests alone, and slots and blocks come back."""
    rng = np.random.default_rng(seed)
    with hybrid(contract, "prefix.budget_bytes=150000", "engine.num_blocks=40") as engine:
        faults = Faults(rng, 0.12)
        break_engine(engine, faults, monkeypatch)
        run, caught = Run(engine), 0

        def step():
            nonlocal caught
            before = faults.raised
            try:
                return run.step(
                    drafts=lambda id, room: (min(2, room), int(rng.integers(min(2, room) + 1)))
                )
            except MemoryError:
                caught += 1
                assert faults.raised > before
                assert engine.scheduler._in_flight is None
                assert engine.open_step is None
                return None

        for turn in range(10):
            names = [10 * k + int(rng.integers(2)) for k in range(rng.integers(1, 5))]
            run.submit(f"r{turn}", prompt_of(*names, tail=int(rng.integers(1, 8))), 9)
            for _ in range(int(rng.integers(1, 12))):
                step()
            live = [i for i in run.known if engine.scheduler.state(i) in ("prefill", "decode")]
            if live and turn % 4 == 3:
                engine.preempt(live[-1])
            elif live and turn % 4 == 1:
                engine.abort(live[0])
        for _ in range(2000):
            if engine.done:
                break
            step()
        assert engine.done
        assert caught > 10
        assert engine.scheduler.free_blocks == 40
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
    monkeypatch.undo()
    wanted = alone(run.known)
    for key, rows in run.outputs.items():
        np.testing.assert_array_equal(rows, wanted[key])


def test_a_fault_behind_the_fixed_buffers_leaves_no_open_step(monkeypatch):
    """A decode batch of a run that fails once its arrays are in the fixed buffers: no step is open,
    a padded batch from before is refused, and after an abort a second run gives the digest of a
    first one."""
    cfg = tiny(*STACKED)
    requests = [rs.Request(id, prompt_of(1, tail=n), 6) for n, id in enumerate("abc")]
    with rs.Engine(cfg, "cpu") as engine:
        wanted = engine.run(requests, graphs=True)["digest"]
        whole = engine_module.with_plans

        def fail(host, *given):
            whole(host, *given)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine_module, "with_plans", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.run(requests, graphs=True)
        monkeypatch.setattr(engine_module, "with_plans", whole)
        assert engine.open_step is None
        for request in requests:
            engine.abort(request.id)
        assert engine.done
        assert engine.run(requests, graphs=True)["digest"] == wanted


def test_the_order_of_the_queue():
    """A decode and a prefill batch that cannot begin: who was admitted first is first again, before
    who waited, and the failing batch is nobody's."""
    with rs.Engine(tiny(*STACKED, "engine.token_budget=64"), "cpu", num_state_slots=3) as engine:
        run, whole = Run(engine), engine._build
        for id in "abcd":
            run.submit(id, prompt_of(1, tail=3), 8)

        kinds = []

        def fail(host):
            kinds.append(host.kind)
            raise MemoryError("no room")

        def queue():
            table = engine.scheduler._table
            return [table.ids[row] for row in engine.scheduler._room.queue]

        for _ in range(3):
            engine._build = fail
            for _ in range(2):
                with pytest.raises(MemoryError):
                    run.step()
                assert queue() == list("abcd")
            engine._build = whole
            run.step()
            assert queue() == ["d"]
        run.run()
        assert kinds == ["prefill", "prefill", "decode", "prefill", "decode", "prefill"]
        assert [engine.scheduler.state(id) for id in "abcd"] == ["finished"] * 4


def test_what_ended_and_was_forgotten_meanwhile():
    """Of a batch of three requests one is aborted and forgotten, one aborted and its id submitted
    again, one preempted: each is where it was put, and the batch is closed."""
    scheduler = Scheduler(SchedulerLimits(3, 64, 3, 3, 1, 100, True))
    for id in "abc":
        scheduler.submit(rs.Request(id, [1, 2, 3], 4))
    batch = scheduler.next_batch()
    scheduler.abort("a")
    scheduler.forget("a")
    scheduler.abort("b")
    scheduler.submit(rs.Request("b", [1, 2], 4))
    scheduler.preempt("c")
    scheduler.take_back(batch)
    assert scheduler.next_batch().request_ids == ("c", "b")
    assert scheduler.counters.preempted == 1


def test_a_copy_that_was_not_made_is_not_made_later():
    """A request with a hit cannot begin, and begins in the batch after: one copy, into its slot."""
    with hybrid("full", slots=1) as engine:
        run, whole = Run(engine), engine._build
        run.submit("a", prompt_of(1, 2, 3), 0)
        run.run()
        run.submit("b", prompt_of(1, 2, 3, tail=2), 0)

        def fail(host):
            raise MemoryError("no room")

        engine._build = fail
        with pytest.raises(MemoryError):
            run.step()
        engine._build = whole
        run.run()
        assert run.first_outputs["b"] == (24, 24)
        assert engine.prefix.counters.restores == 1
        assert engine.prefix.planner.counters.hits == 1


@pytest.mark.parametrize("contract", ["none", "full", "exact"])
@pytest.mark.parametrize("where", ["_build", "before_step"])
def test_a_batch_that_cannot_begin_is_taken_back(contract, where):
    """Building a batch, or a copy into its slots, fails once, at the k-th batch, for every k: the
    fault comes out of `next_batch`, and the requests go on to their end with the right outputs. The
    last two begin with a hit."""
    prompts = [prompt_of(1, 2, 3, 4, 5, tail=n) for n in (2, 3, 7)]
    if contract == "none" and where == "before_step":
        pytest.skip("there are no copies")
    for fail_at in range(14):
        with cached(contract, "engine.token_budget=16") as engine:
            owner = engine if where == "_build" else engine.prefix
            whole, calls = getattr(owner, where), []

            def fail(*given, whole=whole, calls=calls, fail_at=fail_at):
                calls.append(given)
                if len(calls) == fail_at + 1:
                    raise MemoryError("no room")
                return whole(*given)

            setattr(owner, where, fail)
            run, faults = Run(engine), 0
            for k, prompt in enumerate(prompts):
                run.submit(f"r{k}", prompt, 3)
                while not engine.done:
                    try:
                        run.step()
                    except MemoryError:
                        faults += 1
            assert faults == (len(calls) > fail_at)
            assert engine.scheduler.free_slots == engine.sizes.num_state_slots
            check_alone(run)


def test_a_copy_that_fails_behind_a_step_spoils_no_snapshot():
    """The copy over a replay fails at the end of a batch in which another request passed a
    boundary. Its slot moves on, and what is stored for the boundary is not what it holds later: a
    request with that prefix has the right bits."""
    with cached("exact", "engine.token_budget=38") as engine:
        run, load = Run(engine), engine.prefix.values.load
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=1), 0)
        run.run()
        run.submit("c", prompt_of(11, 12, 13, 14, 15, 16, 17, tail=6), 3)
        while len(run.computed.get("c", ())) < 32:
            run.step()
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=2), 3)

        def fail(*given):
            engine.prefix.values.load = load
            raise MemoryError("no room")

        engine.prefix.values.load = fail
        with pytest.raises(MemoryError):
            run.step()
        assert [len(run.computed[id]) for id in "abc"] == [41, 22, 40]
        run.run()
        run.submit("d", prompt_of(11, 12, 13, 14, 15, tail=5), 3)
        run.run()
        assert run.first_outputs["d"] == (10, 32)  # 40 was not stored
        check_alone(run)


def outputs_of_a_hit(faults):
    """Under `bounded`, of request b with a hit at 40, while x decodes. `faults`: "load" at the end
    of the batch that ends the replay, "decode" in the batch after it, which is of x alone."""
    with cached("bounded", "engine.token_budget=64") as engine:
        run, load, build = Run(engine), engine.prefix.values.load, engine._build
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=1), 0)
        run.run()
        run.submit("x", prompt_of(21, tail=1), 30)
        while run.step().kind == "prefill":
            pass
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=2), 3)

        def fail_load(*given):
            engine.prefix.values.load = load
            raise MemoryError("no room")

        def fail_decode(host):
            assert host.request_ids == ("x",)
            engine._build = build
            raise MemoryError("no room")

        if "load" in faults:
            engine.prefix.values.load = fail_load
            with pytest.raises(MemoryError):
                run.step()
        else:
            run.step()
        assert run.computed["b"] == list(range(32, 40))
        if "decode" in faults:
            engine._build = fail_decode
            with pytest.raises(MemoryError):
                run.step()
        run.run()
        assert engine.prefix.counters.restores == 1
        return {key: rows for key, rows in run.outputs.items() if key[0] == "b"}


@pytest.mark.parametrize("faults", ["load", "decode", "load decode"])
def test_a_copy_over_a_replay_is_made_though_it_failed(faults):
    """Before the next batch, also where that one begins with others and is taken back."""
    wanted, found = outputs_of_a_hit(""), outputs_of_a_hit(faults)
    assert wanted.keys() == found.keys()
    for key, rows in found.items():
        np.testing.assert_array_equal(rows, wanted[key])
