"""Kernels that move and make records, shared by the operations on slabs and buffers.

Where a part of a record lies (the record itself, or its K or its V) is given by two byte addresses,
of its values and of its scales, so that one kernel serves interleaved rings, planar rings, pages
and plain buffers. Address -1: there is no record.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from ...layouts.formats import MX_BLOCK, RecordFormat
from ...layouts.rings import ring_index
from ...layouts.rope import Rope
from ..arrays import kv_parts, value_bits
from ..ring_access import RingAccess
from .codec import (
    bf16_round,
    bf16_value,
    fp16_round,
    fp16_value,
    power_of_two,
    quantize_vector,
    rule_arguments,
)
from .dequantize_mxfp8 import e4m3_values
from .kernels import kernel, launch
from .rotation import NO_PAIRING, rope_arguments, rotate_vector

CODE_MXFP8, CODE_BF16, CODE_FP16 = 0, 1, 2  # how kernels are told a record type
TYPE_CODES = {"mxfp8": CODE_MXFP8, "bf16": CODE_BF16, "fp16": CODE_FP16}


@dataclass(frozen=True)
class Addresses:
    """Bytes where records lie: the values and scales of their first part, int64 [n] each (-1 for
    none), and how far behind them those of the second part are."""

    values: np.ndarray
    scales: np.ndarray
    value_part_stride: int
    scale_part_stride: int

    def part(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of the values and scales of part `i`."""
        return (
            np.where(self.values < 0, -1, self.values + i * self.value_part_stride),
            np.where(self.scales < 0, -1, self.scales + i * self.scale_part_stride),
        )


def whole_addresses(starts: np.ndarray, fmt: RecordFormat) -> Addresses:
    """Addresses of whole records that start at the bytes `starts`, int64 [n], -1 for none."""
    scales = np.where(starts < 0, -1, starts + fmt.part_value_bytes)
    return Addresses(starts, scales, fmt.part_bytes, fmt.part_bytes)


def buffer_addresses(rows: np.ndarray, fmt: RecordFormat) -> Addresses:
    """Addresses of whole records in a buffer; rows int64 [n], -1 for none."""
    return whole_addresses(np.where(rows < 0, -1, rows * fmt.record_bytes), fmt)


def ring_addresses(rows: np.ndarray, access: RingAccess) -> Addresses:
    """Addresses of records in a slab; rows int64 [n] = state_id * ring_len + ring index, or -1."""
    state_id, index = rows // access.ring_len, rows % access.ring_len
    slot = state_id * access.slot_bytes
    values = slot + access.value_offset + index * access.value_stride
    scales = slot + access.scale_offset + index * access.scale_stride
    return Addresses(
        np.where(rows < 0, -1, values),
        np.where(rows < 0, -1, scales),
        access.value_part_stride,
        access.scale_part_stride,
    )


