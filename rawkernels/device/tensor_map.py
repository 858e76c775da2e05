"""Tensor maps: what the copy engine of sm_90 must know of an array in global memory."""

import ctypes
from functools import lru_cache

import numpy as np

from ...layouts.errors import BackendError

TENSOR_MAP_BYTES = 128  # sizeof(CUtensorMap)
SWIZZLE_COLUMNS = 64  # bf16 columns of a box with the 128-byte swizzle
MAX_MAPS = 4096  # kept; an engine's buffers and batch sizes make some hundreds
_BF16_BYTES = 2


@lru_cache(maxsize=MAX_MAPS)
def bf16_tensor_map(address: int, rows: int, columns: int, box_rows: int) -> np.void:
    """Map of a bf16 array [rows, columns] at a device address, a multiple of 16: the 128 bytes that
    a kernel takes by value.

    Boxes are `box_rows` rows of 64 columns and lie in shared memory with the 128-byte swizzle. The
    map follows from the arguments alone, so a kept one stays right when memory is given again.
    Raises BackendError where the driver refuses.
    """
    from cuda.bindings import driver

    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        address,
        [u64(columns), u64(rows)],
        [u64(columns * _BF16_BYTES)],
        [u32(SWIZZLE_COLUMNS), u32(box_rows)],
        [u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise BackendError(
            f"cuTensorMapEncodeTiled: {error} for bf16 [{rows}, {columns}] at {address:#x}"
        )
    return np.void(ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES))


@lru_cache(maxsize=MAX_MAPS)
def head_tensor_map(
    address: int,
    tokens: int,
    heads: int,
    head_dim: int,
    box_tokens: int,
    box_heads: int,
    fp16: bool,
) -> np.void:
    """The same of a bf16 or fp16 array [tokens, heads, head_dim]: boxes of `box_tokens` tokens,
    `box_heads` heads and 64 columns, in shared memory [box_tokens, box_heads, 64]. What lies
    outside the array reads as zeros and is not written."""
    from cuda.bindings import driver

    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    types = driver.CUtensorMapDataType
    row_bytes = head_dim * _BF16_BYTES
    error, encoded = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if fp16 else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        3,
        address,
        [u64(head_dim), u64(heads), u64(tokens)],
        [u64(row_bytes), u64(heads * row_bytes)],
        [u32(SWIZZLE_COLUMNS), u32(box_heads), u32(box_tokens)],
        [u32(1), u32(1), u32(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise BackendError(
            f"cuTensorMapEncodeTiled: {error} for [{tokens}, {heads}, {head_dim}] at {address:#x}"
        )
    return np.void(ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES))
