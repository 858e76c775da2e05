"""`ringslab header`: what C compilers make of it, against NumPy's dtypes and real arrays."""

import ctypes
import inspect
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_build import build_library

import ringslab as rs
from ringslab.layouts import structs
from ringslab.layouts.config import packaged_configs
from ringslab.layouts.plans import DecodePlan, PrefillPlan
from ringslab.rawkernels.device.nvrtc import compile_cubin, compiler_version
from ringslab.tools import header_cmd
from ringslab.tools.main import main

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ALL = [rs.load_config(name) for name in packaged_configs()]
LANGUAGES = {
    "c11": ("-xc", "-std=c11", "-pedantic", "-Wall", "-Wextra", "-Werror"),
    "c++11": ("-xc++", "-std=c++11", "-Wall", "-Wextra", "-Werror"),
    "c++20": ("-xc++", "-std=c++20", "-Wall", "-Wextra", "-Werror"),
}
CUDA_TYPES = (
    "struct int2 { int x, y; }; struct int4 { int x, y, z, w; }; struct double2 { double x, y; };"
)


def compile_text(folder, text: str, *flags: str) -> subprocess.CompletedProcess:
    (folder / "a.c").write_text(text)
    command = ["g++", *flags, "-o", str(folder / "a"), "a.c"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@needs_compiler
@pytest.mark.parametrize("language", LANGUAGES)
def test_compilers_lay_it_out_as_numpy_does(tmp_path, language):
    """Every packaged configuration, plan and kernel: what sizeof and offsetof say, printed by a
    program, are the itemsize and the offsets of the dtypes that Python packs."""
    (tmp_path / "ringslab.h").write_text(header_cmd.render(ALL))
    lines, expected = [], []
    for struct in header_cmd.all_structs(ALL):
        lines.append(f'printf("%zu\\n", sizeof({struct.name}));')
        expected.append(struct.dtype.itemsize)
        for name in struct.dtype.names:
            lines.append(f'printf("%zu\\n", offsetof({struct.name}, {name}));')
            expected.append(struct.dtype.fields[name][1])
    text = '#include "ringslab.h"\n#include <stdio.h>\nint main(void) {\n'
    done = compile_text(
        tmp_path, text + "\n".join(lines) + "\nreturn 0;\n}\n", *LANGUAGES[language]
    )
    assert done.returncode == 0, done.stderr[:4000]
    printed = subprocess.run([str(tmp_path / "a")], capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == expected
    assert len(expected) > 500


@needs_compiler
def test_it_includes_under_cuda_and_refuses_another_layout(tmp_path):
    """With CUDA's vector types it takes those; a size that is wrong by one byte does not
    compile."""
    text = header_cmd.render([rs.load_config("quickstart.yaml")])
    flags = ("-xc++", "-std=c++17", "-fsyntax-only", "-D__CUDACC__")
    good = compile_text(tmp_path, CUDA_TYPES + "\n" + text, *flags)
    assert good.returncode == 0, good.stderr
    size = "RINGSLAB_SIZE(ringslab_quickstart_swa_mxfp8, 132)"
    assert size in text
    wrong = compile_text(tmp_path, CUDA_TYPES + "\n" + text.replace(size, size[:-2] + "3)"), *flags)
    assert wrong.returncode != 0
    assert "ringslab_quickstart_swa_mxfp8" in wrong.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvrtc_takes_it_with_the_kernel_of_the_docs(arch):
    """docs/embedding.md's kernel and all configurations, by NVRTC, which has no system headers: it
    builds, and the entry is there."""
    try:
        compiler_version()
    except rs.errors.BackendError as error:
        pytest.skip(str(error))
    page = (Path(__file__).resolve().parent.parent / "docs" / "embedding.md").read_text()
    (kernel,) = re.findall(r"^```c\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    source = f'#include "ringslab.h"\nextern "C" {kernel}'
    build = compile_cubin(source, "a.cu", {"ringslab.h": header_cmd.render(ALL)}, {}, arch)
    assert b"first_scale" in build.cubin


READER = """
#include "ringslab.h"
#include <string.h>
#ifdef __cplusplus
extern "C"
#endif
/* Copies the records that a plan's queries see, oldest first, through the slot struct. */
int64_t gather(const ringslab_quickstart_slot* slab, const ringslab_decode_plan* plan,
               ringslab_quickstart_swa_mxfp8* records) {
  int64_t count = 0;
  for (int32_t t = 0; t < plan->num_tokens; ++t) {
    int32_t row = plan->offset_len[2 * t], length = plan->offset_len[2 * t + 1];
    for (int32_t j = 0; j < length; ++j) {
      int32_t state_id = row / plan->ring_len, at = (row % plan->ring_len + j) % plan->ring_len;
      if (plan->index[(int64_t)t * plan->index_width + j] != state_id * plan->ring_len + at)
        return -1;
      records[count++] = slab[state_id].layer3_swa[at];
    }
  }
  return plan->num_pinned == NULL ? count : -2;
}
"""


@needs_compiler
def test_c_reads_a_slab_and_a_plan_in_place(tmp_path):
    """50 tokens in state slot 2 of a ring of 34: C walks a packed plan and the slab, without
    copies, and finds the bytes that `view` has at the plan's rows; a plan with pinned keys has a
    pointer where the other has null."""
    cfg = rs.load_config("quickstart.yaml")
    layer, layout = cfg.layers[3], cfg.slot_layout
    slab = rs.empty_slab(layout, 4)
    rng = np.random.default_rng(0)
    for start in range(0, 50, cfg.tokens_per_step):
        positions = np.arange(start, min(start + cfg.tokens_per_step, 50), dtype=np.int32)
        kv = rng.integers(0, 1 << 14, (positions.size, cfg.head_dim)).astype(np.uint16)
        rs.ring_store(slab, layout, 3, kv, np.full_like(positions, 2), positions)
    sizes = {"window": layer.window, "ring_len": layer.ring_len}
    plan = rs.plan_decode(np.array([2, 2], np.int32), np.array([48, 49], np.int32), **sizes)
    rows = plan.index[plan.index >= 0]
    expected = layout.view(slab, 3).reshape(-1, 1, 132)[rows, 0]

    (tmp_path / "ringslab.h").write_text(header_cmd.render([cfg]))
    (tmp_path / "reader.c").write_text(READER)
    library = build_library(tmp_path, "reader.c", (), "-xc", "-std=c11")
    library.gather.restype = ctypes.c_int64
    records = np.zeros((rows.size, 132), np.uint8)
    packed = structs.pack_plan(plan)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (slab, packed, records)]
    assert library.gather(*pointers) == rows.size == 2 * layer.window
    assert np.array_equal(records, expected)
    assert records.any()
    pinned = replace(plan, sink_tokens=1, num_pinned=np.zeros(2, np.int32))
    packed = structs.pack_plan(pinned)
    pointers[1] = ctypes.c_void_p(packed.ctypes.data)
    assert library.gather(*pointers) == -2


@pytest.mark.parametrize("cfg", ALL, ids=lambda cfg: cfg.name)
def test_structured_views_are_the_layouts_bytes(cfg):
    """The slot and block dtypes over real bytes share their memory, and each ring's field is what
    SlotLayout.view, planes and PagedLayout.view give."""
    layout = cfg.slot_layout
    dtype = structs.slot_dtype(layout)
    ring, last = layout.rings[0], layout.rings[-1]
    if layout.slot_bytes < 1 << 24:
        slab = np.random.default_rng(1).integers(0, 256, 2 * layout.slot_bytes, np.uint8)
        slots = slab.view(dtype)
        assert np.shares_memory(slots, slab)
        part = slots[1][ring.name]
        if ring.record_format.plane_order == "planar":
            values, scales = layout.planes(slab, ring.layer)
            assert np.array_equal(part["values"], values[1, :, 0])
            assert np.array_equal(part["scales"], scales[1, :, 0])
        else:
            whole = np.ascontiguousarray(part).view(np.uint8).reshape(ring.ring_len, -1)
            assert np.array_equal(whole, layout.view(slab, ring.layer)[1, :, 0])
    assert dtype.fields[last.name][1] + last.bytes == dtype.itemsize == layout.slot_bytes
    if cfg.paged_layout is not None:
        block = structs.block_dtype(cfg.paged_layout)
        assert block.itemsize == cfg.paged_layout.block_bytes
        assert [block.fields[name][1] for name in block.names] == [
            part.offset for part in cfg.paged_layout.layers
        ]


@pytest.mark.parametrize("kind", [DecodePlan, PrefillPlan])
def test_every_plan_array_has_its_shape_in_the_header(kind, monkeypatch):
    """Each array field of a plan is a pointer with its shape as comment, each count an int32; also
    where the compiler takes a docstring's indentation away, as Python 3.13 does."""
    docs, dtype = structs.plan_docs(kind), structs.plan_dtype(kind)
    monkeypatch.setattr(kind, "__doc__", inspect.cleandoc(kind.__doc__))
    assert structs.plan_docs(kind) == docs
    pointers = {name for name in dtype.names if dtype.fields[name][0] == np.uint64}
    assert pointers <= set(docs)
    assert all(docs[name].startswith("[") for name in pointers)
    counts = set(dtype.names) - pointers
    assert {"window", "ring_len", "num_seqs", "num_tokens"} <= counts


def test_pack_plan_refuses_what_c_could_not_read():
    """An int64 array, a strided one and something that is no plan are refused by name."""
    plan = rs.plan_decode([0, 0], [3, 4], window=4, ring_len=5)
    for index in (plan.index.astype(np.int64), plan.index[:, ::2]):
        with pytest.raises(rs.errors.LayoutError, match="index"):
            structs.pack_plan(replace(plan, index=index))
    with pytest.raises(rs.errors.LayoutError, match="tuple"):
        structs.pack_plan(())


def test_json_and_file_tell_the_same(tmp_path, capsys):
    """--json lists the structs and constants that the text defines; --out writes what stdout would
    have; two configurations of one name are refused."""
    assert main(["header", "quickstart.yaml"]) == 0
    text = capsys.readouterr().out
    assert main(["header", "quickstart.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for struct in report["structs"]:
        assert f"RINGSLAB_SIZE({struct['name']}, {struct['bytes']});" in text
    for name, value in report["constants"].items():
        assert f"#define {name} {value}\n" in text
    record = next(s for s in report["structs"] if s["name"] == "ringslab_quickstart_swa_mxfp8")
    assert [(f["name"], f["offset"], f["bytes"]) for f in record["fields"]] == [
        ("kv_values", 0, 128),
        ("kv_scales", 128, 4),
    ]
    path = tmp_path / "ringslab.h"
    assert main(["header", "quickstart.yaml", "--out", str(path)]) == 0
    assert path.read_text() == text
    assert capsys.readouterr().out == ""
    assert main(["header", "quickstart.yaml", "quickstart"]) == 2
    assert "ringslab_quickstart_swa_mxfp8" in capsys.readouterr().err
