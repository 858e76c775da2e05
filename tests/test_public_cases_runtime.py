"""Public cases about CuPy, NVRTC, Numba and kernel arguments; docs/public-cases.md says what broke
elsewhere."""

import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import bf16, i32, make_layout, operations, poisoned_slab, record_format, to_backend

import ringslab as rs
from ringslab.engine.backends import choose_backend
from ringslab.errors import BackendError, KernelBuildError
from ringslab.rawkernels.cuda.registry import find_kernels
from ringslab.rawkernels.device import probe
from ringslab.rawkernels.device.kernel_source import FORMAT_MACROS
from ringslab.rawkernels.device.nvrtc import compile_cubin, compile_options
from ringslab.tools.doctor_rules import find

TESTS = Path(__file__).parent
KERNELS, _ = find_kernels()


def run_python(code, *paths, **env):
    """What a fresh process prints; `paths` go in front of its import path."""
    search = os.pathsep.join([*map(str, paths), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": search, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORT_ALL = """
    import pkgutil, importlib, ringslab as rs
    for module in pkgutil.walk_packages(rs.__path__, "ringslab."):
        # A Triton kernel is one at import; its bench asks for it only where Triton is wanted.
        if not module.name.startswith(("ringslab.tests", "ringslab.tools.bench.triton_window")):
            importlib.import_module(module.name)
    cfg = rs.load_config("quickstart.yaml")
    print(cfg.slot_layout.slot_bytes, rs.plan_decode([0], [5], window=4, ring_len=6).index.tolist())
    try:
        rs.Engine(cfg, "cuda")
    except rs.errors.BackendError as error:
        print(str(error).splitlines()[0])
"""


def test_g01_cache_folder_that_cannot_be_made(tmp_path):
    """A CuPy that cannot make its cache folder raises FileNotFoundError when it is imported. All of
    ringslab imports, plans and checks; "cuda" says why it cannot run; HOME is nowhere either."""
    (tmp_path / "cupy.py").write_text(
        "import os\nos.mkdir(os.environ['CUPY_CACHE_DIR'])\nraise SystemExit('not reached')\n"
    )
    nowhere = "/proc/no/such/folder"
    out = run_python(IMPORT_ALL, tmp_path, CUPY_CACHE_DIR=nowhere, HOME=nowhere)
    assert out.startswith("48384 [[2, 3, 4, 5]]\n")
    assert "CuPy cannot be imported" in out
    assert nowhere in out


def test_g02_no_gpu_and_no_driver(tmp_path):
    """Without CuPy, CUDA bindings and NVTX every module imports, the configuration, the
    budget table and a plan work; only what needs a GPU fails, with one clear line."""
    for name in ("cupy", "cupyx", "nvtx"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('not installed')\n")
    out = run_python(IMPORT_ALL, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert out.splitlines()[0] == "48384 [[2, 3, 4, 5]]"
    assert "backend cuda cannot run on this machine: CuPy cannot be imported (not inst" in out
    layout = "from ringslab.tools.main import main; main(['layout', 'quickstart.yaml', '--json'])"
    assert '"slot_bytes": 48384' in run_python(layout, tmp_path)


def test_g05_what_the_simulator_does_not_show():
    """Index -1, a missing barrier and shuffles look right or do not exist in Numba's simulator. It
    runs the plan kernels alone, whose only barrier is a whole block's; they use no shuffle, no
    atomic, and the tests of barriers, captures and graphs on them carry the marker gpu."""
    users = [
        path.name for path in TESTS.glob("*.py") if 'NUMBA_ENABLE_CUDASIM="1"' in path.read_text()
    ]
    assert set(users) - {Path(__file__).name} == {"test_plan_device.py"}
    folder = TESTS.parent / "rawkernels" / "cuda"
    used = set()
    for path in folder.glob("*.py"):
        used |= set(re.findall(r"\bcuda\.((?:sync|shfl|atomic|vote|ballot)\w*)", path.read_text()))
    assert used == {"syncthreads"}


def test_g06_nothing_to_do(backend):
    """No tokens, no sequences, no segments: every operation returns early, arrays stay empty (the
    null pointer of an empty CuPy array is never launched on), and the slab keeps its bytes."""
    fmt, heads = record_format(32), 3
    layout = make_layout(fmt, 9)
    slab = to_backend(poisoned_slab(layout, 1), backend)
    ids = to_backend(i32([]), backend)
    rows, kv = (to_backend(np.zeros((0, n), np.uint8), backend) for n in (33, 32))
    vectors = to_backend(bf16(np.zeros((0, 32))), backend)
    q = to_backend(bf16(np.zeros((0, heads, 32))), backend)
    lse = to_backend(np.zeros((0, heads), np.float32), backend)
    scales = to_backend(np.zeros((0, 1), np.uint8), backend)
    rope = rs.Rope(10000.0, 32, "half")
    ops = operations(backend)
    rule = {"scale_rounding": "ceil", "amax_floor": 1e-4}
    ops.quantize_mxfp8(vectors, kv, scales, **rule)
    ops.dequantize_mxfp8(kv, scales, to_backend(np.zeros((0, 32), np.float32), backend))
    ops.apply_rope(q, ids, q, rope=rope)
    ops.encode_records(vectors, ids, rows, record_format=fmt, rope=rope)
    ops.store_records(slab, layout, 0, rows, ids, ids)
    ops.ring_store(slab, layout, 0, vectors, ids, ids, rope=rope)
    ops.seeded_activations(1, 0, ids, ids, vectors)
    ops.stack_activations(q, 1, 1, ids, ids, q, vectors)
    ops.digest_outputs(vectors, 0, to_backend(np.zeros(0, np.uint64), backend))
    decode = to_backend(rs.plan_decode([], [], window=4, ring_len=9), backend)
    ops.window_decode(q, slab, layout, 0, decode, q, lse, softmax_scale=1.0)
    for lengths in ([], [0, 0]):
        plan = rs.plan_prefill(lengths, lengths, lengths, window=4, ring_len=9)
        joint = to_backend(np.zeros((plan.history_rows, 33), np.uint8), backend)
        plan = to_backend(plan, backend)
        ops.load_history(slab, layout, 0, plan, joint)
        ops.window_prefill(q, joint, plan, fmt, q, lse, softmax_scale=1.0)
    assert (slab == 0xFF).all()


FORK = """
    import multiprocessing
    import numpy as np, ringslab as rs

    def work():
        x = np.zeros((2, 1, 32), np.float32)
        try:
            rs.apply_rope(x, [0, 1], rs.Rope(10000.0, 32, "half"))
            print("worked", flush=True)
        except rs.errors.BackendError as error:
            print(error, flush=True)

    if __name__ == "__main__":
        work()
        for method in ("fork", "spawn"):
            child = multiprocessing.get_context(method).Process(target=work)
            child.start()
            child.join()
            print(method, child.exitcode, flush=True)
"""


def test_g08_fork_after_start_on_the_cpu(tmp_path):
    """A worker forked after a kernel ran gets one clear error, where GNU OpenMP would end it with a
    signal (Numba's other thread layers can be forked); a spawned worker works."""
    script = tmp_path / "workers.py"  # a file: a spawned worker reads it again
    script.write_text(textwrap.dedent(FORK))
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    first, forked, fork_status, *spawned = run_python(code).splitlines()
    assert first == "worked"
    assert forked == "worked" or "start workers with the 'spawn' method" in forked
    assert [fork_status, *spawned] == ["fork 0", "worked", "spawn 0"]


def test_g08_fork_after_start_of_cuda(monkeypatch):
    """A CuPy that was asked for a device, then another process id, as a forked child has: both the
    probe and every launch say that it was forked, and what to do."""
    runtime = SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError
    )
    device = SimpleNamespace(compute_capability="90")
    cuda = SimpleNamespace(runtime=runtime, Device=lambda *id: device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    probe._cuda_process.cache_clear()
    try:
        assert probe.gpu_problem() is None
        assert probe.current_device() == 0
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert "start workers with the 'spawn' method" in probe.gpu_problem()
        with pytest.raises(BackendError, match="forked from one that had started it"):
            probe.current_device()
        with pytest.raises(BackendError, match="'spawn'"):
            choose_backend("cuda")
    finally:
        probe._cuda_process.cache_clear()


@pytest.mark.gpu
def test_g08_fork_after_start_on_a_gpu():
    """An engine runs, then a forked child asks for CUDA: one clear message. Importing alone starts
    no context, so a child of that can."""
    code = """
        import os, sys
        import numpy as np, ringslab as rs
        import ringslab.engine.engine, ringslab.rawkernels.cuda.window_decode
        cfg = rs.load_config("quickstart.yaml")

        def try_it():
            try:
                with rs.Engine(cfg, "cuda", 2) as engine:
                    engine.run([rs.Request("a", np.arange(4, dtype=np.int32), 2)])
                return "worked"
            except rs.errors.BackendError as error:
                return str(error)

        def fork():
            sys.stdout.flush()
            if os.fork() == 0:
                print(try_it(), flush=True)
                os._exit(0)
            os.wait()

        fork()
        print(try_it())
        fork()
    """
    before, parent, after = run_python(code).splitlines()
    assert (before, parent) == ("worked", "worked")
    assert "start workers with the 'spawn' method" in after


def test_g09_versions_that_do_not_fit():
    """A compiler newer than the driver, an architecture that it has dropped, and the CuPy release
    that broke Numba launches (13.5) outside the pins: each is named, with what mends it."""
    from test_doctor import make_facts

    (finding,) = find(make_facts(nvrtc="13.1", driver_cuda="13.0"))
    assert "NVRTC 13.1 is newer than the driver, which knows CUDA 13.0" in finding.what
    with pytest.raises(KernelBuildError, match=r"sm_21 \(NVRTC \d+\.\d+"):
        compile_cubin('extern "C" __global__ void f() {}', "f.cu", {}, {}, "sm_21")
    pins = (TESTS.parent / "pyproject.toml").read_text()
    assert '"cupy-cuda13x>=14.2,<15"' in pins


def test_g10_headers(monkeypatch):
    """NVRTC gets no include folder, so no header of a toolkit can be missing: what a kernel
    includes is handed over in memory. test_compile builds every kernel that way; here the smallest,
    while the variables that a compiler driver would search point nowhere."""
    for kernel in KERNELS:
        for arch in kernel.archs:
            for option in compile_options({}, arch):
                assert not re.match(r"-I|--include-path|-isystem", option)
    for variable in ("CUDA_HOME", "CUDA_PATH", "CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.setenv(variable, "/nowhere")
    kernel = next(kernel for kernel in KERNELS if kernel.name == "dequantize_mxfp8")
    macros = dict(FORMAT_MACROS + kernel.macro_sets[0])
    built = compile_cubin(kernel.text(), kernel.file_name, kernel.headers(), macros, "sm_80")
    assert built.cubin[:4] == b"\x7fELF"
    with pytest.raises(KernelBuildError, match=r'cannot open source file "cuda_fp8.h"'):
        compile_cubin('#include "cuda_fp8.h"\n', "f.cu", {}, {}, "sm_80")


@pytest.mark.parametrize("number", [0.125, 0.1, 1 / math.sqrt(512)])
def test_o06_python_numbers_as_kernel_arguments(number):
    """Every `float` of every kernel's parameters is 4 bytes and holds np.float32(number), where the
    low half of a double would be 0.0, -1.588e-23 or 3.013e+23; no parameter is a bare argument."""
    assert np.float64(0.1).view(np.uint64).astype(np.uint32).view(np.float32) < -1e-23
    seen = 0
    for kernel in KERNELS:
        names = [name for name, ctype in kernel.params.fields if ctype == "float"]
        blank = {name: b"" if ctype == "TensorMap" else 0 for name, ctype in kernel.params.fields}
        packed = kernel.params.pack(**{**blank, **dict.fromkeys(names, number)})
        for name in names:
            offset = kernel.params.dtype.fields[name][1]
            found = packed.view(np.uint8)[offset : offset + 4]
            assert found.tobytes() == np.float32(number).tobytes()
        seen += len(names)
    assert seen >= 5
