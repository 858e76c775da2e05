"""Launcher of dequantize_mxfp8.cu."""

from typing import Any

from ...layouts.formats import MX_BLOCK
from ...layouts.sizes import div_ceil
from ..checks import check_dequantize_mxfp8
from ..device.kernel_source import KernelSource, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel

PARAMS = ParamsStruct(
    "DequantizeParams",
    (
        ("values", "const uint8_t*"),
        ("scales", "const uint8_t*"),
        ("out", "float*"),
        ("num_blocks", "int64_t"),
        ("width", "int64_t"),
        ("blocks_per_row", "int64_t"),
    ),
    docs=(
        ("values", "[num_rows, width]"),
        ("scales", "[num_rows, blocks_per_row]"),
        ("out", "[num_rows, width]"),
        ("num_blocks", "num_rows * blocks_per_row"),
    ),
)
DEQUANTIZE = KernelSource(
    "dequantize_mxfp8", PARAMS, macro_sets=(macro_set(RAGGED=0), macro_set(RAGGED=1))
)
KERNELS = (DEQUANTIZE,)

THREADS = 256
WARPS = 8
WARP_BLOCKS = 32  # MX blocks of a warp where rows are whole blocks
VECTOR_BYTES = 16


def dequantize_mxfp8(values: Any, scales: Any, out: Any, *, stream: Any = None) -> None:
    """values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)] -> out float32 [n, D]."""
    check_dequantize_mxfp8(values, scales, out)
    check_current_device("dequantize_mxfp8", values)

    rows, width = values.shape
    num_blocks = rows * div_ceil(width, MX_BLOCK)
    aligned = (device_pointer(values) | device_pointer(out)) % VECTOR_BYTES == 0
    ragged = width % MX_BLOCK != 0 or not aligned
    grid = (div_ceil(num_blocks, WARPS * (1 if ragged else WARP_BLOCKS)),)

    params = PARAMS.pack(
        values=device_pointer(values),
        scales=device_pointer(scales),
        out=device_pointer(out),
        num_blocks=num_blocks,
        width=width,
        blocks_per_row=div_ceil(width, MX_BLOCK),
    )

    get_kernel(DEQUANTIZE, macro_set(RAGGED=int(ragged))).launch(grid, (THREADS,), params, stream)
