"""Kernels that move and make records, shared by the operations on slabs and buffers.

Where a record lies is given by two byte addresses, of its values and of its scales, so that one
kernel serves interleaved rings, planar rings and plain buffers. Address -1: there is no record.
"""

from typing import Any

import numpy as np
from numba import prange

from ...layouts.formats import MX_BLOCK, RecordFormat
from ...layouts.rope import Rope
from ..arrays import bf16_bits
from ..ring_access import RingAccess
from .codec import bf16_round, bf16_value, power_of_two, quantize_vector, rule_arguments
from .dequantize_mxfp8 import e4m3_values
from .kernels import kernel, launch
from .rotation import NO_PAIRING, rope_arguments, rotate_vector

Addresses = tuple[np.ndarray, np.ndarray]  # int64 [n] each: values, scales


def buffer_addresses(rows: np.ndarray, fmt: RecordFormat) -> Addresses:
    """Addresses of whole records in a buffer; rows int64 [n], -1 for none."""
    values = np.where(rows < 0, -1, rows * fmt.record_bytes)
    return values, np.where(rows < 0, -1, values + fmt.value_bytes)


def ring_addresses(rows: np.ndarray, access: RingAccess) -> Addresses:
    """Addresses of records in a slab; rows int64 [n] = state_id * ring_len + ring index, or -1."""
    state_id, index = rows // access.ring_len, rows % access.ring_len
    slot = state_id * access.slot_bytes
    values = slot + access.value_offset + index * access.value_stride
    scales = slot + access.scale_offset + index * access.scale_stride
    return np.where(rows < 0, -1, values), np.where(rows < 0, -1, scales)


def rows_to_store(state_ids: np.ndarray, positions: np.ndarray, ring_len: int) -> np.ndarray:
    """Ring row of each token, int64 [T]; -1 for padding, and for a token whose row is taken by the
    token `ring_len` places later."""
    rows = state_ids.astype(np.int64) * ring_len + positions.astype(np.int64) % ring_len
    stored = state_ids >= 0
    if ring_len < state_ids.shape[0]:
        same = state_ids[ring_len:] == state_ids[:-ring_len]
        follows = positions[ring_len:].astype(np.int64) == positions[:-ring_len] + np.int64(
            ring_len
        )
        stored[:-ring_len] &= ~(same & follows)
    return np.where(stored, rows, -1)


@kernel
def _encode_rows(kv, positions, pairing, table, is_mx, ceil, floor_bits, out, values_at, scales_at):
    """kv uint16 [T, D]; out flat uint8."""
    tokens, dim = kv.shape
    for t in prange(tokens):
        if values_at[t] >= 0:
            x = np.empty(dim, np.float32)
            for i in range(dim):
                x[i] = bf16_value(kv[t, i])
            first = dim
            if pairing != NO_PAIRING:
                first = dim - 2 * table.shape[1]
                rotate_vector(x, first, positions[t], table, pairing, False)
                for i in range(first, dim):
                    x[i] = bf16_value(bf16_round(x[i]))
            if is_mx:
                quantize_vector(x, ceil, floor_bits, out, values_at[t], out, scales_at[t])
            else:
                for i in range(dim):
                    bits = kv[t, i] if i < first else bf16_round(x[i])
                    out[values_at[t] + 2 * i] = np.uint8(bits & np.uint16(0xFF))
                    out[values_at[t] + 2 * i + 1] = np.uint8(bits >> np.uint16(8))


def encode_rows(
    kv: Any, positions: Any, rope: Rope | None, fmt: RecordFormat, out: Any, addresses: Addresses
) -> None:
    """Encode kv bf16 [T, D] to the given addresses of `out`, flat uint8."""
    pairing, table = rope_arguments(rope)
    ceil, floor_bits = rule_arguments(fmt.scale_rounding, fmt.amax_floor)
    places = np.zeros(kv.shape[0], np.int32) if positions is None else positions
    launch(
        _encode_rows,
        kv.size,
        bf16_bits(kv, "kv"),
        places,
        pairing,
        table,
        fmt.type == "mxfp8",
        ceil,
        floor_bits,
        out,
        *addresses,
    )


@kernel
def _copy_rows(source, source_at, width, out, out_at):
    """source, out flat uint8; source_at -1: zeros, out_at -1: nothing."""
    for row in prange(out_at.shape[0]):
        if out_at[row] >= 0:
            for i in range(width):
                byte = np.uint8(0)
                if source_at[row] >= 0:
                    byte = source[source_at[row] + i]
                out[out_at[row] + i] = byte


def copy_records(
    source: Any, source_at: Addresses, fmt: RecordFormat, out: Any, out_at: Addresses
) -> None:
    """Copy records between flat uint8 arrays: values, then scales."""
    widths = (fmt.value_bytes, fmt.scale_bytes)
    for width, from_at, to_at in zip(widths, source_at, out_at, strict=True):
        if width:
            work = from_at.shape[0] * width
            launch(_copy_rows, work, source, from_at, width, out, to_at)


@kernel
def _decode_rows(source, values_at, scales_at, is_mx, table, out):
    """source flat uint8; out float32 [n, D]."""
    rows, dim = out.shape
    for row in prange(rows):
        at = values_at[row]
        if at >= 0 and is_mx:
            for block in range(dim // MX_BLOCK):  # exact: records have whole blocks
                scale = power_of_two(np.int64(source[scales_at[row] + block]))
                for i in range(block * MX_BLOCK, (block + 1) * MX_BLOCK):
                    out[row, i] = table[source[at + i]] * scale
        elif at >= 0:
            for i in range(dim):
                low, high = np.uint16(source[at + 2 * i]), np.uint16(source[at + 2 * i + 1])
                out[row, i] = bf16_value(np.uint16(low | np.uint16(high << np.uint16(8))))


def decode_rows(source: Any, addresses: Addresses, fmt: RecordFormat) -> np.ndarray:
    """float32 [n, D] of the records at the given addresses of `source`, flat uint8. Rows without a
    record are not written."""
    out = np.empty((addresses[0].shape[0], fmt.head_dim), np.float32)
    is_mx = fmt.type == "mxfp8"
    launch(_decode_rows, out.size, source, *addresses, is_mx, e4m3_values(), out)
    return out
