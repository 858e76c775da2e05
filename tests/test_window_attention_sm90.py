"""The Hopper kernels of window_attention: the sources themselves, run on the CPU by
hopper_on_host.hpp, what the compiler made of them, and on a GPU the reference and what must not
change a bit."""

import ctypes
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from attention_cases import FP16, Case, case_inputs, check_attention, ends_of, run_attention
from host_build import build_library

from ringslab.layouts.errors import BackendError
from ringslab.rawkernels.cuda import window_attention_sm90 as launcher
from ringslab.rawkernels.device.module import build_kernel
from ringslab.rawkernels.device.nvrtc import compiler_version, parse_resources

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"
needs_gxx = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
SHIM = """
#define HOST_THREADS ((CONSUMERS + 1) * 128)
#include "hopper_on_host.hpp"
#include "{file}"
static {struct} params;
extern "C" void run(const {struct}* p, unsigned blocks, unsigned seed) {{
  params = *p;
  for (unsigned b = 0; b < blocks; b++)
    run_hopper_block([] {{ {name}(params); }}, b, blocks, seed + b);
}}
"""


class HostKernel:
    """A kernel built by g++; `launch` runs the grid, block by block."""

    def __init__(self, source, macros):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for path in CUDA_FOLDER.glob("*.cu*"):
                shutil.copy(path, place)
            for name in ("cuda_on_host.hpp", "hopper_on_host.hpp"):
                shutil.copy(Path(__file__).parent / name, place)
            for header in ("mma.cuh", "hopper.cuh", "attention_products_sm90.cuh"):
                (place / header).write_text('#pragma once\n#include "hopper_on_host.hpp"\n')
            (place / source.params_header).write_text(source.params.render())
            names = {"file": source.file_name, "struct": source.params.name, "name": source.name}
            (place / "shim.cpp").write_text(SHIM.format(**names))
            self.run = build_library(place, "shim.cpp", macros, "-O2", "-std=c++20", "-w").run

    def launch(self, grid, block, params, stream=None):
        self.run(ctypes.c_void_p(params.ctypes.data), grid[0], HostKernel.seed)


HostKernel.seed = 0


@functools.cache
def host_kernel(source, macros=(), shared_bytes=0):
    return HostKernel(source, macros)


def host_map(address, tokens, heads, head_dim, box_tokens, box_heads, fp16):
    """What hopper_on_host.hpp's TensorMap holds."""
    words = np.zeros(16, np.uint64)
    words[:6] = address, head_dim, heads, tokens, box_heads, box_tokens
    return np.void(words.tobytes())


