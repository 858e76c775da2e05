"""The engine for a caller who brings queries and keys: right numbers, right order, right errors."""

import numpy as np
import pytest
from engine_runs import Story, activations, attend_all, same_outputs, tiny
from helpers import to_backend, to_host

import ringslab as rs
from ringslab.errors import (
    ArgumentError,
    BackendError,
    BatchError,
    ConfigError,
    DeviceMemoryError,
    RequestError,
)


def engine_of(backend, *overrides, **options):
    engine = rs.Engine(tiny(*overrides), backend, **options)
    engine.slab[...] = 0xFF  # every byte a NaN: what shows through is seen
    return engine


def tell(backend, requests, *overrides, drafts=0, right=0, after_step=None):
    """Outputs of requests {id: (prompt length, new tokens)} run by one engine."""
    story = Story()
    with engine_of(backend, *overrides) as engine:
        for request_id, (length, new) in requests.items():
            engine.submit(rs.Request(request_id, story.prompt(request_id, length), new))

        def hook(batch):
            if after_step is not None:
                after_step(engine, batch)

        story.run(engine, drafts=drafts, right=right, after_step=hook)
        assert engine.done
        assert engine.scheduler.free_slots == engine.sizes.num_state_slots
        for request_id, (length, new) in requests.items():
            wanted = story.prompt(request_id, length + new)
            assert np.array_equal(engine.tokens(request_id), wanted)
    return story.outputs


def test_outputs_are_those_of_one_long_prefill(backend):
    """A prompt of 5 and 20 generated tokens, window 8, ring 11: every output has the bits that a
    prefill of the same 24 tokens in one batch gives."""
    wanted = tell(backend, {"a": (24, 0)})
    found = tell(backend, {"a": (5, 20)})
    same_outputs(found, wanted)


@pytest.mark.parametrize("start", [6, 7, 8, 9, 10, 11, 12])
def test_rejected_drafts_leave_no_trace(backend, start):
    """Five steps in a row whose two drafts are all rejected, around the wrap of an 11-row ring:
    the outputs are those of a run that never drafted."""
    wanted = tell(backend, {"a": (start, 6)})
    found = tell(backend, {"a": (start, 6)}, drafts=2, right=0)
    same_outputs(found, wanted)


def test_accepted_drafts_change_nothing(backend):
    """One of two drafts right, then both: fewer steps, the same outputs (the last token may be
    computed as a draft, so its outputs are left aside)."""
    wanted = tell(backend, {"a": (9, 15)})
    for right in (1, 2):
        found = tell(backend, {"a": (9, 15)}, drafts=2, right=right)
        found = {key: rows for key, rows in found.items() if key[2] < 23}
        same_outputs(found, wanted)


def test_the_rest_of_the_batch_does_not_matter(backend):
    """Alone, or with three others of other lengths: the bits of "a" are the same."""
    wanted = tell(backend, {"a": (13, 7)})
    crowd = {"x": (3, 9), "a": (13, 7), "y": (30, 2), "z": (1, 12)}
    found = tell(backend, crowd)
    same_outputs({key: rows for key, rows in found.items() if key[0] == "a"}, wanted)


@pytest.mark.parametrize("chunk", [1, 7, 8, 11, 12, 32])
def test_chunks_do_not_matter(backend, chunk):
    """Prompts of 40 in chunks of 1, W - 1, W, ring_len, ring_len + 1 and 32."""
    wanted = tell(backend, {"a": (40, 0)}, "engine.token_budget=64")
    found = tell(backend, {"a": (40, 0)}, f"engine.token_budget={chunk}")
    same_outputs(found, wanted)


def test_preemption_recomputes_the_same(backend):
    """Preempted in mid prefill and twice in decode: tokens and bits as without."""
    seen = []

    def preempt(engine, batch):
        seen.append(batch.kind)
        if len(seen) in (1, 5, 9):
            engine.preempt("a")
            assert engine.scheduler.state("a") == "waiting"

    wanted = tell(backend, {"a": (40, 10)})
    found = tell(backend, {"a": (40, 10)}, after_step=preempt)
    assert seen.count("prefill") > 2
    same_outputs(found, wanted)


