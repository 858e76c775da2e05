"""Launchers and kernels on NumPy arrays: `launchers(monkeypatch, folder)` puts the g++ build of
each kernel (by cuda_on_host.hpp) in the place of the GPU. What runs is the launcher's own
arithmetic and the kernel's own source, less the instructions that only a GPU has."""

import ctypes
import functools
import re
from importlib import import_module
from pathlib import Path

from host_build import build_library

from ringslab.rawkernels.rope_tables import cached_rope_table

HERE = Path(__file__).resolve().parent
# memory.cuh's loads are inline PTX; here they are plain loads.
PTX_LOAD = re.compile(r"  asm volatile\(\"ld\.global.*?;\n  return v;", re.DOTALL)
ENTRY = """
#define HOST_THREADS 512
#include "cuda_on_host.hpp"
#undef __shared__
#define __shared__ static  // one block runs at a time
#define __CUDACC__
inline uint2 make_uint2(uint32_t x, uint32_t y) {{ return {{x, y}}; }}
inline void __syncwarp() {{ sync_warp(); }}
inline float __uint_as_float(uint32_t bits) {{ return bits_float(bits); }}
inline uint32_t __float_as_uint(float x) {{ return float_bits(x); }}
inline float low_bf16(uint32_t packed) {{ return half_of(packed, 0); }}
inline float high_bf16(uint32_t packed) {{ return half_of(packed, 1); }}
inline uint64_t atomicAdd(uint64_t* p, uint64_t x) {{ uint64_t old = *p; *p += x; return old; }}
template <typename T> T __shfl_sync(uint32_t, T value, int lane) {{
  WarpBoard& board = boards[threadIdx.x / 32];
  std::memcpy(board.words[threadIdx.x % 32], &value, sizeof value);
  sync_warp();
  T other;
  std::memcpy(&other, board.words[lane % 32], sizeof other);
  sync_warp();
  return other;
}}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {{
  for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {{
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}}
#include "{file}"
static {params} given;
extern "C" void launch(int grid, int threads, const {params}* params) {{
  given = *params;
  for (int i = 0; i < grid; i++) run_block([] {{ {name}(given); }}, i, threads, i);
}}
"""
LAUNCHERS = (
    "quantize_mxfp8",
    "dequantize_mxfp8",
    "apply_rope",
    "encode_records",
    "store_records",
    "ring_store",
    "load_history",
    "ring_load",
    "paged_store",
    "paged_load",
    "seeded_activations",
    "stack_activations",
    "digest_outputs",
)
SANITIZERS = (
    "-fsanitize=alignment,shift,bounds,integer-divide-by-zero,signed-integer-overflow",
    "-fno-sanitize-recover=all",
    "-static-libubsan",
)


class HostKernel:
    """What `get_kernel` returns here; `launch` runs the grid before it returns."""

    def __init__(self, folder: Path, source, macros) -> None:
        folder.mkdir(parents=True)
        for name, text in {**source.headers(), source.file_name: source.text()}.items():
            (folder / name).write_text(PTX_LOAD.sub("  return *p;", text))
        names = {"file": source.file_name, "name": source.name, "params": source.params.name}
        (folder / "host.cpp").write_text(ENTRY.format(**names))
        flags = ("-O1", "-std=c++20", "-w", f"-I{HERE}", "-I.", *SANITIZERS)
        self.library = build_library(folder, "host.cpp", macros, *flags)
        self.params_dtype = source.params.dtype

    def launch(self, grid, block, params, stream=None) -> None:
        assert params.dtype == self.params_dtype
        assert len(grid) == len(block) == 1
        if grid[0] > 0:
            self.library.launch(grid[0], block[0], ctypes.c_void_p(params.ctypes.data))


def address(array) -> int:
    return 0 if array is None or array.size == 0 else array.ctypes.data


def launchers(monkeypatch, folder: Path) -> dict:
    """The launch functions by name, taking NumPy arrays."""

    @functools.cache
    def get_kernel(source, macros=(), dynamic_shared_bytes=0):
        return HostKernel(folder / f"{source.name}-{len(list(folder.iterdir()))}", source, macros)

    replaced = {
        "get_kernel": get_kernel,
        "device_pointer": address,
        "check_current_device": lambda *_: None,
        "check_alignment": lambda *_: None,
        "device_rope_table": cached_rope_table,
    }
    modules = [import_module(f"ringslab.rawkernels.cuda.{name}") for name in LAUNCHERS]
    widths = import_module("ringslab.rawkernels.cuda.widths")
    for module in (*modules, widths):
        for name, value in replaced.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return {name: getattr(module, name) for name, module in zip(LAUNCHERS, modules, strict=True)}