@pytest.fixture
def play(monkeypatch):
    """`check_attention` with the kernels on the CPU, on `blocks` blocks in an order of `seed`."""
    replaced = {
        "device_pointer": lambda array: 0 if array is None else array.ctypes.data,
        "get_kernel": host_kernel,
        "head_tensor_map": host_map,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(launcher, name, value)

    def run(case, blocks=2, seed=0, **tuning):
        monkeypatch.setattr(HostKernel, "seed", seed)
        function = functools.partial(
            launcher.launch, num_blocks=blocks, tuning=tuple(tuning.items())
        )
        inputs = case_inputs(case, seed)
        return check_attention(
            "cpu", inputs.arrays, sink=inputs.sink, function=function, **case.options
        )

    return run


BAND = (
    Case("d128_ratio_4", ((40, 40), (1, 140), (35, 170)), 128, 4, 1, 128),
    Case("d64_ratio_8", ((29, 150), (5, 5), (0, 3), (4, 0)), 128, 8, 1, 64, sink=True),
    Case("ratio_1", ((70, 90),), 100, 1, 1, 128),
    Case("ratio_2_fp16", ((50, 60),), 63, 2, 1, 64, dtype=FP16),
    Case("ratio_6_capped", ((20, 50),), 64, 6, 1, 96, softcap=5.0, spread=10.0),
    Case("ratio_16", ((9, 30),), 2, 16, 1, 64),
    Case("window_1", ((20, 20), (20, 10)), 1, 4, 1, 128, sink=True),
    Case("two_kv_heads", ((20, 20),), 16, 8, 2, 128),
    Case("70_sequences", tuple((i % 4, 5 + i % 7) for i in range(70)), 6, 16, 1, 64),
)
STREAM = (
    Case("d128_ratio_4", ((40, 40), (1, 140), (35, 300)), 200, 4, 1, 128, sink=True),
    Case("causal", ((35, 260), (20, 180)), None, 4, 1, 128),
    Case("narrow_newest_tile", ((40, 300), (3, 160)), 150, 4, 1, 128),
    Case("d64_ratio_8", ((20, 150), (5, 5), (0, 3), (4, 0)), 130, 8, 1, 64),
    Case("sink_tokens", ((20, 300), (20, 20)), 100, 4, 1, 64, sink_tokens=130, sink=True),
    Case("40_sequences", tuple((i % 3, 5 + i % 7) for i in range(40)), None, 16, 1, 64),
    Case("few_sink_tokens", ((20, 300),), 40, 8, 2, 64, sink_tokens=4),
    Case("ratio_1_fp16", ((130, 150),), 140, 1, 1, 64, dtype=FP16),
    Case("ratio_3_capped", ((20, 150),), None, 3, 1, 96, softcap=5.0, spread=10.0),
)


@pytest.mark.parametrize(
    ("window", "heads_per_kv", "narrow"),
    [(1024, 4, 48), (2048, 4, 64), (4096, 4, 0), (launcher.NO_WINDOW, 4, 0), (130, 8, 32)],
)
def test_narrow_tile(window, heads_per_kv, narrow):
    """32 tokens of 4 heads see 1,055 keys of a window of 1,024: 7 tiles of 144 and 47 more; of
    2,048, 63 more; of 4,096, 95, which is most of a tile."""
    shape = launcher.Shape(128, False, heads_per_kv, window, False, False)
    assert dict(launcher.stream_macros(shape))["NARROW_TILE"] == narrow


@needs_gxx
@pytest.mark.parametrize("case", BAND, ids=str)
def test_band_kernel_on_the_host(play, case):
    """Short windows: rings, masks at both ends, chunks that begin before a sequence or end behind
    it, and rows that are not its own."""
    assert launcher.is_band(launcher.Shape(64, False, 1, case.window, False, False))
    play(case)


@needs_gxx
@pytest.mark.parametrize("case", STREAM, ids=str)
def test_stream_kernel_on_the_host(play, case):
    """Other windows, causal, first keys that stay visible."""
    play(case)


@needs_gxx
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 128), (8, 64)])
def test_the_kernels_agree_where_both_see_all_keys(play, heads, head_dim):
    """110 keys: W = 128 by the band kernel and no window by the other one, bit for bit, as both sum
    keys in order from a multiple of 16."""
    case = Case("short", ((30, 110),), 128, heads, 1, head_dim, sink=True)
    band = play(case)
    causal = play(dataclasses.replace(case, window=None))
    assert np.array_equal(band[0], causal[0])
    assert np.array_equal(band[1], causal[1])


@needs_gxx
def test_chunks_have_the_bits_of_the_whole_on_the_host(play):
    """The last 37 of 90 queries alone, at a position inside a tile: the whole's bits, whichever
    thread block has them."""
    case = Case("whole", ((90, 170),), 150, 4, 1, 64)
    inputs = case_inputs(case)
    whole = play(case)
    arrays = (inputs.q[-37:].copy(), inputs.k, inputs.v, ends_of([37]), inputs.cu_seqlens_k)
    function = functools.partial(launcher.launch, num_blocks=1)
    out, lse = run_attention("cpu", arrays, function=function, **case.options)
    assert np.array_equal(out, whole[0][-37:])
    assert np.array_equal(lse, whole[1][-37:])


def builds():
    return [
        pytest.param(source, macros, id=f"{source.name}-{i}")
        for source in launcher.KERNELS
        for i, macros in enumerate(source.macro_sets)
    ]


