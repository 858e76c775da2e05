"""The Hopper kernels of window_decode without a GPU: what is launched, what the compiler made of
them, and the sources themselves, run on the CPU by hopper_on_host.hpp."""

import ctypes
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import helpers
import numpy as np
import pytest
from host_build import build_library

from ringslab.layouts.errors import BackendError
from ringslab.layouts.rope import Rope
from ringslab.rawkernels.cuda import window_decode_sm90 as launcher
from ringslab.rawkernels.cuda.window_decode_sm90 import Work
from ringslab.rawkernels.device.module import build_kernel
from ringslab.rawkernels.device.nvrtc import compiler_version
from ringslab.rawkernels.device.sass import count_opcodes, find_disassembler
from ringslab.rawkernels.reference.bound import assert_within_bound, expected_decode
from ringslab.rawkernels.ring_access import ring_access
from ringslab.rawkernels.rope_tables import cached_rope_table
from ringslab.schedules.plan_decode import build_decode_plan

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"
needs_gxx = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
H200_BLOCKS = 132
TILES = Work(0, 1, 0)  # one tile a unit; the number of units is filled in
HALVES, QUARTERS = Work(0, 1, 0, 2), Work(0, 1, 0, 4)  # of a tile's columns
SHIM = """
#include "hopper_on_host.hpp"
#include "{file}"
static {struct} params;
extern "C" void run(const {struct}* p, unsigned blocks, unsigned seed) {{
  params = *p;
  for (unsigned b = 0; b < blocks; b++)
    run_hopper_block([] {{ {name}(params); }}, b, blocks, seed + b);
}}
"""


@pytest.mark.parametrize(
    ("num_seqs", "tokens", "head_tiles", "group_tokens", "splits"),
    [(1, 1, 1, 0, 4), (1, 6, 1, 0, 4), (16, 1, 2, 0, 4), (64, 1, 1, 0, 2), (16, 6, 1, 0, 1)]
    + [(512, 1, 1, 1, 1), (256, 1, 1, 1, 1), (132, 1, 1, 0, 1), (16, 6, 2, 1, 1)]
    + [(512, 1, 2, 1, 1), (64, 6, 1, 3, 1)]
    + [(256, 2, 1, 2, 1), (512, 2, 1, 2, 1), (256, 6, 1, 6, 1), (512, 6, 2, 6, 1)],
)
def test_work(num_seqs, tokens, head_tiles, group_tokens, splits):
    """Batches of at most a tile a block go tile by tile, the smallest by columns too; 64 sequences
    of 6 tokens are cut into groups of 3 for 132 blocks; large batches are units of whole
    sequences."""
    total = num_seqs * tokens
    work = launcher.choose_work(num_seqs, tokens, total, head_tiles, H200_BLOCKS)
    assert (work.group_tokens, work.column_splits) == (group_tokens, splits)
    if group_tokens == 0:
        assert work.num_units == total * head_tiles * splits
    else:
        assert work.num_units == num_seqs * work.groups
        assert work.groups * group_tokens >= tokens


def test_work_with_a_loose_bound():
    """A plan that says only that no sequence has more than all 384 tokens is cut by tiles, not into
    64 x 48 groups of which most are empty."""
    assert launcher.choose_work(64, 384, 384, 1, H200_BLOCKS) == Work(0, 1, 384, 1)


def test_supports():
    """The shapes of the kernels, and what each of them lacks."""

    def access(head_dim=512, record_type="mxfp8", ring_len=134, plane_order="interleaved"):
        fmt = helpers.record_format(head_dim, record_type, plane_order)
        return ring_access("test", helpers.make_layout(fmt, ring_len), 1)

    rope = Rope(10_000.0, 64, "half")
    assert launcher.supports(access(), 64, rope, 0.04)
    assert launcher.supports(access(ring_len=136, plane_order="planar"), 128, None, 0.04)
    assert not launcher.supports(access(ring_len=137), 64, None, 0.04)
    assert not launcher.supports(access(), 96, None, 0.04)
    assert not launcher.supports(access(head_dim=256), 64, None, 0.04)
    assert not launcher.supports(access(record_type="bf16"), 64, None, 0.04)
    assert not launcher.supports(access(), 64, Rope(10_000.0, 32, "half"), 0.04)
    assert not launcher.supports(access(), 64, None, -0.04)


