"""Launcher of dequantize_mxfp8.cu."""

from typing import Any

from ...layouts.formats import MX_BLOCK
from ...layouts.sizes import div_ceil
from ..checks import check_dequantize_mxfp8
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel

PARAMS = ParamsStruct(
    "DequantizeParams",
    (
        ("values", "const uint8_t*"),
        ("scales", "const uint8_t*"),
        ("out", "uint8_t*"),
        ("num_blocks", "int64_t"),
        ("width", "int64_t"),
        ("blocks_per_row", "int64_t"),
    ),
    docs=(
        ("values", "[num_rows, width]"),
        ("scales", "[num_rows, blocks_per_row]"),
        ("out", "float32 or bf16 [num_rows, width]"),
        ("num_blocks", "num_rows * blocks_per_row"),
    ),
)
WARPS = 4
THREADS = 32 * WARPS
VECTOR_BYTES = 16


def dequantize_macros(item_bytes: int, ragged: bool) -> MacroItems:
    """Macros for an element size of `out`; a warp has two rounds of 16 bytes a lane."""
    return macro_set(
        OUT_BF16=int(item_bytes == 2),
        RAGGED=int(ragged),
        LAUNCH_WARP_BLOCKS=2 * VECTOR_BYTES // item_bytes,  # exact: 8 or 16
    )


DEQUANTIZE = KernelSource(
    "dequantize_mxfp8",
    PARAMS,
    macro_sets=tuple(
        dequantize_macros(item_bytes, ragged) for item_bytes in (4, 2) for ragged in (False, True)
    ),
)
KERNELS = (DEQUANTIZE,)


def dequantize_mxfp8(values: Any, scales: Any, out: Any, *, stream: Any = None) -> None:
    """values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)] -> out float32 or bf16 [n, D]."""
    check_dequantize_mxfp8(values, scales, out)
    check_current_device("dequantize_mxfp8", values)

    rows, width = values.shape
    num_blocks = rows * div_ceil(width, MX_BLOCK)
    aligned = (device_pointer(values) | device_pointer(out)) % VECTOR_BYTES == 0
    ragged = width % MX_BLOCK != 0 or not aligned
    macros = dequantize_macros(out.dtype.itemsize, ragged)
    warp_blocks = 1 if ragged else dict(macros)["LAUNCH_WARP_BLOCKS"]
    grid = (div_ceil(num_blocks, WARPS * warp_blocks),)

    params = PARAMS.pack(
        values=device_pointer(values),
        scales=device_pointer(scales),
        out=device_pointer(out),
        num_blocks=num_blocks,
        width=width,
        blocks_per_row=div_ceil(width, MX_BLOCK),
    )

    get_kernel(DEQUANTIZE, macros).launch(grid, (THREADS,), params, stream)
