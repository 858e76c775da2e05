"""Launcher of quantize_mxfp8.cu."""

from typing import Any

from ...layouts.formats import MX_BLOCK
from ...layouts.sizes import div_ceil
from ..checks import check_quantize_mxfp8
from ..device.kernel_source import KernelSource, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel

PARAMS = ParamsStruct(
    "QuantizeParams",
    (
        ("x", "const uint8_t*"),
        ("values", "uint8_t*"),
        ("scales", "uint8_t*"),
        ("num_blocks", "int64_t"),
        ("width", "int64_t"),
        ("blocks_per_row", "int64_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        ("x", "float32 or bf16 [num_rows, width]"),
        ("values", "[num_rows, width]"),
        ("scales", "[num_rows, blocks_per_row]"),
        ("num_blocks", "num_rows * blocks_per_row"),
    ),
)
QUANTIZE = KernelSource(
    "quantize_mxfp8",
    PARAMS,
    macro_sets=tuple(
        macro_set(X_BF16=bf16, SCALE_CEIL=ceil, RAGGED=ragged)
        for bf16 in (1, 0)
        for ceil in (1, 0)
        for ragged in (0, 1)
    ),
)
KERNELS = (QUANTIZE,)

WARPS = 2
THREADS = 32 * WARPS
WARP_BLOCKS = 32  # MX blocks of a warp where rows are whole blocks
VECTOR_BYTES = 16


def quantize_mxfp8(
    x: Any,
    values: Any,
    scales: Any,
    *,
    scale_rounding: str,
    amax_floor: float,
    stream: Any = None,
) -> None:
    """x float32 or bf16 [n, D] -> values uint8 [n, D], scales uint8 [n, div_ceil(D, 32)]."""
    check_quantize_mxfp8(x, values, scales, scale_rounding, amax_floor)
    check_current_device("quantize_mxfp8", x)

    rows, width = x.shape
    num_blocks = rows * div_ceil(width, MX_BLOCK)
    aligned = (device_pointer(x) | device_pointer(values)) % VECTOR_BYTES == 0
    ragged = width % MX_BLOCK != 0 or not aligned
    grid = (div_ceil(num_blocks, WARPS * (1 if ragged else WARP_BLOCKS)),)

    macros = macro_set(
        X_BF16=int(x.dtype.itemsize == 2),
        SCALE_CEIL=int(scale_rounding == "ceil"),
        RAGGED=int(ragged),
    )
    params = PARAMS.pack(
        x=device_pointer(x),
        values=device_pointer(values),
        scales=device_pointer(scales),
        num_blocks=num_blocks,
        width=width,
        blocks_per_row=div_ceil(width, MX_BLOCK),
        amax_floor=amax_floor,
    )

    get_kernel(QUANTIZE, macros).launch(grid, (THREADS,), params, stream)
