"""Calls that are cut off, by a fault or by Ctrl-C, wherever it comes: no wrong bit follows, nothing
is lost for good, and the engine goes on."""

import pytest
from prefix_story import Run, cached, check_alone, prompt_of

import ringslab as rs
from ringslab.engine import run as run_module


def cut_off(monkeypatch, owner, name):
    """The next call of `name` raises KeyboardInterrupt; those after it are as before."""
    whole = getattr(owner, name)

    def call(*given):
        monkeypatch.setattr(owner, name, whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, call)


def test_an_order_is_carried_out_at_once_or_never(monkeypatch):
    """The call after a commit that would take its snapshots is cut off. The next step overwrites
    the slot, and nothing of it is stored under the key of the step before."""
    with cached("full", "engine.token_budget=16", "prefix.snapshot_blocks=2") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, 6), 0)
        run.step()
        cut_off(monkeypatch, engine.prefix, "after_step")
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.run()
        run.submit("b", prompt_of(1, 2, 3, 4, 9, tail=3), 0)
        run.run()
        assert run.first_outputs["b"] == (16, 16)  # the snapshot at 32 is the one that was not made
        check_alone(run)


@pytest.mark.parametrize("contract", ["full", "exact"])
def test_admitted_with_the_copy_or_not_at_all(monkeypatch, contract):
    """A hit whose admission is cut off: the request waits again, and begins with its prefix."""
    with cached(contract, "engine.token_budget=64", "engine.max_prefill_seqs=2") as engine:
        run = Run(engine)
        for id, tokens in (
            ("a", prompt_of(*range(1, 8), tail=1)),
            ("x", prompt_of(21, 22, 23, 24)),
        ):
            run.submit(id, tokens, 0)
            run.run()
        cut_off(monkeypatch, engine.prefix.index, "count_lookup")
        run.submit("b", prompt_of(*range(1, 8), tail=3), 0)
        run.submit("c", prompt_of(31, tail=3), 0)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        assert [engine.scheduler.state(id) for id in "bc"] == ["waiting"] * 2
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
        run.run()
        assert run.first_outputs["b"][1] == 56
        assert engine.prefix.counters.restores == 1
        check_alone(run)


def test_what_was_staged_for_no_batch_is_forgotten(monkeypatch):
    """A look-up fails while a prefill is picked, its requests are aborted, and the next batch is a
    decode step of another request: it runs."""
    options = ("engine.token_budget=64", "engine.num_state_slots=3", "engine.max_prefill_seqs=3")
    with cached("full", *options, "prefix.snapshot_blocks=3") as engine:
        run = Run(engine)
        run.submit("seed", prompt_of(1, 2, 3, tail=1), 0)
        run.run()
        run.submit("d", prompt_of(7, tail=1), 20)
        run.step()
        run.step()
        run.submit("a", prompt_of(11, 12, 13, 14, 15, tail=1), 0)
        run.submit("b", prompt_of(1, 2, 3, tail=2), 0)
        cut_off(monkeypatch, engine.prefix.values, "get")
        with pytest.raises(KeyboardInterrupt):
            run.step()
        assert engine.prefix.planner.staged
        engine.abort("a")
        engine.abort("b")
        assert run.step().request_ids == ("d",)
        run.run()
        check_alone(run)


def test_a_restore_ends_with_its_request(monkeypatch):
    """A copy into a slot that fails behind a step is of no use once its request is aborted: the
    others go on, and it is not made."""
    with cached("exact", "engine.token_budget=64") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=1), 0)
        run.run()
        run.submit("x", prompt_of(21, tail=1), 30)
        while run.step().kind == "prefill":
            pass
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=2), 3)
        cut_off(monkeypatch, engine.prefix.values, "load")
        with pytest.raises(KeyboardInterrupt):
            run.step()
        assert engine.prefix.planner.restores
        engine.abort("b")
        assert not engine.prefix.planner.restores
        run.run()
        assert engine.prefix.counters.restores == 0
        check_alone(run)


@pytest.mark.parametrize("name", ["_begin", "open"])
def test_a_batch_that_nobody_got_comes_again(monkeypatch, name):
    """next_batch is cut off before or while the batch is opened."""
    with cached("full") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, tail=1), 3)
        cut_off(monkeypatch, engine if name == "_begin" else engine._order, name)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        run.run()
        check_alone(run)


