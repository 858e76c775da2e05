"""The Hopper kernels of window_decode on a GPU: every specialisation against the float64 reference,
and bits that depend on the token alone."""

import numpy as np
import pytest
from helpers import (
    check_decode,
    i32,
    make_layout,
    poisoned_slab,
    random_bf16,
    record_format,
    run_decode,
    store,
    to_backend,
)

from ringslab.layouts.rope import Rope
from ringslab.rawkernels.cuda import window_decode_sm90 as launcher
from ringslab.rawkernels.cuda.window_decode_sm90 import Work
from ringslab.rawkernels.ring_access import ring_access
from ringslab.schedules.plan_decode import build_decode_plan

pytestmark = pytest.mark.gpu
DIM, LAYER = 512, 1
SCALE = DIM**-0.5
RAGGED = [(0, 1), (5, 3), (126, 8), (127, 2), (1000, 6), (133, 7), (5000, 4), (60, 5)]


class Case:
    """Sequences (first position, tokens) in shuffled state slots. Rings hold the records that are
    visible; all other bytes of the slab are 0xFF, which is NaN."""

    def __init__(
        self, seqs, *, heads=64, window=128, ring_len=134, planar=False, mode="causal", seed=0
    ):
        rng = np.random.default_rng(seed)
        fmt = record_format(DIM, plane_order="planar" if planar else "interleaved")
        self.layout = make_layout(fmt, ring_len)
        self.slab = poisoned_slab(self.layout, len(seqs) + 2)
        states = rng.permutation(len(seqs) + 2)[: len(seqs)]
        for (first, tokens), state in zip(seqs, states, strict=True):
            oldest = max(0, first - window + (mode == "causal"))
            positions = range(oldest, first + tokens)
            keys = random_bf16(rng, (len(positions), DIM))
            store(self.slab, self.layout, LAYER, keys, state, positions)
        lengths = [tokens for _, tokens in seqs]
        self.plan = build_decode_plan(
            i32(np.repeat(states, lengths)),
            i32(np.concatenate([np.arange(p, p + n) for p, n in seqs])),
            cu_seqlens_q=i32(np.cumsum([0, *lengths])),
            window=window,
            ring_len=ring_len,
            mode=mode,
        )
        self.q = random_bf16(rng, (sum(lengths), heads, DIM))
        self.sink = rng.standard_normal(heads).astype(np.float32)

    def check(self, **options):
        options = {"softmax_scale": SCALE, "sink": self.sink, **options}
        check_decode("cuda", self.q, self.slab, self.layout, LAYER, self.plan, **options)

    def bits(self, work=None, **options):
        """Output bits by the launcher itself, cut as `work` says."""
        out = to_backend(np.full(self.q.shape, 0x7FC1, np.uint16), "cuda")
        lse = to_backend(np.full(self.q.shape[:2], np.nan, np.float32), "cuda")
        access = ring_access("test", self.layout, LAYER)
        slots = self.slab.size // self.layout.slot_bytes  # exact: whole slots
        arrays = [to_backend(x, "cuda") for x in (self.q, self.slab, self.plan)]
        options = {"softmax_scale": SCALE, "sink": to_backend(self.sink, "cuda"), **options}
        launcher.launch(*arrays, out, lse, access, slots, work=work, **options)
        return out.get(), lse.get()


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_tokens_of_a_step(tokens, heads):
    """1 to 8 query tokens, rings of window + tokens - 1 and more, wrapped and not yet full."""
    seqs = [(p, tokens) for p in (0, 50, 127, 500, 1201)]
    Case(seqs, heads=heads, ring_len=128 + tokens).check()


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("heads", [64, 128])
def test_ragged_steps(heads, planar):
    """1 to 8 tokens in one batch, both plane orders, with and without sinks."""
    case = Case(RAGGED, heads=heads, ring_len=136, planar=planar)
    case.check()
    case.check(sink=None)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 127, 128])
def test_windows(window):
    """Short windows in a ring made for them and in a longer one."""
    seqs = [(0, 2), (window, 2), (1000, 6)]
    Case(seqs, window=window, ring_len=window + 5).check()
    Case(seqs, window=window, ring_len=134).check()


def test_wrap_at_every_ring_index():
    """134 sequences whose newest keys lie at each ring index in turn."""
    Case([(1000 + i, 2) for i in range(134)]).check()


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_inverse_rotation(pairing):
    Case(RAGGED, ring_len=136).check(rope_out=Rope(10_000.0, 64, pairing))


@pytest.mark.parametrize("mode", ["block", "draft_step"])
def test_draft_blocks(mode):
    """Tokens of a block see each other, before and after themselves."""
    Case([(1, 5), (100, 5), (2000, 5), (133, 5)], mode=mode).check()


@pytest.mark.parametrize("codes", [(0, 5), (100, 141), (134, 136), (0, 221)])
def test_scale_codes(codes):
    """Scale codes at both ends and across 134, where one bf16 factor ends; the softmax scale takes
    the largest out again."""
    case = Case([(300, 3), (1000, 6)])
    scales = case.layout.planes(case.slab, LAYER)[1]
    written = scales != 0xFF
    scales[written] = np.random.default_rng(1).integers(*codes, written.sum(), dtype=np.uint8)
    case.check(softmax_scale=SCALE * 2.0 ** (120 - codes[1]))


def test_bits_depend_on_the_token_alone():
    """Both kernels, every grouping, a reversed batch and a sequence alone give a token equal bits,
    and so does a second run."""
    rope = Rope(10_000.0, 64, "adjacent")
    case = Case(RAGGED, ring_len=136)
    out, lse = case.bits(rope_out=rope)
    longest, tiles = max(n for _, n in RAGGED), len(case.q)
    works = [Work(0, 1, tiles * n, n) for n in (1, 2, 4)]
    works += [Work(n, -(-longest // n), -(-longest // n) * len(RAGGED)) for n in range(1, 9)]
    for work in [None, *works]:
        again = case.bits(work, rope_out=rope)
        assert np.array_equal(again[0], out), work
        assert np.array_equal(again[1], lse), work

    first, last = case.plan.cu_seqlens_q[4:6]
    rows = slice(first, last)
    alone = build_decode_plan(
        case.plan.state_ids[rows],
        case.plan.positions[rows],
        cu_seqlens_q=i32([0, last - first]),
        window=128,
        ring_len=136,
        mode="causal",
    )
    options = {"softmax_scale": SCALE, "sink": case.sink, "rope_out": rope}
    found = run_decode("cuda", case.q[rows], case.slab, case.layout, LAYER, alone, **options)
    assert np.array_equal(found[0], out[rows])


def test_a_nan_stays_with_the_tokens_that_see_it():
    """One NaN record: tokens that see it are NaN, all others keep their bits."""
    case = Case([(1000, 6), (2000, 6)], window=64)
    clean = case.bits()[0]
    state = case.plan.state_ids[0]
    case.layout.view(case.slab, LAYER)[state, (1000 - 60) % 134, 0, 17] = 0x7F
    out = case.bits()[0]
    sees = np.arange(12) < 4  # positions 1000 .. 1003 see 940
    assert ((out[sees] & 0x7FFF) > 0x7F80).all()
    assert np.array_equal(out[~sees], clean[~sees])