def test_a_reused_slot_shows_nothing_of_its_last_owner(backend):
    """One slot, poisoned; a sequence of 30 tokens, aborted in decode, then one of 3: the second
    has the bits of a fresh engine, and its compression state starts at value 0, score -inf."""
    wanted = tell(backend, {"b": (3, 6)})
    story = Story()
    with engine_of(backend, num_state_slots=1) as engine:
        engine.submit(rs.Request("a", story.prompt("a", 30), 50))
        for _ in range(4):
            story.step(engine, engine.next_batch(), drafts=2)
        engine.abort("a")
        engine.abort("a")
        assert engine.done
        story.outputs.clear()
        engine.submit(rs.Request("b", story.prompt("b", 3), 6))
        batch = engine.next_batch()
        state = to_host(engine.slab)[5888:].view(np.float32).reshape(4, 2, 128)
        assert (state[:, 0] == 0).all()
        assert (state[:, 1] == -np.inf).all()
        story.step(engine, batch)
        story.run(engine)
    same_outputs(story.outputs, wanted)


def test_slab_bytes_are_those_of_the_reference(fast_backend):
    """The same requests with drafts and chunks on both backends: every slab byte is equal."""
    slabs = {}
    for name in ("reference", fast_backend):
        story = Story()
        with engine_of(name) as engine:
            for request_id, length in (("a", 40), ("b", 3), ("c", 11)):
                engine.submit(rs.Request(request_id, story.prompt(request_id, length), 9))
            story.run(engine, drafts=2, right=1)
            slabs[name] = to_host(engine.slab).copy()
    assert np.array_equal(slabs["reference"], slabs[fast_backend])


def test_a_nan_stays_in_its_sequence_and_leaves_with_the_window(backend):
    """kv of "a" is NaN at position 5: "b" in the same batches keeps its bits, "a" is NaN where it
    sees position 5 (5..12, window 8) and has its own bits again from 13 on."""

    def outputs(poisoned):
        found = {}
        story = Story()
        with engine_of(backend) as engine:
            for request_id in ("a", "b"):
                engine.submit(rs.Request(request_id, story.prompt(request_id, 12), 8))
            while (batch := engine.next_batch()) is not None:
                owner = np.repeat(np.arange(batch.num_seqs), batch.seqlens_q)
                for layer in range(4):
                    q, kv = activations(engine.cfg, layer, batch.token_ids, batch.positions)
                    for token, position in enumerate(batch.positions.tolist()):
                        id = batch.request_ids[owner[token]]
                        if poisoned and id == "a" and position == 5:
                            kv[token] = 0x7FC0
                    out = to_host(engine.attend(layer, batch, q, kv)).view(np.uint16)
                    for token, position in enumerate(batch.positions.tolist()):
                        id = batch.request_ids[owner[token]]
                        found[id, layer, position] = out[token].copy()
                after = [
                    story.token(id, int(end))
                    for id, end in zip(batch.request_ids, batch.seqlens_k, strict=True)
                ]
                engine.commit(batch, np.zeros(batch.num_seqs, np.int32), after)
        return found

    clean, mixed = outputs(False), outputs(True)
    assert clean.keys() == mixed.keys()
    for (id, layer, position), rows in mixed.items():
        if id == "a" and 5 <= position <= 12:
            assert ((rows & 0x7FFF) > 0x7F80).all(), (layer, position)
        else:
            assert np.array_equal(rows, clean[id, layer, position]), (id, layer, position)


def test_own_outputs_and_lse_are_filled(backend):
    """`out` and `lse` of the caller are filled and returned; without them the bits are the same."""
    cfg = tiny()
    story = Story()
    with engine_of(backend) as engine:
        engine.submit(rs.Request("a", story.prompt("a", 6), 1))
        batch = engine.next_batch()
        q, kv = (
            to_backend(x, backend) for x in activations(cfg, 0, batch.token_ids, batch.positions)
        )
        out = to_backend(np.full(q.shape, 0xFFFF, np.uint16), backend)
        lse = to_backend(np.full(q.shape[:2], np.nan, np.float32), backend)
        assert engine.attend(0, batch, q, kv, out=out, lse=lse) is out
        assert np.isfinite(to_host(lse)).all()
        first = to_host(out).copy()
    with engine_of(backend) as engine:
        engine.submit(rs.Request("a", story.prompt("a", 6), 1))
        assert np.array_equal(attend_all(engine, engine.next_batch(), [0])[0], first)


