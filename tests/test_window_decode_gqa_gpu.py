"""Grouped-query decode on a GPU, over rings and pages: against the float64 definition, and bits
that depend on the row alone."""

import numpy as np
import pytest
from gqa_cases import LAYER, GqaCase, PagedCase
from helpers import guarded_outputs, operations, to_backend

from ringslab.rawkernels.cuda import window_decode_gqa as launcher
from ringslab.rawkernels.cuda.gqa_shapes import Cut, run_align
from ringslab.rawkernels.ring_access import ring_access

pytestmark = pytest.mark.gpu
SHAPES = [  # record type, head_dim, KV heads, query heads
    ("bf16", 64, 8, 64),
    ("mxfp8", 64, 8, 64),
    ("bf16", 128, 8, 32),
    ("mxfp8", 128, 8, 32),
    ("fp16", 96, 4, 20),
    ("mxfp8", 96, 2, 2),  # runs at multiples of 4 bytes
    ("mxfp8", 32, 1, 5),  # records of 66 bytes
    ("bf16", 256, 2, 4),
    ("mxfp8", 256, 4, 32),
]


def queries(case):
    return case.q.view(np.float16) if case.fmt.type == "fp16" else case.q


def decode(case, *, cut=None, **options):
    """out bits and lse of a case, by the operation or by its launcher with a cut."""
    q = queries(case)
    out, lse = guarded_outputs(q, "cuda")
    arrays = [to_backend(x, "cuda") for x in (q, case.slab)]
    plan, sink = to_backend(case.plan, "cuda"), to_backend(case.sink, "cuda")
    if cut is None:
        run = operations("cuda").window_decode
        run(*arrays, case.layout, LAYER, plan, out.array, lse.array, sink=sink, **options)
    else:
        access = ring_access("test", case.layout, LAYER)
        slots = case.slab.size // case.layout.slot_bytes  # exact: whole slots
        tail = (plan, out.array, lse.array, access, slots)
        launcher.launch(*arrays, *tail, sink=sink, cut=cut, **options)
    return out.host().view(np.uint16), lse.host()


def paged(case, **options):
    q = queries(case)
    out, lse = guarded_outputs(q, "cuda")
    arrays = (case.tables, case.seq_ids, case.positions)
    operations("cuda").paged_decode(
        to_backend(q, "cuda"),
        to_backend(case.pool, "cuda"),
        case.layout,
        LAYER,
        *(to_backend(x, "cuda") for x in arrays),
        out.array,
        lse.array,
        sink=to_backend(case.sink, "cuda"),
        **options,
    )
    return out.host().view(np.uint16), lse.host()


@pytest.mark.parametrize("window", [1, 2, 63, 64, 127, 128, 1000, 4096])
@pytest.mark.parametrize(("record_type", "head_dim", "kv_heads", "heads"), SHAPES)
def test_windows(record_type, head_dim, kv_heads, heads, window):
    """Sequences shorter than the window, as long, wrapped; steps of 1, 2 and 5 tokens; padding."""
    seqs = [(0, 1), (window // 2, 2), (window, 1), (3 * window + 7, 5)]
    case = GqaCase(
        seqs, record_type=record_type, head_dim=head_dim, kv_heads=kv_heads, heads=heads,
        window=window, padding=3,
    )  # fmt: skip
    options = {"softmax_scale": head_dim**-0.5}
    case.check(*decode(case, **options), **options)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_tokens_of_a_step(tokens):
    """1 to 8 query tokens, several groups of rows, without sinks and with a softcap."""
    seqs = [(p, tokens) for p in (0, 50, 127, 500, 1201)]
    case = GqaCase(seqs, window=100, sink=False)
    options = {"softmax_scale": 0.5, "softcap": 5.0}
    case.check(*decode(case, **options), **options)


@pytest.mark.parametrize(("record_type", "head_dim", "kv_heads", "heads"), SHAPES)
def test_bits(record_type, head_dim, kv_heads, heads):
    """The bits of a row are the same alone, in a batch of 60 sequences, at a repeat, with whole or
    split parts, one KV head a block or all, one, two or four fetching warps."""
    rng = np.random.default_rng(5)
    seqs = list(zip(rng.integers(0, 3000, 60), rng.integers(1, 4, 60), strict=True))
    case = GqaCase(
        seqs, record_type=record_type, head_dim=head_dim, kv_heads=kv_heads, heads=heads,
        window=300,
    )  # fmt: skip
    options = {"softmax_scale": head_dim**-0.5}
    first = decode(case, **options)
    assert all(np.array_equal(a, b) for a, b in zip(first, decode(case, **options), strict=True))
    for i in (0, 31, 59):
        start = int(case.plan.cu_seqlens_q[i])
        alone = decode(case.only(i), **options)
        rows = slice(start, start + case.seqs[i][1])
        assert all(np.array_equal(a[rows], b) for a, b in zip(first, alone, strict=True))
    bulk = kv_heads <= 8 and run_align(case.fmt) == 16
    cuts = [Cut(1, 1, 3, False), Cut(1, 1, 4, False, splits=3, fetchers=4)]
    if head_dim < 256:
        cuts.append(Cut(kv_heads, 1, 2, bulk, splits=2, fetchers=2))
    for cut in cuts:
        other = decode(case, cut=cut, **options)
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)), cut


