"""Prefix hits in an engine with stacked layers: what the contracts promise, bit by bit."""

import time

import numpy as np
import pytest
from prefix_story import Run, block, cached, check_alone, continued, errors, prompt_of
from store_cases import RedisServer, redis_problem

import ringslab as rs
from ringslab.engine.prefix_cache import snapshot_bytes
from ringslab.engine.prefix_values import PrefixValues, value_name
from ringslab.engine.workspace import engine_sizes
from ringslab.errors import BatchError


@pytest.mark.parametrize(("contract", "start"), [("full", 40), ("exact", 18), ("bounded", 32)])
def test_a_hit_computes_what_its_contract_says(backend, contract, start):
    """5 blocks of 8 shared, 3 layers of window 8: `full` goes on at 40, `exact` at 40 - 3 x 7 = 19
    (18, a whole group), `bounded` at 32."""
    with cached(contract, backend=backend) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=3), 4)
        run.run()
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=6), 4)
        run.run()
        assert run.first_outputs["b"] == (start, 40)
        assert run.computed["b"] == list(range(start, 46 + 3))
        found = errors(run, "b")
        assert len(found) == 3 * (46 + 3 - 40)
        if contract != "bounded":
            assert max(found.values()) <= 1
        assert engine.prefix.counters.restores == 1


@pytest.mark.parametrize(("contract", "start"), [("full", 30), ("exact", 10), ("bounded", 24)])
def test_a_whole_prompt_in_the_cache(backend, contract, start):
    """32 of 32 tokens cached: the last token is computed once, and gives the next. `full` starts at
    its group of compression ratio 2; `exact` reaches 21 positions below position 31."""
    with cached(contract, backend=backend) as engine:
        run = Run(engine)
        for id in "ab":
            run.submit(id, prompt_of(1, 2, 3, 4), 3)
            run.run()
        assert run.computed["b"] == list(range(start, 34))
        found = errors(run, "b")
        assert {p for _, p in found} == set(range(30 if contract == "full" else 31, 34))
        if contract != "bounded":
            assert max(found.values()) <= 1


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("contract", ["full", "exact"])
def test_bits_of_a_hit_are_those_of_a_run_without_one(name, contract):
    """On the host the outputs after a hit are the very bits of an engine without a cache."""
    with cached("none", backend=name) as engine:
        wanted = Run(engine)
        wanted.submit("b", prompt_of(1, 2, 3, 4, 5, tail=6), 9)
        wanted.run()
    with cached(contract, backend=name) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=3), 4)
        run.run()
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=6), 9)
        run.run(drafts=lambda id, room: (min(2, room), 1))
        assert engine.prefix.planner.counters.hits == 1
    for (id, layer, position), rows in run.outputs.items():
        if id == "b":
            np.testing.assert_array_equal(rows, wanted.outputs[id, layer, position])


def test_bounded_differs_and_agrees_where_it_must(backend):
    """Two stored layers under one that is rebuilt, a hit at 40, window 8. The stored layers agree
    at every position after it, among them the first 7, whose windows reach into restored rings. The
    rebuilt layer reads keys of a replay that began with nothing, so it differs, at its first 7
    positions, and agrees from 47 on, where its window holds new keys only."""
    with cached("bounded", backend=backend) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=3), 4)
        run.run()
        run.submit("b", prompt_of(1, 2, 3, 4, 5, 6, tail=4), 4)
        run.run()
    found = errors(run, "b")
    assert max(error for (layer, _), error in found.items() if layer < 2) <= 1
    differs = {position for (layer, position), error in found.items() if error > 1}
    assert 40 in differs
    assert differs <= set(range(40, 47))


def test_a_snapshot_is_the_start_of_a_slot():
    """At boundary 24 the store holds the bytes of the slot: stored rings, or all rings; positions
    13 .. 23 of ring 11, and no more."""
    for contract, size in (("exact", 2 * 1472), ("full", 4 * 1472)):
        with cached(contract, "prefix.snapshot_blocks=3") as engine:
            run = Run(engine)
            run.submit("a", prompt_of(1, 2, 3), 1)
            run.run()
            (sealed,) = engine.prefix.store.shelf._values.values()
            assert bytes(sealed[-size:]) == engine.slab[:size].tobytes()
            assert engine.prefix.num_bytes == size


