"""Arguments of another type: whatever stands in the place of one argument of a public call that is
right otherwise, the call works or raises a RingslabError. Nothing else comes out."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from engine_runs import tiny
from helpers import make_layout

import ringslab as rs
from ringslab.errors import ArgumentError, LayoutError, PlanError, RequestError, RingslabError
from ringslab.rawkernels.digest_outputs import digest_outputs
from ringslab.rawkernels.stack_activations import stack_activations

CFG = tiny()
LAYER, LAYOUT, H, D = CFG.layers[0], CFG.slot_layout, CFG.num_q_heads, CFG.head_dim
BF16 = ml_dtypes.bfloat16


class Refuses:
    """An object whose protocols raise."""

    def __array__(self, *arguments, **options):
        raise RuntimeError("no array")

    def __index__(self):
        raise RuntimeError("no index")


class RefusesDlpack:
    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, *arguments, **options):
        raise RuntimeError("no capsule")


# One of each kind that went wrong somewhere: an array has no truth value and may or may not compare
# with text, a list has no hash, a NumPy integer is no int, -1 is no uint64.
WRONG = [
    *(None, True, "x", "", b"x", 1.5, -1, 2**70, -(2**70), float("nan"), 1j),
    *([], [1.5], ["a"], [[1], [2, 3]], [2**70], {}, {1}, (1, 2, 3), range(3)),
    *(np.zeros((2, 2)), np.array(["a"]), np.array([object()]), np.array(1, np.int32)),
    *(np.float32(1), np.int64(2), np.bool_(True), np.zeros((0, 3), np.int32)),
    *(np.zeros(2, "i4,f4"), np.datetime64("2020"), np.array([1, 2], ">i4"), np.full(3, 2**40)),
    *(np.ma.masked_array([1, 2], [0, 1]), np.zeros(3, ml_dtypes.float8_e4m3fn)),
    *(Refuses(), RefusesDlpack(), object(), rs, slice(None), memoryview(b"abcd")),
]


def i32(*numbers):
    return np.array(numbers, np.int32)


def zeros(*shape, dtype=BF16):
    return np.zeros(shape, dtype)


DECODE = rs.plan_decode(i32(0, 0), i32(0, 1), window=8, ring_len=11)
PREFILL = rs.plan_prefill(i32(0), i32(2), i32(2), window=8, ring_len=11)
SLAB = rs.empty_slab(LAYOUT, 2)
RING = {"slab": SLAB, "layout": LAYOUT, "layer": 0, "kind": "swa"}
TOKENS = {"state_ids": i32(0, 0), "positions": i32(0, 1)}
SIZES = {"window": 8, "ring_len": 11, "swa_valid_start": 0, "max_seqlen_q": 2}
HASH = {"seed": 1, "layer": 0, "token_ids": i32(0, 1), "positions": i32(0, 1)}
ATTENTION = {
    "softmax_scale": 0.1,
    "sink": zeros(H, dtype=np.float32),
    "out": zeros(2, H, D),
    "lse": zeros(2, H, dtype=np.float32),
}
# Two KV heads of 32, K and V apart: a ring of 9 and a paged pool of three blocks of 4 tokens.
GQA = rs.make_record_format("bf16", 32, latent=False, num_kv_heads=2)
GQA_LAYOUT = make_layout(GQA, 9)
PAGES = rs.build_paged_layout([(0, GQA)], 4, 32)
PAGED = {"pool": zeros(3 * PAGES.block_bytes, dtype=np.uint8), "layout": PAGES, "layer": 0,
    "block_tables": np.array([[2, 0]], np.int32)}  # fmt: skip
PAIR = (zeros(2, 2, 32), zeros(2, 2, 32))
OUTS = {"out": zeros(2, 4, 32), "lse": zeros(2, 4, dtype=np.float32)}
# Public calls, each with arguments that are right.
CALLS = [
    (rs.load_config, {"path": "quickstart.yaml", "overrides": ("run.seed=3",)}),
    (rs.make_record_format, {"record_type": "mxfp8", "head_dim": 64, "id": "a",
        "plane_order": "planar", "latent": True, "num_kv_heads": 1, "scale_rounding": "ceil",
        "amax_floor": 1e-4}),
    (rs.empty_slab, {"layout": LAYOUT, "num_state_slots": 2, "backend": "cpu", "device": 0}),
    (rs.required_ring_len, {"window": 8, "tokens_per_step": 3, "sink_tokens": 0}),
    (rs.quantize_mxfp8, {"x": zeros(2, 32), "scale_rounding": "ceil", "amax_floor": 1e-4}),
    (rs.dequantize_mxfp8, {"values": zeros(2, 32, dtype=np.uint8),
        "scales": zeros(2, 1, dtype=np.uint8)}),
    (rs.Rope, {"theta": 1e4, "dims": 32, "pairing": "half", "yarn": None}),
    (rs.Yarn, {"factor": 16.0, "original_length": 256, "beta_fast": 32.0, "beta_slow": 1.0}),
    (rs.apply_rope, {"x": zeros(2, H, D), "positions": i32(0, 1), "rope": LAYER.rope,
        "inverse": False, "out": zeros(2, H, D)}),
    (rs.plan_decode, {**TOKENS, **SIZES, "cu_seqlens_q": i32(0, 2), "block": False}),
    (rs.plan_prefill, {"state_ids": i32(0), "seqlens_q": i32(2), "seqlens_k": i32(2), **SIZES,
        "num_tokens": 2}),
    (rs.encode_records, {"kv": zeros(2, D), "record_format": LAYER.record_format,
        "positions": i32(0, 1), "rope": LAYER.rope, "out": zeros(2, 132, dtype=np.uint8)}),
    (rs.store_records, {**RING, **TOKENS, "records": zeros(2, 132, dtype=np.uint8)}),
    (rs.ring_store, {**RING, **TOKENS, "kv": zeros(2, D), "rope": LAYER.rope}),
    (rs.load_history, {**RING, "plan": PREFILL, "out": zeros(8, 132, dtype=np.uint8)}),
    (rs.window_prefill, {"q": zeros(2, H, D), "records": zeros(10, 132, dtype=np.uint8),
        "plan": PREFILL, "record_format": LAYER.record_format,
        "rope_out": LAYER.rope, **ATTENTION}),
    (rs.window_decode, {**RING, "q": zeros(2, H, D), "plan": DECODE, "rope_out": LAYER.rope,
        **ATTENTION}),
    (rs.seeded_activations, {**HASH, "width": 32, "out": zeros(2, 32)}),
    (stack_activations, {**HASH, "previous": zeros(2, H, D), "q": zeros(2, H, D),
        "kv": zeros(2, D)}),
    (digest_outputs, {"out": zeros(2, H, D), "layer": 0, "digests": zeros(2, dtype=np.uint64)}),
    (rs.window_attention, {"q": zeros(2, H, D), "k": zeros(3, 1, D), "v": zeros(3, 1, D),
        "cu_seqlens_q": i32(0, 2), "cu_seqlens_k": i32(0, 3), **ATTENTION, "window": 2}),
    (rs.build_paged_layout, {"layers": [(0, GQA)], "block_size": 4, "align_bytes": 32}),
    (rs.paged_store, {**PAGED, "kv": PAIR, "seq_ids": i32(0, 0), "positions": i32(0, 1),
        "rope": rs.Rope(1e4, 32, "half")}),
    (rs.paged_load, {**PAGED, "cu_seqlens_k": i32(0, 2), "k": PAIR[0], "v": PAIR[1]}),
    (rs.paged_decode, {**PAGED, "q": zeros(2, 4, 32), "seq_ids": i32(0, 0), "softmax_scale": 0.1,
        "positions": i32(0, 1), "sink": zeros(4, dtype=np.float32), **OUTS}),
    (rs.ring_load, {"slab": rs.empty_slab(GQA_LAYOUT, 1), "layout": GQA_LAYOUT, "layer": 0,
        "plan": rs.plan_prefill(i32(0), i32(2), i32(2), window=4, ring_len=9),
        "records": zeros(2, GQA.record_bytes, dtype=np.uint8), "cu_seqlens_k": i32(0, 0),
        "k": zeros(9, 2, 32), "v": zeros(9, 2, 32)}),
    (PAGES.view, {"pool": PAGED["pool"], "layer": 0}),
    (PAGES.layer, {"layer": 0}),
    (rs.count_tiles, {"seqlen_q": 5, "seqlen_k": 9, "window": 4, "block_m": 2, "block_n": 2,
        "sink_tokens": 0}),
    (rs.kv_bytes, {"cfg": CFG, "context": 100}),
    (rs.open_store, {"url": "memory:", "layout": LAYOUT, "budget_bytes": 100}),
    (LAYOUT.view, {"slab": SLAB, "layer": 0, "kind": "swa"}),
    (LAYOUT.planes, {"slab": SLAB, "layer": 0, "kind": "swa"}),
    (LAYOUT.ring, {"layer": 0, "kind": "swa"}),
    (CFG.record_format, {"id": "swa_mxfp8"}),
]  # fmt: skip


def escapes(call, right):
    """What came out of `call` but a result or a RingslabError, one line a wrong value."""
    call(**right)
    found = []
    for name in right:
        for wrong in WRONG:
            try:
                call(**{**right, name: wrong})
            except Exception as error:
                if not isinstance(error, RingslabError) or not str(error):
                    found.append(f"{name}={wrong!r:.40}: {error!r:.80}")
    return found


@pytest.mark.parametrize(("call", "right"), CALLS, ids=lambda x: getattr(x, "__name__", ""))
def test_public_functions(call, right):
    """Every wrong value in the place of each argument, those with a default too (but the stream,
    which the host does not look at)."""
    parameters = inspect.signature(call).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    defaults.pop("stream", None)
    assert escapes(call, {**defaults, **right}) == []


def engine_call(name, **options):
    """A call of an engine's method while its first prefill batch is open."""
    with rs.Engine(CFG, "reference", 2) as engine:
        engine.submit(rs.Request("a", i32(1, 2, 3), 5))
        batch = engine.next_batch()
        if name == "submit":
            options = {"request": rs.Request(**options)}
        elif name in ("attend", "commit", "padded", "replayed"):
            options = {"batch": batch, **options}
        getattr(engine, name)(**options)


