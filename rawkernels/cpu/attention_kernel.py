"""Attention on the CPU, for decode and prefill alike: every key is a row of float32 scratch, and a
query token sees a few ranges of rows, in order. A token's arithmetic depends on its own keys only,
so its bits do not depend on the batch, nor on whether it came in a prefill or in a decode step."""

import math
from typing import Any

import numpy as np
from numba import prange

from ...layouts.rope import Rope
from ..arrays import FP16, value_bits
from .codec import bf16_round, bf16_value, fp16_round, fp16_value
from .kernels import attention_function, kernel, launch
from .rotation import NO_PAIRING, rope_arguments, rotate_vector

ATTENTION_TURNS = 16  # products of a key and a query that take as long as one simple turn
HEADS_PER_TILE = 4  # heads that share one load of a key; their sums stay in registers


@attention_function
def _row(ranges, t, j):
    """Row of the j-th key of a token."""
    r = 0
    while r + 2 < ranges.shape[1] and j >= ranges[t, r + 1]:
        j -= ranges[t, r + 1]
        r += 2
    return ranges[t, r] + j


@attention_function
def _scores(query, keys, kv_head, ranges, t, scale, weight):
    """weight [4, n] = scale * query [4, D] . keys; the four heads read each key once."""
    dim = query.shape[1]
    for j in range(weight.shape[1]):
        row = _row(ranges, t, j)
        a0 = np.float32(0)
        a1 = np.float32(0)
        a2 = np.float32(0)
        a3 = np.float32(0)
        for d in range(dim):
            k = keys[row, kv_head, d]
            a0 += query[0, d] * k
            a1 += query[1, d] * k
            a2 += query[2, d] * k
            a3 += query[3, d] * k
        weight[0, j] = a0 * scale
        weight[1, j] = a1 * scale
        weight[2, j] = a2 * scale
        weight[3, j] = a3 * scale


@attention_function
def _cap(weight, softcap):
    """Scores s [4, n] to softcap * tanh(s / softcap), in place."""
    for h in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            weight[h, j] = softcap * math.tanh(weight[h, j] / softcap)


@attention_function
def _softmax(weight, h):
    """exp(s - m) of one head's scores in place; returns m and the sum. n is at least 1."""
    m = np.float32(-np.inf)
    for j in range(weight.shape[1]):
        m = max(m, weight[h, j])  # a NaN is passed over here and comes back in the sum
    total = np.float32(0)
    for j in range(weight.shape[1]):
        weight[h, j] = math.exp(weight[h, j] - m)
        total += weight[h, j]
    return m, total


@attention_function
def _weigh(weight, values, kv_head, ranges, t, acc):
    """acc [4, D] += weight [4, n] . values, four keys at a time."""
    length, dim = weight.shape[1], acc.shape[1]
    whole = length - length % 4
    for j in range(0, whole, 4):
        r0, r1 = _row(ranges, t, j), _row(ranges, t, j + 1)
        r2, r3 = _row(ranges, t, j + 2), _row(ranges, t, j + 3)
        for h in range(HEADS_PER_TILE):
            w0, w1, w2, w3 = weight[h, j], weight[h, j + 1], weight[h, j + 2], weight[h, j + 3]
            for d in range(dim):
                acc[h, d] = (
                    acc[h, d]
                    + w0 * values[r0, kv_head, d]
                    + w1 * values[r1, kv_head, d]
                    + w2 * values[r2, kv_head, d]
                    + w3 * values[r3, kv_head, d]
                )
    for j in range(whole, length):
        row = _row(ranges, t, j)
        for h in range(HEADS_PER_TILE):
            for d in range(dim):
                acc[h, d] += weight[h, j] * values[row, kv_head, d]


@kernel
def _attend(
    q, is_fp16, keys, values, ranges, scale, softcap, sink, positions, pairing, table, out, lse
):
    """q, out uint16 [T, H, D]; keys, values float32 [rows, Hkv, D]; ranges int64 [T, 2 R]; sink,
    lse float32."""
    tokens, heads, dim = q.shape
    group = heads // keys.shape[1]  # exact: checked
    group_tiles = (group + HEADS_PER_TILE - 1) // HEADS_PER_TILE
    tiles = keys.shape[1] * group_tiles
    for item in prange(tokens * tiles):
        t, kv_head = item // tiles, (item % tiles) // group_tiles
        in_group = (item % group_tiles) * HEADS_PER_TILE
        h0, tile_heads = kv_head * group + in_group, min(HEADS_PER_TILE, group - in_group)
        length = 0
        for r in range(1, ranges.shape[1], 2):
            length += ranges[t, r]
        query = np.zeros((HEADS_PER_TILE, dim), np.float32)  # heads past the last one stay 0
        for h in range(tile_heads):
            for d in range(dim):
                bits = q[t, h0 + h, d]
                query[h, d] = fp16_value(bits) if is_fp16 else bf16_value(bits)
        weight = np.zeros((HEADS_PER_TILE, length), np.float32)
        _scores(query, keys, kv_head, ranges, t, scale, weight)
        if softcap > 0:
            _cap(weight, softcap)
        divisor = np.ones(HEADS_PER_TILE, np.float32)
        for h in range(tile_heads):
            lse[t, h0 + h] = np.float32(-np.inf)
            if length > 0:
                m, total = _softmax(weight, h)
                lse[t, h0 + h] = m + math.log(total)
                divisor[h] = total + math.exp(sink[h0 + h] - m)
        acc = np.zeros((HEADS_PER_TILE, dim), np.float32)
        _weigh(weight, values, kv_head, ranges, t, acc)
        for h in range(tile_heads):
            for d in range(dim):
                acc[h, d] = acc[h, d] / divisor[h]
            if pairing != NO_PAIRING:
                first = dim - 2 * table.shape[1]
                rotate_vector(acc[h], first, positions[t], table, pairing, True)
            for d in range(dim):
                out[t, h0 + h, d] = fp16_round(acc[h, d]) if is_fp16 else bf16_round(acc[h, d])


def attend(
    q: Any,
    keys: np.ndarray,
    values: np.ndarray,
    ranges: np.ndarray,
    out: Any,
    lse: Any,
    *,
    softmax_scale: float,
    softcap: float,
    sink: Any,
    rope_out: Rope | None,
    positions: Any,
) -> None:
    """q bf16 or float16 [T, H, D] over rows of keys and values float32 [rows, Hkv, D] (latent: one
    array is both); ranges int64 [T, 2 R] are start, length, start, length .. of the rows of each
    token. Fills out like q, lse float32 [T, H]."""
    pairing, table = rope_arguments(rope_out)
    # exp(-inf) = 0: no sink.
    logits = np.full(q.shape[1], -np.inf, np.float32) if sink is None else sink
    work = int(ranges[:, 1::2].sum()) * q.shape[1] * q.shape[2]
    launch(
        _attend,
        work // ATTENTION_TURNS,
        value_bits(q, "q"),
        q.dtype == FP16,
        keys,
        values,
        ranges,
        np.float32(softmax_scale),
        np.float32(softcap),
        logits,
        positions,
        pairing,
        table,
        value_bits(out, "out"),
        lse,
    )