@pytest.mark.parametrize(
    ("kernel", "macros"),
    [(kernel, macros) for kernel in launcher.KERNELS for macros in kernel.macro_sets],
    ids=lambda given: getattr(given, "name", ""),
)
def test_compiled(kernel, macros):
    """32 products of S and 9 of each part of O as HGMMA, 2 stores of 64 columns a part, no local
    memory, and no word of the assembler about products made to wait for each other."""
    try:
        compiler_version()
    except BackendError as error:
        pytest.skip(str(error))
    build = build_kernel(kernel, macros, "sm_90a")
    assert "serialized" not in build.log, build.log
    assert "Performance Loss" not in build.log, build.log
    if find_disassembler() is None:
        pytest.skip("needs nvdisasm")
    counts = count_opcodes(build.cubin, find_disassembler())[kernel.name]
    parts = 4 // dict(macros).get("COLUMN_SPLITS", 1)
    assert counts["HGMMA"] == 32 + 9 * parts
    assert counts["UTMASTG"] == 2 * parts
    assert counts["LDL"] + counts["STL"] == 0


class HostKernel:
    """A kernel built by g++, launched on NumPy arrays."""

    def __init__(self, source, macros):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            for path in [*CUDA_FOLDER.glob("*.cu*"), *Path(__file__).parent.glob("*_on_host.hpp")]:
                shutil.copy(path, place)
            for header in ("mma.cuh", "hopper.cuh"):
                (place / header).write_text('#pragma once\n#include "hopper_on_host.hpp"\n')
            (place / source.params_header).write_text(source.params.render())
            names = {"file": source.file_name, "struct": source.params.name, "name": source.name}
            (place / "shim.cpp").write_text(SHIM.format(**names))
            flags = ("-O1", "-std=c++20", "-w")
            self.run = build_library(place, "shim.cpp", macros, *flags).run


@functools.cache
def host_kernel(source, macros=(), shared_bytes=0):
    return HostKernel(source, macros)


def host_tensor_map(address, rows, columns, box_rows):
    """What hopper_on_host.hpp's TensorMap holds."""
    words = np.zeros(16, np.uint64)
    words[:4] = address, rows, columns, box_rows
    return np.void(words.tobytes())


