"""Every CUDA kernel builds for sm_80 and sm_90a without a GPU, in the shapes launchers state."""

import json
import re
import struct

import numpy as np
import pytest

from ringslab.layouts.errors import BackendError, KernelBuildError
from ringslab.rawkernels.cuda.registry import find_kernels
from ringslab.rawkernels.device.kernel_source import (
    PORTABLE_ARCHS,
    KernelSource,
    ParamsStruct,
    macro_set,
)
from ringslab.rawkernels.device.module import build_kernel
from ringslab.rawkernels.device.nvrtc import compile_cubin, compiler_version, parse_resources
from ringslab.rawkernels.device.progress import progress_to
from ringslab.tools import compile_cmd, main

ELF_MACHINE_CUDA = 190  # e_machine of a cubin


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        return compiler_version()
    except BackendError as error:
        pytest.skip(str(error))


KERNELS, ORPHANS = find_kernels()
BUILDS = [
    pytest.param(kernel, macros, arch, id=f"{kernel.name}-{i}-{arch}")
    for kernel in KERNELS
    for i, macros in enumerate(kernel.macro_sets)
    for arch in kernel.archs
]


@pytest.mark.parametrize(("kernel", "macros", "arch"), BUILDS)
def test_kernel_builds_without_spills(kernel, macros, arch):
    """A cubin for a CUDA machine, no compiler warning, no spilled register and no stack, at most
    255 registers."""
    build = build_kernel(kernel, macros, arch)
    assert build.cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", build.cubin, 18)[0] == ELF_MACHINE_CUDA
    assert "warning" not in build.log, build.log
    resources = parse_resources(build.log)[kernel.name]
    assert resources.spill_bytes == 0
    assert resources.stack_bytes == 0
    assert 0 < resources.registers <= 255


def test_every_cuda_file_is_built():
    """Each `.cu` file is in some launcher's KERNELS, so `ringslab compile` builds it."""
    assert ORPHANS == []


def test_kernels_include_only_our_headers():
    """G10: no kernel names a header outside rawkernels/cuda, and NVRTC gets no include folder."""
    for kernel in KERNELS:
        texts = [kernel.text(), *kernel.headers().values()]
        for line in "\n".join(texts).splitlines():
            if re.match(r"\s*#\s*include", line):
                assert re.search(r'"[\w.]+\.cuh"|<cstdint>|<cstring>', line), line


def test_a_build_is_told_once_and_then_cached(tmp_path, monkeypatch):
    """The progress hook hears of a build, and not of the second call, which is read from disk."""
    from ringslab.rawkernels.device.cubin_cache import open_cache

    kernel = next(kernel for kernel in KERNELS if kernel.name == "dequantize_mxfp8")
    cache, told = open_cache(tmp_path / "cache"), []
    with progress_to(told.append):
        first = build_kernel(kernel, kernel.macro_sets[0], "sm_80", cache)
        again = build_kernel(kernel, kernel.macro_sets[0], "sm_80", cache)
    assert told == ["building dequantize_mxfp8 for sm_80"]
    assert first == again


def test_build_error_shows_options_and_log():
    """The message holds the options, the file and line, and the compiler's words."""
    source = 'extern "C" __global__ void f() { undefined_name(SIZE); }'
    with pytest.raises(KernelBuildError) as caught:
        compile_cubin(source, "f.cu", {}, {"SIZE": 7}, "sm_90a")
    text = str(caught.value)
    assert "--gpu-architecture=sm_90a" in text
    assert "-DSIZE=7" in text
    assert 'f.cu(1): error: identifier "undefined_name" is undefined' in text


def test_an_architecture_the_compiler_dropped_is_named():
    """G09: sm_21 is refused by NVRTC; the message names it and the compiler's version."""
    with pytest.raises(KernelBuildError, match=r"sm_21 \(NVRTC \d+\.\d+"):
        compile_cubin('extern "C" __global__ void f() {}', "f.cu", {}, {}, "sm_21")


PARAMS = ParamsStruct(
    "LayoutParams",
    (("a", "int32_t"), ("b", "const uint8_t*"), ("c", "float"), ("d", "double"), ("e", "uint32_t")),
)