def test_sizes_of_v4_1_flash():
    """1,415,040 bytes of the 20 stored rings, 3,042,336 of all 43."""
    layout = rs.load_config("deepseek_v4_1_flash.yaml").slot_layout
    assert snapshot_bytes(layout, "exact") == snapshot_bytes(layout, "bounded") == 1_415_040
    assert snapshot_bytes(layout, "full") == 3_042_336


@pytest.mark.parametrize("contract", ["full", "exact"])
@pytest.mark.parametrize("first", range(20, 24))
def test_a_decode_step_that_overshoots_its_boundary(backend, contract, first):
    """Steps of 3 tokens, all drafts right or all wrong, pass boundary 24 from 20 .. 23 on: the
    prefix taken afterwards is whole, and a request that shares 24 tokens agrees."""
    for right in (0, 1, 2):
        with cached(contract, backend=backend) as engine:
            run = Run(engine)
            prompt = prompt_of(1, 2, 3)[:first]
            run.submit("a", prompt, 8)
            run.run(drafts=lambda id, room, right=right: (min(2, room), min(right, room)))
            assert engine.prefix.counters.snapshots == 3
            run.submit("b", np.concatenate([continued(prompt, 30 - first)[:24], block(7)]), 2)
            run.run()
            assert run.first_outputs["b"] == ((24 if contract == "full" else 2), 24)
            assert max(errors(run, "b").values()) <= 1


def test_a_damaged_snapshot_is_a_miss(backend):
    """One bit of the snapshot at 40 flips: the hit is at 32, the slot is whole, the outputs are
    right, and the damage is counted. With the store emptied the request starts at 0."""
    with cached("full", backend=backend) as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=1), 1)
        run.run()
        engine.prefix.flush()
        values = engine.prefix.store.shelf._values
        key = list(values)[-1]
        damaged = bytearray(values[key])
        damaged[-5] ^= 4
        values[key] = bytes(damaged)
        run.submit("b", prompt_of(1, 2, 3, 4, 5, tail=2), 2)
        run.run()
        assert run.first_outputs["b"] == (32, 32)
        assert engine.prefix.store.stats.corrupt == 1
        assert engine.prefix.planner.counters.failed_reads == 1
        values.clear()
        run.submit("c", prompt_of(1, 2, 3, 4, 5, tail=2), 2)
        run.run()
        assert run.first_outputs["c"] == (0, 0)
        assert max(max(errors(run, id).values()) for id in "bc") <= 1
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots


def test_what_a_layer_left_out_is_not_stored():
    """A caller that skips layer 2 in one batch has no snapshot of that sequence; another has."""
    with cached("full") as engine:
        run = Run(engine)
        attend = engine.attend
        engine.attend = lambda layer, *given: layer == 2 or attend(layer, *given)
        run.submit("a", prompt_of(1), 0)
        run.run()
        engine.attend = attend
        assert (engine.prefix.counters.snapshots, engine.prefix.counters.skipped) == (0, 1)
        run.submit("b", prompt_of(1), 0)
        run.run()
        assert engine.prefix.counters.snapshots == 1


def test_other_sinks_are_another_model():
    """After set_sink nothing cached is found; with the old sinks it is again."""
    with cached("full") as engine:
        run = Run(engine)
        starts = {}
        old, new = engine.tools.sinks[1].copy(), np.zeros(4, np.float32)
        for id, sink in (("a", old), ("b", new), ("c", new), ("d", old)):
            engine.set_sink(1, sink)
            run.submit(id, prompt_of(1, 2, tail=1), 0)
            with pytest.raises(BatchError, match="requests are running"):
                engine.set_sink(1, sink)
            run.run()
            starts[id] = run.first_outputs[id][0]
        assert starts == {"a": 0, "b": 0, "c": 16, "d": 16}