ENGINE_CALLS = {
    "submit": {"id": "b", "prompt": i32(1), "max_new_tokens": 2, "arrival_s": 0.0},
    "abort": {"id": "a"},
    "preempt": {"id": "a"},
    "tokens": {"id": "a"},
    "set_sink": {"layer": 0, "sink": zeros(H, dtype=np.float32)},
    "attend": {"layer": 0, "q": zeros(3, H, D), "kv": zeros(3, D), "out": zeros(3, H, D),
        "lse": zeros(3, H, dtype=np.float32)},
    "commit": {"accepted": i32(0), "next_tokens": i32(5), "drafts": np.full((1, 2), -1, np.int32),
        "finished": zeros(1, dtype=bool)},
    "replayed": {"layers": [0]},
}  # fmt: skip


@pytest.mark.parametrize("name", ENGINE_CALLS)
def test_methods_of_an_engine(name):
    """The same for requests, activations, results and ids that an engine is given."""
    assert escapes(lambda **options: engine_call(name, **options), ENGINE_CALLS[name]) == []


def test_a_batch_that_is_none():
    """None is no open batch, also while nothing lies in the fixed buffers."""
    for name in ("attend", "commit", "padded", "replayed"):
        options = ENGINE_CALLS.get(name, {})
        for wrong in (None, 7, "batch"):
            with pytest.raises(rs.errors.BatchError, match=f"{name}: batch None is not the open"):
                engine_call(name, **options, batch=wrong)