def test_a_batch_that_the_scheduler_alone_has_comes_again():
    """Cut off between the scheduler's batch and the engine's: the next call takes it back."""
    with cached("full") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, tail=1), 3)
        assert engine.scheduler.next_batch() is not None
        run.run()
        assert engine.scheduler.counters.preempted == 1
        check_alone(run)


@pytest.mark.parametrize("name", ["lacking", "close"])
def test_abort_all_after_a_commit_that_was_cut_off(monkeypatch, name):
    """Batch and requests are dropped, the slots are free, and new requests have their bits."""
    with cached("full") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, tail=1), 3)
        run.submit("b", prompt_of(3, 4, tail=1), 3)
        cut_off(monkeypatch, engine._order, name)
        with pytest.raises(KeyboardInterrupt):
            run.step()
        with pytest.raises(rs.errors.BatchError, match="call commit first, or abort_all"):
            engine.next_batch()
        engine.abort_all()
        assert engine.done
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
        assert [engine.scheduler.state(id) for id in "ab"] == ["aborted"] * 2
        run = Run(engine)
        run.submit("c", prompt_of(1, 2, 5, tail=1), 3)
        run.run()
        check_alone(run)


def test_abort_all_with_nothing_to_end():
    """Nothing happens, and a closed engine says so."""
    with cached("full") as engine:
        engine.abort_all()
        assert engine.done
    with pytest.raises(rs.errors.BatchError, match="closed"):
        engine.abort_all()


def test_a_put_that_fails_takes_its_entry_along(monkeypatch):
    """What the index let go for a value leaves the store though the put fails, and the value's
    entry leaves the index: both stay within the budget and hold the same."""
    with cached("full", "prefix.budget_bytes=13000", "engine.token_budget=64") as engine:
        run, store = Run(engine), engine.prefix.store
        for n in range(12):
            if n % 2:
                cut_off(monkeypatch, store, "put")
            run.submit(f"r{n}", prompt_of(100 * n, 100 * n + 1, tail=1), 0)
            while not engine.done:
                try:
                    run.step()
                except KeyboardInterrupt:
                    continue
            assert store.shelf.used_bytes == engine.prefix.index.used_bytes <= 13000
        check_alone(run)


def test_a_run_that_cannot_open_leaves_decode_batches_as_they_were(monkeypatch):
    """No memory for samples, where steps would be captured: the caller's batches have their plans
    afterwards."""

    def fail(*given, **options):
        raise rs.errors.DeviceMemoryError("no room")

    monkeypatch.setattr(run_module, "open_capture", fail)
    with cached("full") as engine:
        with pytest.raises(rs.errors.DeviceMemoryError):
            engine.run([rs.Request("x", prompt_of(1, tail=3), 4)], graphs=True)
        assert not engine.fixed_decodes
        run = Run(engine)
        run.submit("mine", prompt_of(1, 2, tail=1), 4)
        run.run()
        check_alone(run)


def test_a_run_that_fails_leaves_the_engine_to_its_caller(monkeypatch):
    """Its requests are aborted, its batch is dropped, and what the caller stores afterwards is the
    caller's: the next run does not find it."""
    trace = [rs.Request("x", prompt_of(1, 2, 3, tail=3), 4)]
    with cached("full") as engine:
        engine.prefix.depend_on("weights of May")
        root = engine.prefix.planner.root
        cut_off(monkeypatch, engine, "attend")
        with pytest.raises(KeyboardInterrupt):
            engine.run(trace)
        assert engine.done
        assert engine.prefix.planner.root == root
        assert engine.prefix.planner.seen is None
        run = Run(engine)
        run.submit("mine", prompt_of(1, 2, 3, tail=1), 0)
        run.run()
        report = engine.run(trace, verify=True)
        assert report["verify"]["passed"] is True
        assert report["prefix"]["hit_blocks"] == 0
        assert engine.prefix.words == ("weights of May",)
        run.submit("again", prompt_of(1, 2, 3, tail=2), 0)
        run.run()
        assert run.first_outputs["again"] == (24, 24)