@pytest.mark.parametrize("url", ["memory:", "lmdb:{tmp}/store"])
def test_a_store_that_stays(tmp_path, url):
    """A second engine finds the prefixes that the first left in LMDB, but not those of another
    configuration; memory goes with its engine."""
    pytest.importorskip("lmdb")
    url = url.format(tmp=tmp_path)
    found = []
    for more in ((), (), ("layer_groups.consumers.softmax_scale=0.1",)):
        with cached("full", f"prefix.store='{url}'", *more) as engine:
            run = Run(engine)
            run.submit("a", prompt_of(1, 2, 3, tail=2), 0)
            run.run()
            found.append(run.first_outputs["a"][0])
            if not more:
                assert max(errors(run, "a").values()) <= 1
    assert found == ([0, 24, 0] if url.startswith("lmdb") else [0, 0, 0])


def test_damage_never_reaches_an_output(fuzz_size):
    """Flipped, cut, lengthened and swapped values in the store, 20 times (1,000 with --fuzz=full):
    every output is that of a run alone; what cannot be believed is computed."""
    rng = np.random.default_rng(5)
    with cached("full", "engine.num_state_slots=1") as engine:
        run = Run(engine)
        run.submit("a", prompt_of(1, 2, 3, 4, tail=1), 0)
        run.run()
        values = engine.prefix.store.shelf._values
        for turn in range(fuzz_size(20, 1000)):
            keys = list(values)
            key = keys[rng.integers(len(keys))]
            value = bytearray(values[key])
            match turn % 4:
                case 0:
                    value[rng.integers(len(value))] ^= 1 << rng.integers(8)
                case 1:
                    del value[rng.integers(len(value)) :]
                case 2:
                    value += bytes(rng.integers(0, 256, 9, dtype=np.uint8))
                case 3:
                    value = bytearray(values[keys[rng.integers(len(keys))]])
            values[key] = bytes(value)
            id = f"r{turn}"
            run.submit(id, prompt_of(1, 2, 3, 4, tail=2), 0)
            run.run()
            check_alone(run, id)
        assert engine.prefix.store.stats.corrupt > 10


def test_device_bytes_are_stated():
    """32 snapshots on their way, 45,281,280 bytes of stored rings or 97,354,752 of all rings, and
    16 whole slots of the stage."""
    sizes = {
        contract: engine_sizes(
            rs.load_config("deepseek_v4_1_flash.yaml", (f"prefix.contract={contract}",))
        ).snapshot_bytes
        for contract in ("none", "exact", "full")
    }
    stage = 16 * 3_128_352
    assert sizes == {
        "none": 0,
        "exact": 32 * 1_415_040 + stage,
        "full": 32 * 3_042_336 + stage,
    }


@pytest.mark.skipif(bool(redis_problem()), reason=str(redis_problem()))
def test_a_shared_server_that_goes_away(tmp_path):
    """Two engines share prefixes through Redis. With the server gone a request starts at 0 and its
    outputs are right; after it is back, what is stored anew is found. An eviction of one engine's
    index removes nothing that the other uses."""
    server = RedisServer(tmp_path)
    try:
        settings = ("full", f"prefix.store='{server.url}'", "prefix.budget_bytes=7000")
        with cached(*settings) as one, cached(*settings) as two:
            runs = {"one": Run(one), "two": Run(two)}

            def ask(engine, id, tail):
                run = runs[engine]
                run.submit(id, prompt_of(1, 2, 3, tail=tail), 0)
                run.run()
                assert max(errors(run, id).values()) <= 1
                return run.first_outputs[id][0]

            assert ask("one", "a", 1) == 0
            assert len(one.prefix.index) == 1  # of three that were stored
            assert ask("two", "b", 2) == 24
            server.stop()
            with pytest.warns(RuntimeWarning, match="gives misses until this is over"):
                assert ask("two", "c", 3) == 0
            assert two.prefix.planner.counters.failed_reads == 1
            assert two.prefix.counters.refused > 0
            server.start()
            found = [ask("one", f"d{turn}", turn % 7) for turn in range(40)]
            assert found[-1] == 24
    finally:
        server.stop()


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_values_on_their_way(delay_s):
    """As on a GPU: values leave by buffers and a thread, to a store that takes its time. What is
    wanted while it is on its way is waited for, so hits are those of a run that stores at once;
    evictions come after the puts they undo; outputs are the bits of each request alone."""
    with cached("full", "prefix.budget_bytes=31000", "engine.num_state_slots=2") as engine:
        cache = engine.prefix
        put, deleted = cache.store.put, []
        cache.store.put = lambda *given: time.sleep(delay_s) or put(*given)
        cache.values = PrefixValues(cache.store, cache.memory, cache.values.sizes, on_gpu=True)
        remove = cache.store.delete
        cache.store.delete = lambda name: deleted.append(name) or remove(name)
        run, hits = Run(engine), []
        for turn, names in enumerate([(1, 2, 3), (1, 2, 4), (1, 2, 3), (5, 6, 7, 8), (1, 2, 3)]):
            run.submit(f"r{turn}", prompt_of(*names, tail=1 + turn), 3)
            run.run(drafts=lambda id, room: (min(2, room), min(1, room)))
            hits.append(run.first_outputs[f"r{turn}"][0])
        assert hits == [0, 16, 24, 0, 24]
        cache.flush()
        assert len(cache.store.shelf._values) == len(cache.index) <= 5
        assert set(cache.store.shelf._values) == {value_name(e) for e in cache.index._entries}
        assert len(deleted) > 0
    check_alone(run, *run.known)


