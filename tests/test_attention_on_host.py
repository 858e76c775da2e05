"""The CUDA source of window_decode and window_prefill, run on the CPU thread by thread.

g++ builds the kernels as they are, but for mma.cuh, whose instructions tests/cuda_on_host.hpp
plays after the PTX ISA. This covers fragments, swizzle, masks, both plane orders, barriers and the
launchers' parameters where there is no GPU; speed, races and the compiler's own doings it does not.
"""

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path

import helpers
import numpy as np
import pytest
from host_build import build_library

from ringslab.layouts.rope import Rope
from ringslab.rawkernels.cuda import window_decode as decode_launcher
from ringslab.rawkernels.cuda import window_prefill as prefill_launcher
from ringslab.rawkernels.cuda.attention_shapes import (
    attention_macros,
    head_tile,
    num_threads,
    scale_log2,
)
from ringslab.rawkernels.reference.bound import (
    assert_within_bound,
    expected_decode,
    expected_prefill,
)
from ringslab.rawkernels.ring_access import ring_access
from ringslab.rawkernels.rope_tables import cached_rope_table
from ringslab.schedules.plan_decode import plan_decode
from ringslab.schedules.plan_prefill import plan_prefill

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"
ADJACENT, HALF = Rope(10_000.0, 32, "adjacent"), Rope(10_000.0, 64, "half")
WHOLE = Rope(10_000.0, 256, "half")  # pairs that two warps share
SHIM = """
#include "cuda_on_host.hpp"
#include "{file}"
static {struct} params;
extern "C" void run(const {struct}* p, int blocks, int threads, unsigned seed) {{
  params = *p;
  for (int b = 0; b < blocks; b++) run_block([] {{ {name}(params); }}, b, threads, seed + b);
}}
"""