def test_options_of_an_engine_and_a_run(tmp_path):
    """Engine(...) and run(...): flags, functions, paths and traces of another kind."""
    right = {"cfg": CFG, "backend": "reference", "num_state_slots": 2, "device": 0}
    assert escapes(lambda **options: rs.Engine(**options).close(), right) == []
    with rs.Engine(CFG, "reference", 2, check_finite=False) as engine:
        trace = [rs.Request("b", i32(1), 1)]
        for name in ("verify", "graphs", "progress", "on_step", "report_path", "timeline_path"):
            for wrong in (7, [1], np.ones(2), b"x"):
                with pytest.raises(ArgumentError, match=f"run: {name}="):
                    engine.run(trace, **{name: wrong})
        with pytest.raises(rs.errors.TraceError, match="trace is int; pass a path, or a list of"):
            engine.run(7)
        report = engine.run(trace, report_path=tmp_path / "r.json", verify=np.bool_(False))
    assert report["output_tokens"] == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rs.empty_slab(CFG, 2), ArgumentError, "layout is Config, .* pass cfg.slot_layout"),
        (lambda: rs.load_config(None), ArgumentError, "path is NoneType .* quickstart.yaml"),
        (lambda: rs.load_config("quickstart", [3]), ArgumentError, r"overrides=\[3\]"),
        (lambda: rs.seeded_activations(1, -1, [0], [0], 4), ArgumentError, "layer=-1"),
        (lambda: rs.seeded_activations("1", 0, [0], [0], 4), ArgumentError, "seed='1'"),
        (lambda: rs.seeded_activations(1, 0, [0], [0], -4), ArgumentError, "width=-4"),
        (lambda: rs.make_record_format("mxfp8", "512"), LayoutError, "head_dim='512'"),
        (lambda: rs.make_record_format("mxfp8", 2**70), LayoutError, "at most 1048576"),
        (lambda: rs.make_record_format("mxfp8", 64, latent=1), LayoutError, "latent=1"),
        (lambda: LAYOUT.ring(True), LayoutError, "layer=True"),
        (lambda: LAYOUT.ring(0, ["swa"]), LayoutError, "one of swa, compression"),
        (lambda: rs.plan_decode([0], [0], window=8, ring_len=8, block=1), PlanError, "block=1"),
        (
            lambda: rs.plan_decode([0, 0], np.ma.array([1, 2], mask=[0, 1]), window=1, ring_len=2),
            ArgumentError,
            "positions: a masked array would lose its mask",
        ),
        (lambda: rs.apply_rope(zeros(1, D), [0], LAYER.rope, 1), ArgumentError, "inverse=1"),
        (lambda: engine_call("abort", id=["a"]), RequestError, r"no request \['a'\]"),
    ],
)
def test_messages_name_the_argument(call, error, message):
    """The argument, what came, and what is wanted."""
    with pytest.raises(error, match=message):
        call()


def test_seeds_of_numpy():
    """A NumPy integer is a seed like any other, -1 is 2^64 - 1."""
    wanted = rs.seeded_activations(2**64 - 1, 0, [5], [6], 8)
    for seed in (-1, np.int64(-1), np.uint64(2**64 - 1), 2**64 - 1 + 2**80):
        np.testing.assert_array_equal(rs.seeded_activations(seed, 0, [5], [6], 8), wanted)