def test_a_store_that_takes_nothing():
    """Every put is refused: counted, forgotten, and no request finds anything."""
    for on_gpu in (False, True):
        with cached("full") as engine:
            cache = engine.prefix
            cache.values = PrefixValues(
                cache.store, cache.memory, cache.values.sizes, on_gpu=on_gpu
            )
            cache.store.put = lambda name, value: False
            run = Run(engine)
            for id in "ab":
                run.submit(id, prompt_of(1, 2, tail=1), 0)
                run.run()
            cache.flush()
            assert (cache.counters.refused, len(cache.index)) == (4, 0)
            assert run.first_outputs["b"][0] == 0


def test_a_store_that_raises_ends_its_batch():
    """A put that runs out of memory comes out of `commit`, once; the batch is over all the same,
    and the request goes on to its end with the right outputs."""
    with cached("full") as engine:
        cache, run = engine.prefix, Run(engine)
        put, raised = cache.store.put, []

        def fail_once(*given):
            if not raised:
                raised.append(True)
                raise MemoryError("no room")
            return put(*given)

        cache.store.put = fail_once
        run.submit("a", prompt_of(1, 2, 3, 4, 5, tail=2), 6)
        with pytest.raises(MemoryError, match="no room"):
            run.run()
        run.run()
        assert engine.scheduler.state("a") == "finished"
        check_alone(run)


def test_what_snapshots_depend_on_is_said_while_nothing_runs():
    """`depend_on` in the middle of a request is refused and changes nothing; words are text."""
    with cached("full") as engine:
        run = Run(engine)
        engine.prefix.depend_on("April")
        root = engine.prefix.planner.root
        run.submit("a", prompt_of(1, 2, tail=1), 2)
        with pytest.raises(BatchError, match="depend_on: requests are running"):
            engine.prefix.depend_on("May")
        with pytest.raises(BatchError, match="set_aside: requests are running"):
            engine.prefix.set_aside()
        run.run()
        for word in (5, None, ["a"], b"a"):
            with pytest.raises(rs.errors.ArgumentError, match="but give text"):
                engine.prefix.depend_on("May", word)
        assert engine.prefix.planner.root == root
        engine.prefix.depend_on("May")
        assert engine.prefix.planner.root != root
        engine.prefix.depend_on("June", "\ud800")  # text that is no UTF-8
        assert engine.prefix.words == ("June", "\ud800")


def test_close_lets_go_though_the_store_fails(monkeypatch):
    """The fault comes out once; the engine is closed, has let go, and closes again."""
    with cached("full") as engine:

        def fail():
            raise MemoryError("no room")

        monkeypatch.setattr(engine.prefix.values, "close", fail)
        with pytest.raises(MemoryError, match="no room"):
            engine.close()
        assert engine.tools is None
        with pytest.raises(BatchError, match="closed"):
            engine.next_batch()