@functools.cache
def host_kernel(source, macros):
    """The entry `run(params, blocks, threads, seed)` of a kernel built by g++."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for path in CUDA_FOLDER.glob("*.cu*"):
            shutil.copy(path, place)
        shutil.copy(Path(__file__).parent / "cuda_on_host.hpp", place)
        (place / "mma.cuh").write_text('#pragma once\n#include "cuda_on_host.hpp"\n')
        (place / source.params_header).write_text(source.params.render())
        names = {"file": source.file_name, "struct": source.params.name, "name": source.name}
        (place / "shim.cpp").write_text(SHIM.format(**names))
        return build_library(place, "shim.cpp", macros, "-O1", "-std=c++20", "-w").run


def pointer(array):
    return 0 if array is None else array.ctypes.data


def launch(launcher, macros, q, sink, rope, out, lse, seed, **fields):
    tokens, num_q_heads = q.shape[:2]
    tile = head_tile(num_q_heads)
    tiles = -(-num_q_heads // tile)
    (source,) = launcher.KERNELS
    params = launcher.PARAMS.pack(
        q=pointer(q),
        sink=pointer(sink),
        rope_table=pointer(None if rope is None else cached_rope_table(rope)),
        out=pointer(out.array),
        lse=pointer(lse.array),
        num_q_heads=num_q_heads,
        head_tiles=tiles,
        **fields,
    )
    run = host_kernel(source, macros)
    run(params.ctypes.data_as(ctypes.c_void_p), tokens * tiles, num_threads(tile), seed)
    return out.host(), lse.host()


def outputs(q):
    lse = helpers.Guarded(q.shape[:2], np.float32, "cpu")
    return helpers.Guarded(q.shape, np.uint16, "cpu"), lse


def decode(q, slab, layout, plan, *, softmax_scale, sink=None, rope_out=None, seed=0):
    access = ring_access("test", layout, 1)
    planar = access.format.plane_order == "planar"
    macros = attention_macros(access.format, q.shape[1], rope_out, planar=planar)
    fields = {
        "slab": pointer(slab),
        "offset_len": pointer(plan.offset_len),
        "positions": pointer(plan.positions),
        "slot_bytes": access.slot_bytes,
        "value_offset": access.value_offset,
        "scale_offset": access.scale_offset,
        "num_rows": slab.size // access.slot_bytes * access.ring_len,
        "ring_len": access.ring_len,
        "scale_log2": scale_log2(softmax_scale),
    }
    return launch(decode_launcher, macros, q, sink, rope_out, *outputs(q), seed, **fields)


def prefill(q, records, plan, fmt, *, softmax_scale, sink=None, rope_out=None, seed=0):
    macros = attention_macros(fmt, q.shape[1], rope_out)
    fields = {
        "records": pointer(records),
        "pivots": pointer(plan.pivots),
        "positions": pointer(plan.positions),
        "num_records": records.shape[0],
        "scale_log2": scale_log2(softmax_scale),
    }
    return launch(prefill_launcher, macros, q, sink, rope_out, *outputs(q), seed, **fields)


def history(fmt, window, ring_len, lengths, seed=1):
    """A poisoned slab with the newest records of sequences of these lengths, state i each."""
    rng = np.random.default_rng(seed)
    layout = helpers.make_layout(fmt, ring_len)
    slab = helpers.poisoned_slab(layout, len(lengths))
    for state, n in enumerate(lengths):
        first = max(0, n - ring_len)
        kv = helpers.random_bf16(rng, (n - first, fmt.head_dim))
        helpers.store(slab, layout, 1, kv, state, np.arange(first, n))
    return layout, slab, rng


CASES = [  # head_dim, record type, plane order, heads, rope: every branch of the source
    (512, "mxfp8", "interleaved", 64, ADJACENT),
    (512, "mxfp8", "planar", 20, HALF),
    (128, "mxfp8", "interleaved", 5, ADJACENT),
    (96, "mxfp8", "interleaved", 65, None),
    (32, "mxfp8", "planar", 3, None),
    (256, "bf16", "interleaved", 17, WHOLE),
]


@pytest.mark.parametrize(("head_dim", "record_type", "plane_order", "heads", "rope"), CASES)
def test_decode(head_dim, record_type, plane_order, heads, rope):
    """Lengths 1, 31, 32, 33 and 70 of a window of 70, wraps inside and at tile borders, a padding
    token: within the bound of the float64 reference, nothing else written."""
    fmt = helpers.record_format(head_dim, record_type, plane_order)
    lengths = [1, 31, 32, 33, 200]
    layout, slab, rng = history(fmt, 70, 75, lengths)
    plan = plan_decode([0, 1, 2, 3, 4, -1], [n - 1 for n in lengths] + [0], window=70, ring_len=75)
    q = helpers.random_bf16(rng, (6, heads, head_dim))
    sink = rng.standard_normal(heads, np.float32)
    options = {"softmax_scale": head_dim**-0.5, "sink": sink, "rope_out": rope}
    out, lse = decode(q, slab, layout, plan, **options)
    expected = expected_decode(q, slab, layout, 1, plan, **options)
    assert_within_bound(out, lse, expected)
    assert not out[5].any()
    assert np.isneginf(lse[5]).all()
    again, _ = decode(q, slab, layout, plan, seed=99, **options)
    assert np.array_equal(out, again)  # in another order of threads


@pytest.mark.parametrize(("head_dim", "record_type", "plane_order", "heads", "rope"), CASES[::2])
def test_prefill_is_decode(head_dim, record_type, plane_order, heads, rope):
    """A chunk of 40 tokens after 60 cached ones, window 70: within the bound, and the last token
    has the very bits that a decode of it has."""
    fmt = helpers.record_format(head_dim, record_type, plane_order)
    layout, slab, rng = history(fmt, 70, 75, [60])
    new = helpers.random_bf16(rng, (40, head_dim))
    plan = plan_prefill([0], [40], [100], window=70, ring_len=75)
    records = np.full((70 + 40, fmt.record_bytes), helpers.POISON, np.uint8)
    helpers.operations("reference").load_history(slab, layout, 1, plan, records)
    records[70:] = helpers.encoded(new, fmt)
    q = helpers.random_bf16(rng, (40, heads, head_dim))
    keep = [0, 9, 10, 39]  # no more than the CPU can play in a few seconds
    cut = {name: getattr(plan, name)[keep].copy() for name in ("pivots", "positions")}
    options = {"softmax_scale": head_dim**-0.5, "rope_out": rope}
    short = type(plan)(**{**vars(plan), **cut})
    out, lse = prefill(q[keep].copy(), records, short, fmt, **options)
    expected = expected_prefill(q, records, plan, fmt, **options)
    picked = type(expected)(expected.out[keep], expected.rounded[keep], expected.lse[keep])
    assert_within_bound(out, lse, picked)

    helpers.store(slab, layout, 1, new, 0, np.arange(60, 100))
    step = plan_decode([0], [99], window=70, ring_len=75)
    decoded, decoded_lse = decode(q[39:].copy(), slab, layout, step, **options)
    assert np.array_equal(decoded[0], out[3])
    assert np.array_equal(decoded_lse[0], lse[3])


def test_all_codes():
    """Every element byte under scales of every size, and every scale code: one key at a time, so
    that the output is that key, or NaN where it holds one."""
    fmt = helpers.record_format(512)
    records = np.zeros((9, fmt.record_bytes), np.uint8)
    codes = np.arange(256, dtype=np.uint8)
    finite = np.where(codes & 0x7F == 0x7F, 0, codes)
    for row, scale in enumerate((0, 1, 105, 127, 200, 246)):
        records[row, :512] = np.tile(finite, 2)
        records[row, 512:] = scale
    records[6, :512] = 0x38  # 1.0
    records[6, 512:] = np.arange(0, 240, 15)
    records[7, 0] = 0x7F  # NaN
    records[8, 512] = 0xFF  # NaN
    plan = plan_prefill([0], [9], [9], window=1, ring_len=2)
    joint = np.concatenate([np.zeros((1, fmt.record_bytes), np.uint8), records])
    q = np.zeros((9, 1, 512), np.uint16)
    out, lse = prefill(q, joint, plan, fmt, softmax_scale=1.0)
    expected = expected_prefill(q, joint, plan, fmt, softmax_scale=1.0)
    found, exact = helpers.from_bf16(out), helpers.from_bf16(helpers.bf16(expected.out))
    assert np.array_equal(found[:7], exact[:7])  # as numbers: a sum makes +0 of -0
    assert np.isnan(found[7:]).all()
    assert np.isnan(lse[7:]).all()


@pytest.mark.parametrize("offset_len", [(150, 5), (-1, 5), (3, -1), (2**31 - 1, 2**31 - 1)])
def test_decode_outside_the_slab(offset_len):
    """A row outside the slab's 2 x 75 rows, or a negative length: output 0 and lse -inf, and no
    byte outside is read (the address sanitizer's job on a GPU is compute-sanitizer's)."""
    fmt = helpers.record_format(128)
    layout, slab, rng = history(fmt, 70, 75, [10, 10])
    plan = plan_decode([0], [9], window=70, ring_len=75)
    plan = type(plan)(**{**vars(plan), "offset_len": helpers.i32([offset_len])})
    q = helpers.random_bf16(rng, (1, 5, 128))
    out, lse = decode(q, slab, layout, plan, softmax_scale=1.0)
    assert not out.any()
    assert np.isneginf(lse).all()
