"""The stage of an engine: snapshots of boundaries inside a chunk hold what a chunk that ends there
leaves in its slot."""

import numpy as np
import pytest
from config_edits import edited
from engine_runs import TINY, attend_all, tiny
from prefix_story import STACKED, Run, block, cached, tiny_alone

import ringslab as rs
from ringslab.engine.snapshot_stage import plan_stage
from ringslab.schedules.prefix_orders import Stage


@pytest.mark.parametrize("contract", ["full", "exact"])
def test_staged_snapshots_are_those_of_chunks_that_end_there(backend, contract):
    """Four prompts in one batch, snapshots every 16 tokens. The ring records of every value in the
    store, byte for byte, are those of an engine whose chunks end at snapshots; and requests that
    hit them give the outputs of requests alone."""
    overrides = (
        "prefix.snapshot_blocks=2",
        "engine.token_budget=200",
        "engine.num_state_slots=4",
        "engine.max_prefill_seqs=4",
    )
    prompts = [
        np.concatenate([*(block(10 * n + k) for k in range(2 * n)), block(90 + n)[:5]])
        for n in (1, 2, 3, 3)
    ]
    found, chunks = [], []
    for staged in (True, False):
        with cached(contract, *overrides, backend=backend) as engine:
            assert engine.prefix.planner.stage == Stage(16, 11)
            if not staged:
                engine.prefix.planner.stage = None
            run = Run(engine)
            for i, prompt in enumerate(prompts):
                run.submit(f"r{i}", prompt.astype(np.int32), 3)
            batch = run.step()
            chunks.append(batch.seqlens_q.tolist())
            run.run()
            engine.prefix.flush()
            found.append(stored_records(engine))
            for i, prompt in enumerate(prompts):
                id = f"again{i}"
                run.submit(id, prompt.astype(np.int32), 2)
                run.run()
                boundary = len(prompt) - 5
                is_hit = contract == "full" or boundary > 3 * 7 + 10  # the reach of `exact`
                assert run.first_outputs[id][1] == (boundary if is_hit else 0)
                wanted = tiny_alone(tuple(run.known[id].tolist()))
                if backend == "cpu":
                    for (name, layer, position), rows in run.outputs.items():
                        if name == id:
                            assert np.array_equal(rows, wanted[layer, position])
    assert chunks == [[21, 37, 53, 53], [16, 16, 16, 16]]
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) >= 6
    for key, records in found[0].items():
        for one, other in zip(records, found[1][key], strict=True):
            assert np.array_equal(one, other)


def shorter_window(tmp_path):
    """The tiny model, where layer 1 keeps 7 positions and the others 11."""
    ring = "record_bytes: 132\n      scale_plane_offset: null\n      padding_bytes: {}\n"
    ring = (
        "- layer_group: producers_compressed\n      ring_len: {}\n      stored: true\n      " + ring
    )
    layer = "layers: [1]\n    num_layers: 1\n    role: producer\n    kind: swa\n    window: "
    edits = [
        (layer + "8", layer + "4"),
        (
            ring.format(11, 20) + "      ring_bytes: 1472",
            ring.format(7, 4) + "      ring_bytes: 928",
        ),
        ("offset: 2944", "offset: 2400"),
        ("offset: 4416", "offset: 3872"),
        ("offset: 5888", "offset: 5344"),
        ("stored_bytes: 2944", "stored_bytes: 2400"),
        ("slot_bytes: 9984", "slot_bytes: 9440"),
    ]
    return edited(tmp_path, *edits, base=TINY)


def hybrid(tmp_path):
    return TINY.with_name("tiny_hybrid.yaml")