def test_a_callers_sink_takes_the_place_of_the_seeded_one(backend):
    """A sink of +100 takes all the weight, so outputs are 0; layer and shape are checked."""
    story = Story()
    with engine_of(backend, "layer_groups.consumers.sink=false") as engine:
        engine.set_sink(0, np.full(4, 100, np.float32))
        engine.submit(rs.Request("a", story.prompt("a", 6), 1))
        out = attend_all(engine, engine.next_batch(), [0])
        assert not (out & 0x7FFF).any()
        with pytest.raises(ArgumentError, match="sink: false"):
            engine.set_sink(2, np.zeros(4, np.float32))
        with pytest.raises(ArgumentError, match=r"float32 \(4,\)"):
            engine.set_sink(0, np.zeros(5, np.float32))


def test_calls_out_of_order_are_refused():
    """attend before next_batch, next_batch before commit, a layer twice, a batch after its commit,
    another engine's batch, a closed engine: BatchError each, and the engine goes on."""
    story = Story()
    with rs.Engine(tiny(), "reference") as engine, rs.Engine(tiny(), "reference") as other:
        for e in (engine, other):
            e.submit(rs.Request("a", story.prompt("a", 6), 3))
        foreign = other.next_batch()
        with pytest.raises(BatchError, match="no batch is open"):
            engine.commit(foreign, [0])
        batch = engine.next_batch()
        q, kv = activations(engine.cfg, 0, batch.token_ids, batch.positions)
        with pytest.raises(BatchError, match="not committed"):
            engine.next_batch()
        with pytest.raises(BatchError, match="not the open one"):
            engine.attend(0, foreign, q, kv)
        engine.attend(0, batch, q, kv)
        with pytest.raises(BatchError, match="layer 0 was attended already"):
            engine.attend(0, batch, q, kv)
        with pytest.raises(ArgumentError, match="next_tokens is None"):
            engine.commit(batch, [0])
        engine.commit(batch, [0], [5])
        with pytest.raises(BatchError, match="no batch is open"):
            engine.commit(batch, [0], [5])
        with pytest.raises(BatchError, match="no batch is open"):
            engine.attend(0, batch, q, kv)
        assert engine.next_batch().kind == "decode"
    with pytest.raises(BatchError, match="closed"):
        engine.next_batch()


def test_a_layer_that_was_left_out_cannot_come_back():
    """Layer 1 missed the prefill of "a": attending it in the decode is refused, layer 0 goes on;
    for a new sequence in the same slot it is allowed again."""
    story = Story()
    with rs.Engine(tiny(), "reference", num_state_slots=1) as engine:
        engine.submit(rs.Request("a", story.prompt("a", 6), 3))
        batch = engine.next_batch()
        attend_all(engine, batch, [0, 2, 3])
        engine.commit(batch, [0], [5])
        batch = engine.next_batch()
        attend_all(engine, batch, [0])
        with pytest.raises(BatchError, match="layer 1 was left out of an earlier batch"):
            attend_all(engine, batch, [1])
        engine.commit(batch, [0], [5], finished=np.array([True]))
        engine.submit(rs.Request("b", story.prompt("b", 6), 3))
        attend_all(engine, engine.next_batch(), [1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, kv: (q[:, :, :64], kv), "not C-contiguous"),
        (lambda q, kv: (q[:-1], kv), r"q.shape=\(5, 4, 128\)"),
        (lambda q, kv: (q, kv[:, None]), r"kv.shape=\(6, 1, 128\)"),
        (lambda q, kv: (q.astype(np.float32), kv), "q.dtype=float32"),
        (lambda q, kv: (q, (kv, kv)), "kv is a pair"),
        (lambda q, kv: (q.tolist(), kv), "q.dtype=int32"),
        (lambda q, kv: (object(), kv), "object is no array"),
    ],
)
def test_wrong_activations_are_refused_and_store_nothing(change, says):
    story = Story()
    with engine_of("reference") as engine:
        engine.submit(rs.Request("a", story.prompt("a", 6), 3))
        batch = engine.next_batch()
        before = engine.slab.copy()
        q, kv = activations(engine.cfg, 0, batch.token_ids, batch.positions)
        with pytest.raises(ArgumentError, match=says):
            engine.attend(0, batch, *change(q, kv))
        for layer in (-1, 4, True, 0.0):
            with pytest.raises(ArgumentError, match="layer="):
                engine.attend(layer, batch, q, kv)
        with pytest.raises(ArgumentError, match=r"out\.shape"):
            engine.attend(0, batch, q, kv, out=q[:3].copy())
        with pytest.raises(ArgumentError, match=r"lse\.dtype=float64"):
            engine.attend(0, batch, q, kv, lse=np.zeros((6, 4)))
        with pytest.raises(ArgumentError, match=r"out\.dtype=float32"):
            engine.attend(0, batch, q, kv, out=np.zeros(q.shape, np.float32))
        assert np.array_equal(engine.slab, before)
        engine.attend(0, batch, q, kv)


