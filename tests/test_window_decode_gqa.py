"""window_decode over grouped-query rings without a GPU: the CUDA source run on the CPU by
gqa_on_host.hpp, and what is launched."""

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gqa_cases import LAYER, GqaCase, gqa_format
from helpers import Guarded
from host_build import build_library

from ringslab.layouts.sizes import div_ceil
from ringslab.rawkernels.cuda import gqa_params
from ringslab.rawkernels.cuda import window_decode_gqa as launcher
from ringslab.rawkernels.cuda.gqa_shapes import (
    MAX_SPLIT_BYTES,
    MAX_UNITS,
    Cut,
    choose_cut,
    shared_bytes,
    state_words,
)
from ringslab.rawkernels.cuda.gqa_workspace import split_workspace
from ringslab.rawkernels.ring_access import ring_access

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"
needs_gxx = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
SHIM = """
#include "gqa_on_host.hpp"
#include "{file}"
static {struct} params;
extern "C" void run(const {struct}* p, int blocks, int threads, unsigned seed) {{
  params = *p;
  for (int b = 0; b < blocks; b++) run_gqa_block([] {{ {name}(params); }}, b, threads, seed + b);
}}
"""


@functools.cache
def host_kernel(source, macros):
    """The entry `run(params, blocks, threads, seed)` of a kernel built by g++."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for path in [*CUDA_FOLDER.glob("*.cu*"), *Path(__file__).parent.glob("*_on_host.hpp")]:
            shutil.copy(path, place)
        for header in ("mma", "hopper", "async_copy"):
            (place / f"{header}.cuh").write_text('#pragma once\n#include "gqa_on_host.hpp"\n')
        (place / source.params_header).write_text(source.params.render())
        names = {"file": source.file_name, "struct": source.params.name, "name": source.name}
        (place / "shim.cpp").write_text(SHIM.format(**names))
        return build_library(place, "shim.cpp", macros, "-O1", "-std=c++20", "-w").run


class HostKernel:
    """What `get_kernel` returns here."""

    def __init__(self, source, macros):
        self.entry = host_kernel(source, macros)

    def launch(self, grid, block, params, stream=None):
        given = dict(HostKernel.macros)
        assert block == (32 * (given["HEADS"] + given["FETCHERS"]),)
        self.entry(ctypes.c_void_p(params.ctypes.data), *grid, *block, HostKernel.seed)


def on_host(monkeypatch, module, seed):
    """Lets a launcher take NumPy arrays. Returns the list that keeps its workspace."""
    kept = [np.zeros(1, np.float32), np.zeros(1, np.uint32)]

    def workspace(fmt, cut, units, parts, stream, scratch):
        if scratch is not None:
            kept[:] = split_workspace(fmt, cut, units, parts, stream, scratch)
            return tuple(kept)
        floats = units * cut.heads * parts * state_words(fmt.head_dim, cut.row_tiles) * 32
        kept[:] = np.full(floats, np.nan, np.float32), np.zeros(units, np.uint32)
        return tuple(kept)

    def get_kernel(source, macros, dynamic_shared_bytes):
        assert dict(macros)["SHARED_BYTES"] == dynamic_shared_bytes
        HostKernel.macros, HostKernel.seed = macros, seed
        return HostKernel(source, macros)

    replaced = {
        "device_pointer": lambda x: 0 if x is None else x.ctypes.data,
        "split_workspace": workspace,
        "get_kernel": get_kernel,
        "current_arch": lambda device: "sm_80",
        "current_device": lambda: 0,
        "check_current_device": lambda *_: None,
        "check_alignment": lambda *_: None,
    }
    for name, value in replaced.items():
        for place in (module, gqa_params):
            if hasattr(place, name):
                monkeypatch.setattr(place, name, value)
    return kept


def callers_scratch():
    """As an engine takes it; the partial sums are poisoned."""
    return np.full(MAX_SPLIT_BYTES // 4, np.nan, np.float32), np.zeros(MAX_UNITS, np.uint32)


def play(monkeypatch, case, cut, *, seed=0, **options):
    """out and lse of a case by the launcher, played with this cut; guarded, poisoned outputs."""
    out = Guarded(case.q.shape, np.uint16, "cpu")
    lse = Guarded(case.q.shape[:2], np.float32, "cpu")
    kept = on_host(monkeypatch, launcher, seed)
    access = ring_access("test", case.layout, LAYER)
    slots = case.slab.size // case.layout.slot_bytes  # exact: whole slots
    arrays = (case.q, case.slab, case.plan, out.array, lse.array, access, slots)
    launcher.launch(*arrays, sink=case.sink, cut=cut, **options)
    assert not kept[1].any()  # counters are 0 again
    return out.host(), lse.host()


CASES = [  # record type, head_dim, KV heads, query heads, cut: every branch of the source
    ("bf16", 64, 8, 64, Cut(8, 1, 3, True, fetchers=4)),
    ("bf16", 64, 4, 16, Cut(2, 2, 2, True)),
    ("mxfp8", 64, 8, 64, Cut(8, 1, 2, True)),
    ("mxfp8", 128, 4, 16, Cut(2, 1, 3, False, fetchers=2)),
    ("mxfp8", 96, 2, 6, Cut(1, 2, 2, True)),
    ("mxfp8", 32, 3, 3, Cut(3, 1, 2, False, fetchers=2)),
    ("fp16", 96, 2, 10, Cut(2, 1, 2, False, fetchers=4)),
    ("bf16", 256, 1, 2, Cut(1, 1, 2, False)),
    ("mxfp8", 256, 1, 12, Cut(1, 1, 2, False)),
]


@needs_gxx
@pytest.mark.parametrize(("record_type", "head_dim", "kv_heads", "heads", "cut"), CASES)
def test_play(monkeypatch, record_type, head_dim, kv_heads, heads, cut):
    """Sequences of 1, 15, 16, 17 and 100 tokens so far and steps of 1 to 3 tokens against a window
    of 40 in a ring of 43, wraps, padding tokens: within the bound, nothing else written; the same
    bits for a sequence alone, in another order of warps and copies."""
    seqs = [(0, 1), (14, 2), (16, 1), (39, 3), (100, 2)]
    case = GqaCase(
        seqs, record_type=record_type, head_dim=head_dim, kv_heads=kv_heads, heads=heads,
        window=40, padding=2,
    )  # fmt: skip
    options = {"softmax_scale": head_dim**-0.5}
    out, lse = play(monkeypatch, case, cut, **options)
    case.check(out, lse, **options)
    alone, alone_lse = play(monkeypatch, case.only(4), cut, seed=99, **options)
    assert np.array_equal(alone[:2], out[7:9])
    assert np.array_equal(alone_lse[:2], lse[7:9])


@needs_gxx
def test_play_parts(monkeypatch):
    """A ring of 290, two parts: one block and two give the same bits, whatever heads a block has,
    in partial sums of the launcher's or of the caller's; sequences of 1, 270 and 2,000 tokens so
    far."""
    seqs = [(0, 1), (269, 1), (1999, 2)]
    case = GqaCase(seqs, record_type="mxfp8", head_dim=64, kv_heads=2, heads=4, window=280,
                   ring_len=290)  # fmt: skip
    options = {"softmax_scale": 0.125}
    first = play(monkeypatch, case, Cut(2, 1, 2, True), **options)
    case.check(*first, **options)
    for cut in (Cut(2, 1, 2, True, splits=2), Cut(1, 1, 3, False, splits=2, fetchers=2)):
        for scratch in (None, callers_scratch()):
            other = play(monkeypatch, case, cut, scratch=scratch, **options)
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
            assert scratch is None or not np.isnan(scratch[0]).all()  # it was used


@needs_gxx
@pytest.mark.parametrize("window", [1, 2, 16, 17])
def test_play_windows(monkeypatch, window):
    """Short windows, softcap, no sinks."""
    case = GqaCase([(0, 1), (window, 2), (500, 8)], head_dim=64, kv_heads=1, heads=3,
                   window=window, ring_len=window + 30, sink=False)  # fmt: skip
    options = {"softmax_scale": 0.5, "softcap": 3.0}
    out, lse = play(monkeypatch, case, Cut(1, 1, 2, True), **options)
    case.check(out, lse, **options)


@needs_gxx
def test_play_pinned(monkeypatch):
    """Rings of 21 pinned and 40 turning positions, sequences shorter than the pinned part, just
    longer, wrapped; steps of 2 tokens: within the bound."""
    seqs = [(0, 2), (20, 2), (22, 1), (60, 2), (500, 2)]
    case = GqaCase(seqs, head_dim=64, kv_heads=1, heads=2, window=38, sink_tokens=21, padding=1)
    options = {"softmax_scale": 0.125}
    out, lse = play(monkeypatch, case, Cut(1, 1, 2, True), **options)
    case.check(out, lse, **options)


STAGES = [  # record type, head_dim, query heads of a KV head, sequences, longest list, stages
    ("mxfp8", 128, 4, 64, 4097, 3),  # Mistral 7B, W 4,096
    ("mxfp8", 128, 4, 256, 4097, 3),
    ("mxfp8", 128, 4, 4096, 8192, 3),
    ("mxfp8", 64, 8, 256, 4097, 3),  # gpt-oss' heads
    ("mxfp8", 64, 8, 256, 129, 3),  # W 128: two blocks share a multiprocessor
    ("mxfp8", 128, 4, 256, 129, 2),
    ("mxfp8", 128, 4, 256, 8193, 2),  # a pool of pages
    ("mxfp8", 128, 4, 1, 4097, 12),  # one sequence: a head a block, so no whole records
    ("bf16", 128, 4, 256, 4097, 3),
    ("bf16", 64, 8, 256, 129, 3),
]


@pytest.mark.parametrize(
    ("record_type", "head_dim", "group", "num_seqs", "max_length", "stages"), STAGES
)
def test_stages(record_type, head_dim, group, num_seqs, max_length, stages):
    """Whole MXFP8 records of 8 heads in long windows take three stages on sm_90a: 535 us where two
    took 576 and six 553, for W 4,096 of 256 sequences on an H200. What has no such measurement
    takes what fits."""
    fmt = gqa_format(record_type, head_dim, 8)
    cut = choose_cut(fmt, group, 1, num_seqs, max_length, 132, hopper=True)
    assert cut.stages == stages
    older = choose_cut(fmt, group, 1, num_seqs, max_length, 132, hopper=False)
    assert shared_bytes(fmt, older) <= 101_376  # 99 KB: a block of sm_86 has no more


@pytest.mark.parametrize("record_type", ["bf16", "mxfp8"])
@pytest.mark.parametrize("num_seqs", [1, 64, 256, 4096])
@pytest.mark.parametrize(("head_dim", "kv_heads", "group"), [(64, 8, 8), (128, 8, 4), (256, 16, 2)])
def test_cuts(record_type, num_seqs, head_dim, kv_heads, group):
    """Whatever the batch, a cut fits: heads divide, a block's shared memory is at most 227 KB."""
    fmt = gqa_format(record_type, head_dim, kv_heads)
    for tokens in (1, 3, 8):
        for max_length in (129, 4097, 131_072):
            cut = choose_cut(fmt, group, tokens, num_seqs, max_length, 132, hopper=True)
            assert kv_heads % cut.heads == 0
            assert cut.stages >= 2
            assert shared_bytes(fmt, cut) <= 227 * 1024
            assert cut.splits <= max(1, div_ceil(max_length, 256))
