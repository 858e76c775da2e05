"""paged_decode without a GPU: the CUDA source run on the CPU by gqa_on_host.hpp."""

import numpy as np
import pytest
from gqa_cases import LAYER, PagedCase
from helpers import Guarded
from test_window_decode_gqa import callers_scratch, needs_gxx, on_host

from ringslab.rawkernels.cuda import paged_decode as launcher
from ringslab.rawkernels.cuda.gqa_shapes import Cut

pytestmark = needs_gxx


def play(monkeypatch, case, cut, *, run=1, seed=0, **options):
    """out and lse of a case by the launcher, played with this cut; guarded, poisoned outputs."""
    out = Guarded(case.q.shape, np.uint16, "cpu")
    lse = Guarded(case.q.shape[:2], np.float32, "cpu")
    kept = on_host(monkeypatch, launcher, seed)
    arrays = (case.q, case.pool, case.layout, LAYER, case.tables, case.seq_ids, case.positions)
    launcher.paged_decode(
        *arrays, out.array, lse.array, sink=case.sink, cut=cut, run=run, **options
    )
    assert not kept[1].any()  # counters are 0 again
    return out.host(), lse.host()


SEQS = [(0, 1), (15, 3), (31, 2), (100, 1), (299, 2)]


@pytest.mark.parametrize(
    ("record_type", "head_dim", "cut"),
    [("bf16", 64, Cut(2, 1, 2, True)), ("mxfp8", 96, Cut(1, 1, 3, False))],
)
def test_play(monkeypatch, record_type, head_dim, cut):
    """Sequences of 1 to 301 tokens, steps of 1 to 3, two parts, padding: within the bound; runs of
    tokens that share a block, and split parts, in partial sums of the launcher's or the caller's,
    change no bit."""
    case = PagedCase(
        SEQS, record_type=record_type, head_dim=head_dim, kv_heads=2, heads=6, padding=2
    )
    options = {"softmax_scale": head_dim**-0.5}
    first = play(monkeypatch, case, cut, run=1, **options)
    case.check(*first, **options)
    split, scratch = Cut(2, 1, 2, cut.bulk, splits=2), callers_scratch()
    for other, run, more in ((cut, 2, {}), (split, 3, {}), (split, 3, {"scratch": scratch})):
        again = play(monkeypatch, case, other, run=run, seed=7, **options, **more)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.isnan(scratch[0]).all()  # it was used


def test_play_lost(monkeypatch):
    """Ids and positions out of range see nothing; a block outside the pool counts as keys and
    values of 0: with one key in block 0 and 16 lost ones the output is that key's part."""
    case = PagedCase([(0, 1), (16, 1), (16, 1)], kv_heads=1, heads=1, sink=False)
    case.seq_ids[0] = 7
    case.positions[1] = 2**31 - 1
    case.tables[2, 0] = 2**31 - 1
    case.q[:] = 0
    options = {"softmax_scale": 1.0}
    out, lse = play(monkeypatch, case, Cut(1, 1, 2, True), **options)
    assert not out[:2].any()
    assert np.isneginf(lse[:2]).all()
    last = case.held[2][2][16, 0] / 17  # all 17 scores are 0
    found = (out[2, 0].astype(np.uint32) << 16).view(np.float32)
    assert np.allclose(found, last, rtol=2.0**-7)
    assert np.allclose(lse[2], np.log(17))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0)])
def test_play_no_tables(monkeypatch, shape):
    """Padding alone, with no tables or empty ones."""
    case = PagedCase([(0, 1)], kv_heads=1, heads=1, padding=1, sink=False)
    case.tables = np.zeros(shape, np.int32)
    case.seq_ids[:] = -1
    out, lse = play(monkeypatch, case, Cut(1, 1, 2, True), softmax_scale=1.0)
    assert not out.any()
    assert np.isneginf(lse).all()