def test_check_finite_names_layer_step_and_place():
    story = Story()
    with rs.Engine(tiny(), "reference", check_finite=True) as engine:
        engine.submit(rs.Request("a", story.prompt("a", 6), 3))
        batch = engine.next_batch()
        q, kv = activations(engine.cfg, 2, batch.token_ids, batch.positions)
        kv[3, 7] = 0x7FC0
        with pytest.raises(rs.errors.ActivationError, match=r"layer 2, step 0: kv\[3, 7\] is NaN"):
            engine.attend(2, batch, q, kv)


def test_requests_that_cannot_run_are_refused_at_submit():
    with rs.Engine(tiny(), "reference") as engine:
        prompt = np.zeros(500, np.int32)
        with pytest.raises(RequestError, match="512"):
            engine.submit(rs.Request("a", prompt, 13))
        with pytest.raises(RequestError, match=r"prompt\[2\]=1000 but vocab_size=1000"):
            engine.submit(rs.Request("a", np.array([1, 2, 1000]), 1))
        for wrong in ("a", None, rs.Request("a", [[1], [1, 2]], 1)):
            with pytest.raises(RequestError, match=r"needs a Request|is no array"):
                engine.submit(wrong)
        assert engine.scheduler.counters.refused == 5
        engine.submit(rs.Request("a", prompt, 12))
        with pytest.raises(RequestError):
            engine.submit(rs.Request("a", prompt, 12))


def test_a_slab_that_is_too_large_names_both_numbers():
    """10^12 slots of 9,984 B: refused with the bytes needed and the bytes free, nothing taken."""
    needed = r"needs 9,984,000,000,000,000 bytes but [\d,]+ are free"
    with pytest.raises(DeviceMemoryError, match=needed):
        rs.Engine(tiny(), "cpu", num_state_slots=10**12)
    with pytest.raises(ArgumentError, match="num_state_slots=0"):
        rs.Engine(tiny(), "cpu", num_state_slots=0)


def test_backends_are_chosen_by_name():
    with pytest.raises(ArgumentError, match="backend='gpu'"):
        rs.Engine(tiny(), "gpu")
    with pytest.raises(ArgumentError, match="device=-1"):
        rs.Engine(tiny(), "cpu", device=-1)
    with pytest.raises(ArgumentError, match="load_config"):
        rs.Engine("tiny.yaml")


def test_without_a_gpu_auto_is_the_cpu_and_cuda_says_why():
    from ringslab.engine.backends import why_not_cuda

    if why_not_cuda() is None:
        assert rs.Engine(tiny()).backend == "cuda"
        return
    assert rs.Engine(tiny()).backend == "cpu"
    with pytest.raises(BackendError, match="cannot run"):
        rs.Engine(tiny(), "cuda")


def test_softcap_is_refused_before_anything_is_taken():
    with pytest.raises(ConfigError, match="softcap"):
        rs.Engine(tiny("layer_groups.consumers.softcap=30.0"), "cpu")