def test_pinned():
    """Rings that pin 21 positions, host plans."""
    seqs = [(0, 2), (20, 2), (22, 1), (60, 2), (500, 2)]
    case = GqaCase(seqs, kv_heads=2, heads=8, window=38, sink_tokens=21, padding=1)
    options = {"softmax_scale": 0.125}
    case.check(*decode(case, **options), **options)


def test_broken_plans():
    """Offsets outside the slab and negative lengths see nothing and read nothing."""
    case = GqaCase([(5, 1), (5, 1), (5, 1), (5, 1)], window=8, sink=False)
    rows = len(case.slab) // case.layout.slot_bytes * case.ring_len  # exact: whole slots
    case.plan.offset_len[:, 0] = [-1, rows, 2**31 - 1, 3]
    case.plan.offset_len[3, 1] = -5
    out, lse = decode(case, softmax_scale=1.0)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize(("record_type", "head_dim", "kv_heads", "heads"), SHAPES)
def test_pages(record_type, head_dim, kv_heads, heads, block_size):
    """Sequences of 1 to 1,003 tokens in shuffled blocks, steps of 1 to 3 tokens, padding; the same
    bits with longer tables of the same parts, and for a sequence alone."""
    seqs = [(0, 1), (15, 3), (31, 2), (255, 1), (1000, 3)]
    case = PagedCase(
        seqs, record_type=record_type, head_dim=head_dim, kv_heads=kv_heads, heads=heads,
        block_size=block_size, padding=2,
    )  # fmt: skip
    options = {"softmax_scale": head_dim**-0.5}
    out, lse = paged(case, **options)
    case.check(out, lse, **options)
    longer = np.pad(case.tables, ((0, 0), (0, 64)), constant_values=-1)
    again = paged(_with(case, tables=longer), **options)
    assert np.array_equal(out, again[0])
    last = slice(7, 10)
    alone = {name: getattr(case, name)[last].copy() for name in ("q", "seq_ids", "positions")}
    alone_out, alone_lse = paged(_with(case, **alone), **options)
    assert np.array_equal(alone_out, out[last])
    assert np.array_equal(alone_lse, lse[last])


def _with(case, **changes):
    other = object.__new__(type(case))
    other.__dict__.update({**vars(case), **changes})
    return other


def test_long_pages_are_split():
    """One sequence of 20,000 tokens, parts of 1,024 keys dealt to many blocks: within the bound."""
    case = PagedCase([(20_000, 1)], head_dim=64, kv_heads=1, heads=8, max_blocks=8192)
    options = {"softmax_scale": 0.125}
    case.check(*paged(case, **options), **options)
