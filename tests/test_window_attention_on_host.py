"""The portable CUDA source of window_attention, run on the CPU thread by thread, and its debug
build's tiles beside count_tiles.

g++ builds the kernel as it is, but for mma.cuh and tile_ptx.cuh, whose instructions are played
after the PTX ISA; asynchronous copies land at random moments. This covers fragments, masks, loop
bounds, barriers and the launcher's parameters where there is no GPU.
"""

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from attention_cases import (
    CASES,
    COUNTED,
    FP16,
    Case,
    assert_counts,
    case_inputs,
    check_attention,
    ends_of,
    run_attention,
)
from host_build import build_library

from ringslab.rawkernels.cuda import window_attention as launcher

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
HERE = Path(__file__).resolve().parent
CUDA_FOLDER = HERE.parent / "rawkernels" / "cuda"
SHIM = """
#include "tile_ptx_on_host.hpp"
#include "window_attention.cu"
static WindowAttentionParams params;
extern "C" void run(const WindowAttentionParams* p, int blocks, int threads, unsigned seed) {
  params = *p;
  copy_random.seed(seed);
  for (int b = 0; b < blocks; b++)
    run_block([] { window_attention(params); }, b, threads, seed + b);
}
"""


@functools.cache
def host_kernel(macros):
    """The entry `run(params, blocks, threads, seed)` of the kernel built by g++."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for path in (*CUDA_FOLDER.glob("*.cu*"), *HERE.glob("*_on_host.hpp")):
            shutil.copy(path, place)
        (place / "mma.cuh").write_text('#pragma once\n#include "cuda_on_host.hpp"\n')
        (place / "tile_ptx.cuh").write_text('#pragma once\n#include "tile_ptx_on_host.hpp"\n')
        source = launcher.WINDOW_ATTENTION
        (place / source.params_header).write_text(source.params.render())
        (place / "shim.cpp").write_text(SHIM)
        return build_library(place, "shim.cpp", macros, "-O1", "-std=c++20", "-w").run


def on_host(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    out,
    lse,
    *,
    softmax_scale,
    window=None,
    softcap=0.0,
    sink=None,
    sink_tokens=0,
    seed=0,
    counts=None,
):
    """The operation by the kernel's source and the launcher's numbers."""
    options = {"fp16": q.dtype == FP16, "softcap": softcap > 0, "count_tiles": counts is not None}
    macros = launcher.macros_of(q.shape[2], q.shape[1] // k.shape[1], **options)
    fields = launcher.portable_fields(
        q.shape,
        k.shape,
        len(cu_seqlens_q) - 1,
        softmax_scale=softmax_scale,
        window=window,
        softcap=softcap,
        sink_tokens=sink_tokens,
    )
    arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    arrays |= {"sink": sink, "out": out, "lse": lse, "counts": counts}
    pointers = {name: 0 if x is None else x.ctypes.data for name, x in arrays.items()}
    params = launcher.PARAMS.pack(**pointers, **fields)
    run = host_kernel(macros)
    blocks = launcher.num_blocks(fields)
    run(params.ctypes.data_as(ctypes.c_void_p), blocks, launcher.NUM_THREADS, seed)


# What takes the CPU more than a few seconds is left to the GPU.
PLAYED = [
    case
    for case in CASES
    if sum(q * k for q, k in case.sequences) * case.heads * case.head_dim < 20_000_000
]


def test_most_cases_are_played():
    """The table's head_dims, dtypes, caps, first keys and group sizes are among what is played."""
    assert {case.head_dim for case in PLAYED} == {64, 96, 128, 256}
    assert {case.dtype for case in PLAYED} == {case.dtype for case in CASES}
    assert {case.heads // case.kv_heads for case in PLAYED} >= {1, 2, 3, 5, 8, 16, 24}
    assert any(case.softcap for case in PLAYED)
    assert len(PLAYED) > 20


@pytest.mark.parametrize("case", PLAYED, ids=str)
def test_shapes_within_the_bound(case):
    """The table's cases by the kernel's source: output and lse within the bound, nothing else
    written, and the same bits in another order of warps and of copies."""
    inputs = case_inputs(case)
    options = {"sink": inputs.sink, **case.options}
    out, lse = check_attention("cpu", inputs.arrays, function=on_host, **options)
    other = functools.partial(on_host, seed=99)
    again, again_lse = run_attention("cpu", inputs.arrays, function=other, **options)
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, again_lse)


