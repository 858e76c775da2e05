"""The Numba CUDA plan kernels: in Numba's simulator, as PTX, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plan_cases import (
    assert_same_decode,
    assert_same_prefill,
    fill_decode,
    fill_prefill,
    random_decode,
    random_prefill,
)

import ringslab as rs
from ringslab.rawkernels.reference.plan_decode import plan_decode as reference_decode
from ringslab.rawkernels.reference.plan_prefill import plan_prefill as reference_prefill
from ringslab.schedules.plan_decode import build_decode_plan

TESTS = Path(__file__).parent


def run_python(*args, **env):
    """A fresh process with this one's import paths: Numba reads its switches at import."""
    paths = os.pathsep.join([*filter(None, sys.path), str(TESTS)])
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": paths, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_simulator_equals_reference():
    """150 random decode batches of all modes and 150 prefill batches, with sequences cut unevenly
    over 1 to 4 threads and spare capacity, equal the reference's loops value for value."""
    done = run_python(str(TESTS / "simulate_plans.py"), "150", NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared 150 decode and 150 prefill plans" in done.stdout


COMPILE = """
from types import SimpleNamespace
from numba import cuda, types
import numba.cuda.dispatcher as dispatcher
# Inlined device functions ask for the current device's capability; there is none here.
dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
from ringslab.rawkernels.cuda.numba_cuda import ready_numba
from ringslab.rawkernels.cuda.plan_decode import decode_kernel
from ringslab.rawkernels.cuda.plan_prefill import sequences_kernel, tokens_kernel
ready_numba()
row, rows, word = types.int32[::1], types.int32[:, ::1], types.int64
for kernel, signature in (
    (decode_kernel, (row,) * 4 + (word,) * 5 + (rows, rows)),
    (sequences_kernel, (row,) * 4 + (word,) * 4 + (row, rows, row)),
    (tokens_kernel, (row,) * 4 + (word,) * 3 + (row, row, row, rows)),
):
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=(9, 0))
    assert ".target sm_90" in ptx
    print(kernel.py_func.__name__, len(ptx))
"""


def test_kernels_compile_without_a_gpu():
    """All three kernels become PTX for sm_90 with the types of a launch."""
    done = run_python("-c", COMPILE, NUMBA_ENABLE_CUDASIM="0")
    if "NvvmSupportError" in done.stderr or "libNVVM cannot be found" in done.stderr:
        pytest.skip("libNVVM is not installed here, so Numba cannot make PTX")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_nothing_is_imported_before_a_gpu_array_comes():
    """Host plans load neither CuPy nor numba.cuda."""
    code = (
        "import sys, ringslab as rs\n"
        "rs.plan_decode([0], [5], window=4, ring_len=8)\n"
        "rs.plan_prefill([0], [5], [5], window=4, ring_len=8)\n"
        "print([m for m in ('cupy', 'numba', 'numba.cuda') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"


@pytest.mark.gpu
def test_gpu_fills_equal_reference():
    """200 random batches of both kinds, with the threads of real use, in poisoned CuPy arrays."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from ringslab.rawkernels.cuda.plan_decode import plan_decode
    from ringslab.rawkernels.cuda.plan_prefill import plan_prefill

    for seed in range(200):
        case, extra = random_decode(seed), seed % 3
        assert_same_decode(
            fill_decode(plan_decode, case, cupy, extra),
            fill_decode(reference_decode, case, extra=extra),
            f"seed={seed} {case}",
        )
        case = random_prefill(seed)
        assert_same_prefill(
            fill_prefill(plan_prefill, case, cupy, extra),
            fill_prefill(reference_prefill, case, extra=extra),
            f"seed={seed} {case}",
        )


@pytest.mark.gpu
def test_gpu_public_calls_equal_host():
    """The public calls with CuPy arrays give the host's plan, with no argument more: 4,096
    sequences, ragged, and the worked examples."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    rng = np.random.default_rng(1)
    q = rng.integers(0, 9, 4096)
    k = q + rng.integers(0, 3000, 4096)
    states = rng.permutation(4096)
    host = [np.asarray(a, np.int32) for a in (states, q, k)]
    args = {"window": 128, "ring_len": 134}
    want = rs.plan_prefill(*host, **args)
    got = rs.plan_prefill(*map(cupy.asarray, host), **args)
    assert_same_prefill(got, want)
    assert (got.num_seqs, got.max_seqlen_q) == (want.num_seqs, want.max_seqlen_q)

    q = rng.integers(0, 7, 300)
    cu = np.concatenate([[0], np.cumsum(q)]).astype(np.int32)
    first = rng.integers(0, 3000, 300)
    tokens = np.repeat(np.arange(300), q)
    positions = (first[tokens] + np.arange(cu[-1]) - cu[tokens]).astype(np.int32)
    host = [tokens.astype(np.int32), positions]
    for mode in ("causal", "block", "draft_step"):
        want = build_decode_plan(*host, cu_seqlens_q=cu, mode=mode, **args)
        given = [cupy.asarray(a) for a in (*host, cu)]
        got = build_decode_plan(*given[:2], cu_seqlens_q=given[2], mode=mode, **args)
        assert_same_decode(got, want, mode)
    got = rs.plan_decode(cupy.asarray([3], "i4"), cupy.asarray([1000], "i4"), **args)
    assert got.offset_len.get().tolist() == [[471, 128]]
    assert got.cu_seqlens_q.get().tolist() == [0, 1]


@pytest.mark.gpu
def test_g06_gpu_empty_batches():
    """0 tokens, 0 sequences, only empty sequences: an early return, no launch error."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    none = cupy.zeros(0, np.int32)
    args = {"window": 4, "ring_len": 8}
    assert rs.plan_decode(none, none, **args).index.shape == (0, 4)
    assert rs.plan_prefill(none, none, none, **args).num_segments.get().tolist() == [0]
    zero = cupy.zeros(3, np.int32)
    plan = rs.plan_prefill(zero, zero, zero, **args)
    assert plan.num_segments.get().tolist() == [3]
    assert plan.cu_seqlens_q.get().tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
def test_gpu_plans_in_a_graph():
    """Captured once, replayed with other values in the same arrays: no host synchronisation."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from ringslab.rawkernels.cuda.plan_decode import plan_decode
    from ringslab.rawkernels.cuda.plan_prefill import plan_prefill

    decode, prefill = (draw(seed) for draw, seed in ((random_decode, 4), (random_prefill, 4)))
    first = fill_decode(plan_decode, decode, cupy), fill_prefill(plan_prefill, prefill, cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    states = cupy.asarray(decode.state_ids)
    q = cupy.asarray(prefill.seqlens_q)
    cupy.cuda.Device().synchronize()
    args = {"window": prefill.window, "ring_len": prefill.ring_len, "stream": stream}
    outs = first[1]
    with stream:
        stream.begin_capture()
        plan_decode(
            states,
            first[0].positions,
            first[0].cu_seqlens_q,
            0,
            first[0].offset_len,
            first[0].index,
            window=decode.window,
            ring_len=decode.ring_len,
            mode=decode.mode,
            stream=stream,
        )
        plan_prefill(
            outs.state_ids,
            q,
            outs.seqlens_k,
            0,
            outs.cu_seqlens_q,
            outs.positions,
            outs.token_state_ids,
            outs.segments,
            outs.num_segments,
            outs.pivots,
            **args,
        )
        with pytest.raises(rs.errors.PlanError, match="max_seqlen_q"):
            rs.plan_prefill(outs.state_ids, q, outs.seqlens_k, window=4, ring_len=8, stream=stream)
        graph = stream.end_capture()
    decode.swa_valid_start = prefill.swa_valid_start = 0
    for shift in (1, 5):
        decode.state_ids = np.where(decode.state_ids < 0, -1, decode.state_ids + shift)
        decode.state_ids = decode.state_ids.astype(np.int32)
        prefill.seqlens_q = prefill.seqlens_q[::-1].copy()
        prefill.seqlens_k = np.maximum(prefill.seqlens_k, prefill.seqlens_q)
        states.set(decode.state_ids)
        q.set(prefill.seqlens_q)
        outs.seqlens_k.set(prefill.seqlens_k)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = fill_decode(reference_decode, decode)
        np.testing.assert_array_equal(first[0].offset_len.get(), want.offset_len)
        np.testing.assert_array_equal(first[0].index.get(), want.index)
        want = fill_prefill(reference_prefill, prefill)
        np.testing.assert_array_equal(outs.pivots.get(), want.pivots)
        np.testing.assert_array_equal(outs.segments.get(), want.segments)


@pytest.mark.gpu
def test_gpu_refuses_mixed_places_and_dtypes():
    """A NumPy array among CuPy arrays, a list, and int64 are ArgumentErrors before any launch."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    two = cupy.zeros(2, np.int32)
    args = {"window": 4, "ring_len": 8}
    for states, positions in (
        (two, np.zeros(2, np.int32)),
        (two, [0, 1]),
        (two.astype(np.int64), two),
        (two, two.astype(np.int64)),
        (two, cupy.zeros(3, np.int32)),
        (two, cupy.zeros(4, np.int32)[::2]),
    ):
        with pytest.raises(rs.errors.ArgumentError):
            rs.plan_decode(states, positions, **args)
        with pytest.raises(rs.errors.ArgumentError):
            rs.plan_prefill(states, positions, two, num_tokens=2, max_seqlen_q=1, **args)


@pytest.mark.gpu
def test_gpu_plans_on_a_stream_of_another_library():
    """A stream that is known by `__cuda_stream__` alone, as other libraries have it: both plans
    equal the host's."""
    import cupy

    queue = cupy.cuda.Stream(non_blocking=True)

    class Foreign:
        def __cuda_stream__(self):
            return 0, queue.ptr

    sizes = {"window": 8, "ring_len": 9}
    tokens, lengths = ([1, 0, 1], [5, 0, 12]), ([1, 0], [2, 3], [11, 3])
    with queue:
        on_device = [[cupy.asarray(np.int32(x)) for x in given] for given in (tokens, lengths)]
    queue.synchronize()
    decode = rs.plan_decode(*on_device[0], **sizes, stream=Foreign())
    prefill = rs.plan_prefill(*on_device[1], **sizes, stream=Foreign())
    queue.synchronize()
    assert_same_decode(decode, rs.plan_decode(*tokens, **sizes))
    assert_same_prefill(prefill, rs.plan_prefill(*lengths, **sizes))