@pytest.mark.parametrize(
    ("model", "contract", "snapshot_blocks", "room"),
    [
        (shorter_window, "full", 2, Stage(16, 11)),
        (shorter_window, "exact", 2, Stage(16, 11)),
        (hybrid, "full", 1, Stage(16, 8)),  # rings as long as a block: two snapshots just fit
    ],
)
def test_rings_of_other_lengths_and_pages(tmp_path, model, contract, snapshot_blocks, room):
    """Prompts of three requests beside a decoding one, which holds row 0: the values in the store,
    records of rings and whole pages, are those of chunks that end at snapshots."""
    overrides = (
        *STACKED,
        f"prefix.contract={contract}",
        f"prefix.snapshot_blocks={snapshot_blocks}",
        "engine.token_budget=200",
    )
    cfg, found = rs.load_config(model(tmp_path), overrides), []
    for staged in (True, False):
        with rs.Engine(cfg, "cpu") as engine:
            planner = engine.prefix.planner
            assert planner.stage == room
            planner.stage = planner.stage if staged else None
            run = Run(engine)
            run.submit("first", block(70)[:3], 12)
            run.step()
            for i, count in enumerate((11, 43, 37)):
                prompt = np.concatenate([block(10 * i + k) for k in range(6)])[:count]
                run.submit(f"r{i}", prompt, 2)
            run.step()
            batch = run.step()
            assert batch.slots.tolist() == [1, 2, 3]
            assert (batch.seqlens_q.tolist() == [11, 43, 37]) == staged
            run.run()
            rings, pages = stored_records(engine), stored_pages(engine)
            found.append((rings, pages))
            assert len(rings) >= 4
            assert len(pages) == (11 if model is hybrid else 0)
    for kind in (0, 1):
        assert found[0][kind].keys() == found[1][kind].keys()
        for key, parts in found[0][kind].items():
            for one, other in zip(parts, found[1][kind][key], strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_snapshot_stores_what_it_holds(backend):
    """Under `exact` the rings of two layers: nothing else of the stage is written."""
    overrides = ("prefix.snapshot_blocks=2", "engine.token_budget=200")
    with cached("exact", *overrides, backend=backend) as engine:
        stage, layout = engine.prefix.stage, engine.cfg.slot_layout
        assert stage.layers == {0, 1}
        stage.slab[:] = 0xEE
        run = Run(engine)
        run.submit("a", np.concatenate([block(k) for k in range(5)]), 0)
        run.run()
        places = host_bytes(stage.slab).reshape(-1, layout.slot_bytes)
        assert (places[:2, : engine.prefix.num_bytes] != 0xEE).any(axis=1).all()
        assert (places[:, engine.prefix.num_bytes :] == 0xEE).all()
        assert (places[2:] == 0xEE).all()


def test_a_layer_that_is_left_out_leaves_no_snapshot():
    """A caller that attends three of four layers of a batch: nothing of it is stored, neither what
    was staged nor what lies in the slot."""
    overrides = ("prefix.contract=full", "prefix.snapshot_blocks=2", "engine.token_budget=200")
    with rs.Engine(tiny(*overrides), "cpu") as engine:
        engine.submit(rs.Request("a", np.concatenate([block(k) for k in range(6)]), 0))
        batch = engine.next_batch()
        assert [one.boundary for one in engine.prefix.planner.staged] == [16, 32]
        attend_all(engine, batch, layers=(0, 1, 3))
        engine.commit(batch, [0])
        assert engine.prefix.counters.skipped == 3
        assert engine.prefix.counters.snapshots == 0
        assert not engine.prefix.store.shelf._values


def host_bytes(x):
    return x if isinstance(x, np.ndarray) else x.get()


def stored_pages(engine):
    """By key, a block's pages, uint8 [bytes]."""
    values = engine.prefix.store.shelf._values.items()
    size = engine.prefix.values.sizes.get("pages", 0)
    return {
        key: [np.frombuffer(sealed, np.uint8)[-size:]]
        for key, sealed in values
        if b"/pages/" in key
    }


def stored_records(engine):
    """By key, the records of each ring of a snapshot, uint8 [ring_len, record_bytes]."""
    shelf, layout, found = engine.prefix.store.shelf, engine.cfg.slot_layout, {}
    for key, sealed in shelf._values.items():
        if b"/rings/" not in key:
            continue
        value = np.frombuffer(sealed, np.uint8)[-engine.prefix.num_bytes :]
        slot = np.zeros(layout.slot_bytes, np.uint8)
        slot[: len(value)] = value
        found[key] = [
            layout.view(slot, ring.layer)[0, :, 0].copy()
            for ring in layout.rings
            if ring.kind == "swa" and ring.offset < len(value)
        ]
    return found


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (("prefix.snapshot_blocks=1",), None),  # 8 tokens from one to the next, rings of 11
        (("prefix.snapshot_blocks=2",), Stage(2, 11)),  # a budget of 32
        (("prefix.snapshot_blocks=2", "engine.token_budget=9"), None),
        (("prefix.snapshot_blocks=2", "engine.token_budget=5000"), Stage(16, 11)),
    ],
)
def test_where_there_is_a_stage(overrides, wanted):
    """Not where snapshots would share tokens, nor where a chunk is shorter than a ring; its places
    are bounded."""
    with cached("full", *overrides) as engine:
        assert plan_stage(engine.cfg, engine.prefix.num_bytes) == wanted
        assert engine.prefix.planner.stage == wanted


def test_no_stage_beside_pinned_positions():
    """The first positions of a sequence are in its ring for good, and rarely in the chunk."""
    cfg = rs.load_config("deepseek_v4_1_flash.yaml", ("prefix.contract=full",))
    size = cfg.slot_layout.slot_bytes
    assert plan_stage(cfg, size) == Stage(16, 134)
    ring = cfg.slot_layout.rings[0]
    object.__setattr__(ring, "sink_tokens", 4)
    try:
        assert plan_stage(cfg, size) is None
    finally:
        object.__setattr__(ring, "sink_tokens", 0)