@pytest.fixture
def decode(monkeypatch):
    """`launch` on host arrays with guarded outputs, on `blocks` blocks in an order of `seed`."""
    address = {"device_pointer": lambda array: 0 if array is None else array.ctypes.data}
    replaced = {
        **address,
        "get_kernel": host_kernel,
        "bf16_tensor_map": host_tensor_map,
        "device_rope_table": cached_rope_table,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(launcher, name, value)

    def run(q, slab, layout, plan, *, work, blocks=2, seed=0, **options):
        out = helpers.Guarded(q.shape, np.uint16, "cpu")
        lse = helpers.Guarded(q.shape[:2], np.float32, "cpu")
        access = ring_access("test", layout, 1)
        if work.group_tokens == 0:
            units = q.shape[0] * q.shape[1] // 64 * work.column_splits
            work = dataclasses.replace(work, num_units=units)

        def launch(kernel, grid, block, params, stream):
            assert block == launcher.NUM_THREADS
            kernel.run(params.ctypes.data_as(ctypes.c_void_p), grid, seed)

        monkeypatch.setattr(launcher, "launch_dependent", launch)
        monkeypatch.setattr(launcher, "multiprocessors", lambda: blocks)
        slots = slab.size // layout.slot_bytes
        arrays = (q, slab, plan, out.array, lse.array, access, slots)
        launcher.launch(*arrays, work=work, **options)
        return out.host(), lse.host()

    return run


def batch(seqs, *, window=128, ring_len=134, plane_order="interleaved", mode="causal", heads=64):
    """Sequences of (first position, tokens), state i each, with no more than their visible records
    in a slab of NaN; two padding tokens at the end."""
    rng = np.random.default_rng(sum(first for first, _ in seqs))
    fmt = helpers.record_format(512, plane_order=plane_order)
    layout = helpers.make_layout(fmt, ring_len)
    slab = helpers.poisoned_slab(layout, len(seqs))
    state_ids, positions, cu = [], [], [0]
    for state, (first, tokens) in enumerate(seqs):
        low = max(0, first - window + (mode != "block"))
        stored = np.arange(low, first + tokens)
        helpers.store(slab, layout, 1, helpers.random_bf16(rng, (len(stored), 512)), state, stored)
        state_ids += [state] * tokens
        positions += range(first, first + tokens)
        cu.append(len(positions))
    state_ids, positions, cu = [*state_ids, -1, -1], [*positions, 0, 0], [*cu, len(positions) + 2]
    plan = build_decode_plan(
        helpers.i32(state_ids),
        helpers.i32(positions),
        window=window,
        ring_len=ring_len,
        mode=mode,
        cu_seqlens_q=helpers.i32(cu),
    )
    q = helpers.random_bf16(rng, (len(positions), heads, 512))
    return q, slab, layout, plan, rng.standard_normal(heads, np.float32)


def groups_of(plan, tokens):
    groups = -(-plan.max_seqlen_q // tokens)
    return Work(tokens, groups, groups * plan.num_seqs)


CASES = [
    {"seqs": [(1000, 6), (0, 1), (125, 4), (133, 3)]},
    {"seqs": [(1000, 3), (70, 2)], "heads": 128},
    {"seqs": [(1000, 4), (3, 5)], "plane_order": "planar"},
    {"seqs": [(1000, 8), (131, 8)], "ring_len": 136},
    {"seqs": [(60, 3), (7, 2)], "window": 8, "ring_len": 12},
    {"seqs": [(1000, 6), (0, 2)], "mode": "draft_step"},
    {"seqs": [(128, 5), (0, 2)], "mode": "block"},
]


@needs_gxx
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(decode, case):
    """Units of 1, 3 and 8 tokens, single tiles, halves and quarters of them, on one block or on
    three: within the bound of the float64 reference, the same bits, nothing else written, zeros
    for padding."""
    q, slab, layout, plan, sink = batch(**case)
    options = {"softmax_scale": 512**-0.5, "sink": sink}
    expected = expected_decode(q, slab, layout, 1, plan, **options)
    first = None
    groups = [groups_of(plan, tokens) for tokens in (8, 3, 1)]
    cuts = [*groups, TILES, TILES, HALVES, QUARTERS]
    for seed, work in enumerate(cuts):
        blocks = 3 if seed % 2 else 1
        found = decode(q, slab, layout, plan, work=work, blocks=blocks, seed=seed, **options)
        if first is None:
            first = found
            assert_within_bound(*found, expected)
            assert not found[0][-2:].any()
            assert np.isneginf(found[1][-2:]).all()
        for a, b in zip(first, found, strict=True):
            assert np.array_equal(a, b), work


@needs_gxx
@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_inverse_rotation(decode, pairing):
    """The last 64 columns turned back by the position, up to the last one there is; no sink."""
    q, slab, layout, plan, _ = batch([(2**31 - 8, 3), (5, 2)])
    options = {"softmax_scale": 512**-0.5, "rope_out": Rope(10_000.0, 64, pairing)}
    expected = expected_decode(q, slab, layout, 1, plan, **options)
    whole = decode(q, slab, layout, plan, work=groups_of(plan, 3), **options)
    assert_within_bound(*whole, expected)
    for work in (TILES, QUARTERS):
        tiles = decode(q, slab, layout, plan, work=work, **options)
        assert np.array_equal(whole[0], tiles[0])


@needs_gxx
def test_nan_stays_with_those_who_see_it(decode):
    """NaN by scale and by element in the two newest keys, and in the oldest: the tokens that see
    one are NaN as a whole, the others have the bits that they have without it."""
    q, slab, layout, plan, sink = batch([(1000, 6)])
    options = {"softmax_scale": 512**-0.5, "sink": sink}
    clean = decode(q, slab, layout, plan, work=groups_of(plan, 6), **options)
    values, scales = layout.planes(slab, 1)
    scales[0, 1005 % 134, 0, 3] = 0xFF
    values[0, 1004 % 134, 0, 77] = 0xFF
    values[0, 873 % 134, 0, 500] = 0x7F  # seen by the first token only
    for work in (groups_of(plan, 6), groups_of(plan, 2), TILES):
        out, lse = decode(q, slab, layout, plan, work=work, **options)
        found = helpers.from_bf16(out)
        assert np.isnan(found[[0, 4, 5]]).all()
        assert np.isnan(lse[[0, 4, 5]]).all()
        assert np.array_equal(out[1:4], clean[0][1:4])


@needs_gxx
def test_all_codes(decode):
    """Every element byte under scales of every size, and every scale code: one key at a time, so
    that the output is that key, or NaN where it holds one or a value beyond bf16."""
    fmt = helpers.record_format(512)
    layout = helpers.make_layout(fmt, 12)
    slab = helpers.poisoned_slab(layout, 1)
    values, scales = layout.planes(slab, 1)
    codes = np.arange(256, dtype=np.uint8)
    finite = np.tile(np.where(codes & 0x7F == 0x7F, 0, codes), 2)
    for row, scale in enumerate((0, 1, 3, 105, 127, 134, 135, 200, 246)):
        values[0, row, 0], scales[0, row, 0] = finite, scale
    values[0, 9, 0], scales[0, 9, 0] = 0x38, np.arange(9, 249, 15)  # 1.0
    values[0, 10, 0], scales[0, 10, 0] = 0x38, 255
    values[0, 11, 0], scales[0, 11, 0] = 0x7E, 247  # 448 * 2^120
    plan = build_decode_plan(
        np.zeros(12, np.int32), helpers.i32(range(12)), window=1, ring_len=12, mode="causal"
    )
    q = np.zeros((12, 64, 512), np.uint16)
    expected = expected_decode(q, slab, layout, 1, plan, softmax_scale=1.0)
    out, _ = decode(q, slab, layout, plan, work=TILES, softmax_scale=1.0)
    found, exact = helpers.from_bf16(out), helpers.from_bf16(helpers.bf16(expected.out))
    assert np.array_equal(found[:10], exact[:10])  # as numbers: a sum makes +0 of -0
    assert np.isnan(found[10:]).all()


@needs_gxx
@pytest.mark.parametrize("offset_len", [(268, 5), (-1, 5), (3, -1), (2**31 - 1, 2**31 - 1)])
def test_outside_the_slab(decode, offset_len):
    """A row outside the slab's 2 x 134 rows, or a negative length, among tokens that see keys:
    output 0 and lse -inf."""
    q, slab, layout, plan, sink = batch([(300, 2), (10, 1)])
    rows = plan.offset_len.copy()
    rows[1] = offset_len
    plan = dataclasses.replace(plan, offset_len=rows)
    for work in (groups_of(plan, 2), TILES):
        out, lse = decode(q, slab, layout, plan, work=work, softmax_scale=0.04, sink=sink)
        assert not out[1].any()
        assert np.isneginf(lse[1]).all()
        assert np.isfinite(lse[[0, 2]]).all()


@needs_gxx
def test_positions_in_any_order(decode):
    """A plan whose tokens of a sequence fall instead of rise: the unit takes the whole ring."""
    q, slab, layout, plan, sink = batch([(1000, 4)])
    back = [3, 2, 1, 0, 4, 5]
    turned = {name: getattr(plan, name)[back] for name in ("positions", "offset_len", "state_ids")}
    turned = dataclasses.replace(plan, **turned)
    options = {"softmax_scale": 512**-0.5, "sink": sink}
    rising = decode(q, slab, layout, plan, work=groups_of(plan, 4), **options)
    falling = decode(q[back], slab, layout, turned, work=groups_of(plan, 4), **options)
    assert np.array_equal(rising[0][back], falling[0])