def head_addresses(
    addresses: Addresses, part: int, fmt: RecordFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of each head's vector of a part, int64 [n * heads] each; latent records have one
    head."""
    heads = np.arange(fmt.num_kv_heads)
    steps = (fmt.part_value_bytes // fmt.num_kv_heads, fmt.part_scale_bytes // fmt.num_kv_heads)
    values, scales = (
        np.where(at[:, None] < 0, -1, at[:, None] + heads * step).reshape(-1)
        for at, step in zip(addresses.part(part), steps, strict=True)  # exact: vectors are equal
    )
    return values, scales


def rows_to_store(state_ids: np.ndarray, positions: np.ndarray, access: RingAccess) -> np.ndarray:
    """Ring row of each token, int64 [T]; -1 for padding, and for a token whose row is taken by the
    token one turn of the ring later."""
    places = positions.astype(np.int64)
    index = ring_index(places, access.ring_len, access.sink_tokens)
    stored = state_ids >= 0
    turn = access.ring_len - access.sink_tokens
    if turn < state_ids.shape[0]:
        same = state_ids[turn:] == state_ids[:-turn]
        follows = places[turn:] == places[:-turn] + turn
        stored[:-turn] &= ~(same & follows & (places[:-turn] >= access.sink_tokens))
    return np.where(stored, state_ids.astype(np.int64) * access.ring_len + index, -1)


@kernel
def _encode_rows(kv, positions, pairing, table, code, ceil, floor_bits, out, values_at, scales_at):
    """kv uint16 [n, D], positions int32 [n / heads]; out flat uint8."""
    rows, dim = kv.shape
    heads = rows // max(positions.shape[0], 1)
    for t in prange(rows):
        if values_at[t] >= 0:
            x = np.empty(dim, np.float32)
            for i in range(dim):
                x[i] = fp16_value(kv[t, i]) if code == CODE_FP16 else bf16_value(kv[t, i])
            first = dim
            if pairing != NO_PAIRING:
                first = dim - 2 * table.shape[1]
                rotate_vector(x, first, positions[t // heads], table, pairing, False)
            if code == CODE_MXFP8:
                for i in range(first, dim):
                    x[i] = bf16_value(bf16_round(x[i]))
                quantize_vector(x, ceil, floor_bits, out, values_at[t], out, scales_at[t])
            else:
                for i in range(dim):
                    bits = kv[t, i]
                    if i >= first:
                        bits = fp16_round(x[i]) if code == CODE_FP16 else bf16_round(x[i])
                    out[values_at[t] + 2 * i] = np.uint8(bits & np.uint16(0xFF))
                    out[values_at[t] + 2 * i + 1] = np.uint8(bits >> np.uint16(8))


def encode_rows(
    kv: Any, positions: Any, rope: Rope | None, fmt: RecordFormat, out: Any, addresses: Addresses
) -> None:
    """Encode kv bf16 [T, D], or (k, v), to the given addresses of `out`, flat uint8. Of a pair K
    alone is rotated."""
    ceil, floor_bits = rule_arguments(fmt.scale_rounding, fmt.amax_floor)
    for i, part in enumerate(kv_parts(kv)):
        pairing, table = rope_arguments(rope if i == 0 else None)
        places = np.zeros(part.shape[0], np.int32) if positions is None else positions
        launch(
            _encode_rows,
            part.size,
            value_bits(part, "kv").reshape(-1, fmt.head_dim),
            places,
            pairing,
            table,
            TYPE_CODES[fmt.type],
            ceil,
            floor_bits,
            out,
            *head_addresses(addresses, i, fmt),
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
    """Copy records between flat uint8 arrays, the values and the scales of each part."""
    widths = (fmt.part_value_bytes, fmt.part_scale_bytes)
    for part in range(fmt.num_parts):
        ends = zip(widths, source_at.part(part), out_at.part(part), strict=True)
        for width, from_at, to_at in ends:
            if width:
                work = from_at.shape[0] * width
                launch(_copy_rows, work, source, from_at, width, out, to_at)


@kernel
def _decode_rows(source, values_at, scales_at, code, table, out):
    """source flat uint8; out float32 [n, D]."""
    rows, dim = out.shape
    for row in prange(rows):
        at = values_at[row]
        if at >= 0 and code == CODE_MXFP8:
            for block in range(dim // MX_BLOCK):  # exact: records have whole blocks
                scale = power_of_two(np.int64(source[scales_at[row] + block]))
                for i in range(block * MX_BLOCK, (block + 1) * MX_BLOCK):
                    out[row, i] = table[source[at + i]] * scale
        elif at >= 0:
            for i in range(dim):
                low, high = np.uint16(source[at + 2 * i]), np.uint16(source[at + 2 * i + 1])
                bits = np.uint16(low | np.uint16(high << np.uint16(8)))
                out[row, i] = fp16_value(bits) if code == CODE_FP16 else bf16_value(bits)


def decode_rows(source: Any, addresses: Addresses, fmt: RecordFormat, part: int = 0) -> np.ndarray:
    """float32 [n, heads, D] of one part (K is 0, V is 1) of the records at the given addresses of
    `source`, flat uint8; latent records have one part and one head. Rows without a record are not
    written."""
    out = np.empty((addresses.values.shape[0], fmt.num_kv_heads, fmt.head_dim), np.float32)
    vectors = out.reshape(-1, fmt.head_dim)
    places = head_addresses(addresses, part, fmt)
    launch(_decode_rows, out.size, source, *places, TYPE_CODES[fmt.type], e4m3_values(), vectors)
    return out


def decode_keys(
    source: Any, addresses: Addresses, fmt: RecordFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, float32 [n, heads, D] each, of the records at the given addresses; one array
    is both for latent records."""
    keys = decode_rows(source, addresses, fmt)
    return keys, keys if fmt.latent else decode_rows(source, addresses, fmt, 1)


@kernel
def _unpack_rows(source, values_at, scales_at, code, table, out):
    """source flat uint8; out uint16 [n, D], bits of bf16 or fp16."""
    rows, dim = out.shape
    for row in prange(rows):
        at = values_at[row]
        if at >= 0 and code == CODE_MXFP8:
            for i in range(dim):
                scale = power_of_two(np.int64(source[scales_at[row] + i // MX_BLOCK]))
                out[row, i] = bf16_round(np.float32(table[source[at + i]] * scale))
        elif at >= 0:
            for i in range(dim):
                low, high = np.uint16(source[at + 2 * i]), np.uint16(source[at + 2 * i + 1])
                out[row, i] = np.uint16(low | np.uint16(high << np.uint16(8)))


def unpack_rows(source: Any, addresses: Addresses, fmt: RecordFormat, k: Any, v: Any) -> None:
    """Fill the first rows of k and v, bf16 or float16 [>= n, heads, D], from the records at the
    given addresses of `source`, flat uint8; rows without a record are not written."""
    code, rows = TYPE_CODES[fmt.type], addresses.values.shape[0]
    for i, target in enumerate((k, v)):
        vectors = value_bits(target, "k")[:rows].reshape(-1, fmt.head_dim)
        places = head_addresses(addresses, i, fmt)
        launch(_unpack_rows, vectors.size, source, *places, code, e4m3_values(), vectors)