def test_chunks_are_the_whole_bit_for_bit():
    """A prompt of 150 in chunks of 1, 63, 64 and 22, and with a window of 10^6 as with none: the
    same bits, although tiles are FULL in one and masked in the other."""
    case = Case("whole", ((150, 150),), window=50, heads=4, kv_heads=2, sink=True, sink_tokens=5)
    inputs = case_inputs(case)
    q, k, v = inputs.arrays[:3]
    options = {"sink": inputs.sink, **case.options}
    whole, _ = run_attention("cpu", inputs.arrays, function=on_host, **options)
    done = 0
    for length in (1, 63, 64, 22):
        end = done + length
        arrays = (q[done:end].copy(), k[:end].copy(), v[:end].copy())
        ends = (ends_of([length]), ends_of([end]))
        out, _ = run_attention("cpu", (*arrays, *ends), function=on_host, **options)
        np.testing.assert_array_equal(out, whole[done:end])
        done = end
    wide, causal = (
        run_attention("cpu", inputs.arrays, function=on_host, **options | {"window": window})[0]
        for window in (10**6, None)
    )
    np.testing.assert_array_equal(wide, causal)


def test_poison_between_windows_does_not_leak():
    """NaN in keys and values that no query of a tile sees changes no bit."""
    case = Case("clean", ((40, 200),), window=20, heads=2, sink_tokens=3)
    inputs = case_inputs(case)
    q, k, v, *ends = inputs.arrays
    out, lse = run_attention("cpu", inputs.arrays, function=on_host, **case.options)
    k, v = k.copy(), v.copy()
    k[3:141], v[3:141] = np.nan, np.nan
    found, found_lse = run_attention("cpu", (q, k, v, *ends), function=on_host, **case.options)
    np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(found_lse, lse)


def test_ends_outside_the_arrays_are_skipped():
    """Sequence ends past q, past k, or falling: those sequences' rows stay as they are, no byte
    outside is touched, and the others are computed."""
    case = Case("outside", ((9, 30), (9, 30), (9, 30)), window=8)
    inputs = case_inputs(case)
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs.arrays
    wanted, _ = run_attention("cpu", inputs.arrays, function=on_host, **case.options)
    wrong = cu_seqlens_k.copy()
    wrong[2:] = 10**6
    out, _ = run_attention("cpu", (q, k, v, cu_seqlens_q, wrong), function=on_host, **case.options)
    np.testing.assert_array_equal(out[:9], wanted[:9])
    assert (out[9:] == 0xFFFF).all()


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_the_debug_build_counts_what_count_tiles_counts(case):
    """FULL, PARTIAL and EMPTY tiles as each block finds them are those of count_tiles for that
    tile, once a KV head and part of a group; the pairs that took part are the visible ones, so no
    unmasked tile had a hidden one."""
    check_counts(case)


def test_random_shapes_count_and_compute():
    """24 random shapes with tiles that end at, one before and one after every edge: the counts are
    right and the outputs within the bound."""
    rng = np.random.default_rng(5)
    edges = [1, 2, 62, 63, 64, 65, 126, 127, 128, 129, 190]
    for i in range(24):
        seqlen_q, extra, window, sink_tokens = rng.choice(edges, 4).tolist()
        case = Case(
            f"random_{i}",
            ((seqlen_q, seqlen_q + extra - 1), (1, window)),
            window=window if i % 5 else None,
            heads=4 if i % 2 else 1,
            head_dim=16,
            sink_tokens=sink_tokens if i % 3 == 0 else 0,
        )
        inputs = case_inputs(case, seed=i)
        check_attention("cpu", inputs.arrays, function=on_host, **case.options)
        check_counts(case)


def check_counts(case):
    inputs = case_inputs(case)
    counts = np.zeros(5, np.uint64)
    function = functools.partial(on_host, counts=counts)
    run_attention("cpu", inputs.arrays, function=function, **case.options)
    assert_counts(counts, case)