def test_params_have_the_same_layout_on_both_sides():
    """int32, pointer, float, double, uint32: offsets 0, 8, 16, 24, 32 and 40 bytes, as the compiler
    asserts for the text made from the dtype."""
    offsets = {name: PARAMS.dtype.fields[name][1] for name in PARAMS.dtype.names}
    assert offsets == {"a": 0, "b": 8, "c": 16, "d": 24, "e": 32}
    checks = "".join(
        f'static_assert(__INTADDR__(&((LayoutParams*)0)->{name}) == {at}, "{name}");\n'
        for name, at in offsets.items()
    )
    source = (
        '#include "p.cuh"\n' + checks + "static_assert(sizeof(LayoutParams) == PARAMS_BYTES);\n"
        'extern "C" __global__ void f(const __grid_constant__ LayoutParams p) {}'
    )
    common = KERNELS[0].headers()["common.cuh"]
    compile_cubin(source, "f.cu", {"p.cuh": PARAMS.render(), "common.cuh": common}, {}, "sm_80")


def test_params_refuse_what_does_not_fit():
    """2^31 in an int32 field raises instead of wrapping to a negative number."""
    packed = PARAMS.pack(a=-1, b=2**63, c=0.5, d=1.5, e=2**32 - 1)
    assert packed.shape == (1,)
    assert packed.dtype == PARAMS.dtype
    assert packed.tolist() == [(-1, 2**63, 0.5, 1.5, 2**32 - 1)]
    with pytest.raises(OverflowError):
        PARAMS.pack(a=2**31, b=0, c=0, d=0, e=0)


def test_parse_resources():
    """A ptxas log with two entries, one that spills and one with static shared memory."""
    log = """
ptxas info    : Compiling entry function 'spiller' for 'sm_90a'
ptxas info    : Function properties for spiller
    2080 bytes stack frame, 2536 bytes spill stores, 4980 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 2080 bytes cumulative stack size
ptxas info    : Compiling entry function 'tile' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 58 registers, used 1 barriers, 16392 bytes smem
"""
    found = parse_resources(log)
    assert vars(found["spiller"]) == {
        "registers": 32,
        "shared_bytes": 0,
        "stack_bytes": 2080,
        "spill_bytes": 7516,
    }
    assert (found["tile"].registers, found["tile"].shared_bytes) == (58, 16392)


def test_compile_command_json(capsys):
    """`compile --json`: the fixed keys for both architectures, and opcode counts without LDL and
    STL where a disassembler is installed."""
    assert main.main(["compile", "--json", "--kernel", "quantize_mxfp8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["arch"] for row in report["kernels"]} == set(PORTABLE_ARCHS)
    assert report["failures"] == []
    for row in report["kernels"]:
        assert {"name", "arch", "registers", "shared_bytes", "spill_bytes", "sass"} <= row.keys()
        if row["sass"] is not None:
            assert row["sass"]["EXIT"] > 0
            assert not {"LDL", "STL"} & row["sass"].keys()


def test_compile_command_fails_where_a_kernel_does(capsys, monkeypatch):
    """A macro set that a static_assert refuses, and a file that no launcher builds: status 1, the
    messages on stderr, and the kernels that do build are still reported."""
    good = next(kernel for kernel in KERNELS if kernel.name == "dequantize_mxfp8")
    bad = KernelSource(good.name, good.params, (macro_set(RAGGED=2),))
    monkeypatch.setattr(compile_cmd, "find_kernels", lambda: ((good, bad), ["forgotten.cu"]))
    assert main.main(["compile", "--json", "--no-sass", "--arch", "sm_80"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert len(report["kernels"]) == len(good.macro_sets)
    failed = [failure["name"] for failure in report["failures"]]
    assert failed == ["forgotten.cu", "dequantize_mxfp8"]
    assert "RAGGED is a switch" in captured.err


def test_compile_command_table(capsys):
    """The table names each kernel and ends with the number of builds and of spills."""
    assert main.main(["compile", "--no-sass", "--kernel", "dequantize", "--arch", "sm_90a"]) == 0
    out = capsys.readouterr().out
    assert out.count("dequantize_mxfp8") == 4
    assert "4 builds with NVRTC" in out
    assert "0 with spills" in out
    assert main.main(["compile", "--kernel", "no_such_kernel"]) == 1


def test_seed_scale_and_floor_are_float32():
    """amax_floor 1e-4 travels as the float32 0x38D1B717, whose exponent gives scale code 105."""
    from ringslab.rawkernels.cuda.quantize_mxfp8 import PARAMS as quantize_params

    packed = quantize_params.pack(
        x=0, values=0, scales=0, num_blocks=0, width=0, blocks_per_row=0, amax_floor=1e-4
    )
    assert packed["amax_floor"].view(np.uint32)[0] == 0x38D1B717