@pytest.mark.parametrize(("source", "macros"), builds())
def test_products_overlap_and_nothing_spills(source, macros):
    """ptxas says when it puts a wait behind every product (C7510 and its like): it does for no
    build, and no register goes to memory."""
    try:
        compiler_version()
    except BackendError as error:
        pytest.skip(str(error))
    log = build_kernel(source, macros, "sm_90a").log
    assert "serialized" not in log
    assert parse_resources(log)[source.name].spill_bytes == 0


# ---- on a GPU

LENGTHS = ((1, 1), (7, 7), (0, 50), (130, 130), (133, 500), (1, 129), (64, 1064), (5, 3))
WINDOWS = (1, 2, 63, 64, 100, 128, 129, 1000, None)
HEADS = {"d128_ratio_4": (8, 2, 128), "d64_ratio_8": (16, 2, 64), "d96_ratio_3": (6, 2, 96)}


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", HEADS)
def test_windows_within_the_bound(name, window):
    """Both kernels, ragged batches; outputs poisoned, rows of no sequence NaN."""
    heads, kv_heads, head_dim = HEADS[name]
    case = Case(name, LENGTHS, window, heads, kv_heads, head_dim, sink=window != 100)
    inputs = case_inputs(case)
    check_attention(
        "cuda", inputs.arrays, sink=inputs.sink, function=launcher.launch, **case.options
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", BAND + STREAM, ids=str)
def test_cases_of_the_host_on_a_gpu(case):
    """What the CPU plays, on the hardware."""
    inputs = case_inputs(case)
    check_attention(
        "cuda", inputs.arrays, sink=inputs.sink, function=launcher.launch, **case.options
    )


def bits_of(case, arrays, sink, **options):
    function = functools.partial(launcher.launch, **options)
    return run_attention("cuda", arrays, sink=sink, function=function, **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [100, 128, 300, None])
def test_bits_follow_from_the_sequence(window):
    """1, 7 or all thread blocks, twice, give equal bits; a sequence alone has the bits that it has
    in its batch, also where its neighbours are NaN; and so have its last 50 queries alone."""
    case = Case("bits", LENGTHS, window, 8, 2, 128, sink=True)
    inputs = case_inputs(case)
    out, lse = bits_of(case, inputs.arrays, inputs.sink)
    for blocks in (1, 7, None):
        again = bits_of(case, inputs.arrays, inputs.sink, num_blocks=blocks)
        assert np.array_equal(again[0], out)
        assert np.array_equal(again[1], lse)

    first_q, end_q = inputs.cu_seqlens_q[4:6]
    first_k, end_k = inputs.cu_seqlens_k[4:6]
    rows, keys = slice(first_q, end_q), slice(first_k, end_k)
    damaged = dataclasses.replace(inputs, q=inputs.q.copy(), k=inputs.k.copy(), v=inputs.v.copy())
    for array, own in ((damaged.q, rows), (damaged.k, keys), (damaged.v, keys)):
        kept = array[own].copy()
        array[:] = np.nan
        array[own] = kept
    beside = bits_of(case, damaged.arrays, inputs.sink)
    assert np.array_equal(beside[0][rows], out[rows])

    for tokens in (end_q - first_q, 50):
        q = inputs.q[end_q - tokens : end_q].copy()
        arrays = (q, inputs.k[keys].copy(), inputs.v[keys].copy())
        ends = (ends_of([tokens]), ends_of([end_k - first_k]))
        alone = bits_of(case, (*arrays, *ends), inputs.sink)
        assert np.array_equal(alone[0], out[end_q - tokens : end_q])
        assert np.array_equal(alone[1], lse[end_q - tokens : end_q])


@pytest.mark.gpu
def test_a_window_as_long_as_the_sequence_is_causal():
    """W of 300 and more over 300 keys give the bits of no window."""
    case = Case("causal", ((300, 300),), None, 4, 1, 128)
    inputs = case_inputs(case)
    out, lse = bits_of(case, inputs.arrays, None)
    for window in (300, 301, 2**40):
        again = bits_of(dataclasses.replace(case, window=window), inputs.arrays, None)
        assert np.array_equal(again[0], out)
        assert np.array_equal(again[1], lse)
