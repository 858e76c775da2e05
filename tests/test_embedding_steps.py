"""docs/examples: a decode step driven from NumPy, CuPy, JAX and Numba, each a program of its own
that shares memory and says so. They run as users run them, in processes of their own."""

import base64
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import from_bf16

import ringslab as rs
from ringslab.rawkernels.operations import load_operations

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
DECODED = 2.0**-7  # two roundings to bf16 apart, on outputs below 1 in magnitude


def run_example(library: str, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{library}_step.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    report["out"] = np.frombuffer(base64.b64decode(report["out_bf16"]), np.uint16)
    return report


@pytest.fixture(scope="module")
def on_numpy():
    return run_example("numpy")


def check_same(report: dict, on_numpy: dict) -> None:
    """The same bytes in the slab, outputs within the bound, and no copies."""
    assert report["slab_sha256"] == on_numpy["slab_sha256"]
    error = np.abs(from_bf16(report["out"]) - from_bf16(on_numpy["out"])).max()
    assert error <= DECODED
    assert report["same_memory"]
    assert all(report["same_memory"].values())


def require(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def test_numpy_step_computes_what_the_reference_does(on_numpy, monkeypatch):
    """30 stored tokens and 2 new ones, run by the float64 reference: outputs within the bound, in
    two heads of which one sees something else than the other; three views share the slab."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import step

    cfg = rs.load_config("quickstart.yaml")
    layer, layout, ops = cfg.layers[0], cfg.slot_layout, load_operations("reference")
    arrays = step.make_inputs(cfg)
    slab = rs.empty_slab(layout, step.NUM_STATE_SLOTS)
    for name in ("known_", ""):
        ids = arrays[f"{name}states"], arrays[f"{name}positions"]
        ops.ring_store(slab, layout, 0, arrays[f"{name}kv"], *ids, rope=layer.rope)
    q = arrays["q"].copy()
    ops.apply_rope(arrays["q"], arrays["positions"], q, rope=layer.rope)
    sizes = {"window": layer.window, "ring_len": layer.ring_len}
    plan = rs.plan_decode(arrays["states"], arrays["positions"], **sizes)
    assert plan.offset_len[:, 1].tolist() == [31, 32]
    out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    ops.window_decode(q, slab, layout, 0, plan, out, lse, softmax_scale=layer.softmax_scale)
    expected = from_bf16(out).reshape(-1)
    assert np.abs(from_bf16(on_numpy["out"]) - expected).max() <= DECODED
    assert 0.1 < np.abs(expected).max() < 2
    assert on_numpy["same_memory"].keys() == {"view", "structured view", "mapping"}


def test_jax_step_on_the_host(on_numpy):
    """JAX arrays of the host: queries and keys go in, the output comes out, all in place."""
    require("jax")
    report = run_example("jax", JAX_PLATFORMS="cpu")
    check_same(report, on_numpy)
    assert "out to jax" in report["same_memory"]


@pytest.mark.gpu
def test_cupy_step(on_numpy):
    """CuPy arrays and a stream of the caller's."""
    check_same(run_example("cupy"), on_numpy)


@pytest.mark.gpu
def test_jax_step(on_numpy):
    """JAX on the GPU, on its own stream, by DLPack; skipped where JAX has no GPU."""
    require("jax", "jax_cuda13_plugin")
    report = run_example("jax", JAX_PLATFORMS="cuda,cpu")  # an error where there is no GPU
    check_same(report, on_numpy)
    assert "out to jax" in report["same_memory"]


@pytest.mark.gpu
def test_numba_step(on_numpy):
    """Numba CUDA kernels before and after, their device arrays in between."""
    check_same(run_example("numba"), on_numpy)


def test_the_numba_kernels_compile_without_a_gpu(monkeypatch):
    """Numba makes PTX for sm_90 of both kernels of the example: a shift, and a store of the bits
    it gives."""
    numba, cuda = pytest.importorskip("numba"), pytest.importorskip("numba.cuda")
    if find_spec("numba_cuda") is not None:
        pytest.skip("numba-cuda compiles with a GPU only; test_numba_step covers it there")
    # A view of a number is a device function, for which Numba asks the GPU what it can.
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)
    text = (EXAMPLES / "numba_step.py").read_text()
    signatures = {
        "project": (numba.float32[::1], numba.uint16[::1]),
        "widen": (numba.uint16[::1], numba.float32[::1]),
    }
    for name, arguments in signatures.items():
        begin = text.index(f"def {name}(")
        names: dict = {"np": np, "cuda": cuda}
        exec(text[begin : text.index("\n\n\n", begin)], names)
        try:
            ptx, _ = cuda.compile_ptx(names[name], numba.void(*arguments), cc=(9, 0))
        except cuda.cudadrv.error.NvvmSupportError as error:
            pytest.skip(f"no NVVM: {error}")
        assert ("shr" if name == "project" else "shl") in ptx
        assert "st.global" in ptx
