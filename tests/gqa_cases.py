"""Grouped-query rings for tests: records, plans, and the float64 answer from the definition."""

import dataclasses

import numpy as np
from helpers import POISON, bf16, from_bf16, i32, make_layout, poisoned_slab

from ringslab.layouts.formats import MX_BLOCK, make_record_format
from ringslab.layouts.paged import NO_BLOCK, build_paged_layout
from ringslab.layouts.rings import ring_index
from ringslab.layouts.sizes import div_ceil
from ringslab.rawkernels.reference.bound import Expected, assert_within_bound
from ringslab.rawkernels.reference.dequantize_mxfp8 import dequantized
from ringslab.schedules.plan_decode import build_decode_plan

LAYER = 1


def gqa_format(record_type, head_dim, num_kv_heads):
    return make_record_format(record_type, head_dim, latent=False, num_kv_heads=num_kv_heads)


def element_bits(record_type, x):
    """uint16 bits of float32 values: fp16 for fp16 records, else bf16."""
    return x.astype(np.float16).view(np.uint16) if record_type == "fp16" else bf16(x)


def element_values(record_type, bits):
    return bits.view(np.float16).astype(np.float64) if record_type == "fp16" else from_bf16(bits)


def random_records(rng, fmt, count):
    """uint8 [count, record_bytes], and what they hold: k, v float64 [count, num_kv_heads, D]."""
    shape = (count, 2, fmt.num_kv_heads, fmt.head_dim)
    x = rng.standard_normal(shape, np.float32)
    if fmt.type != "mxfp8":
        bits = element_bits(fmt.type, x)
        held = element_values(fmt.type, bits).astype(np.float64)
        return bits.reshape(count, -1).view(np.uint8).copy(), held[:, 0], held[:, 1]
    values = rng.integers(0, 256, shape, np.uint8)  # all bytes but NaN
    values = np.where(values & 0x7F == 0x7F, 0, values).astype(np.uint8)
    scales = rng.integers(114, 119, (*shape[:3], fmt.head_dim // MX_BLOCK), np.uint8)
    flat = (count * 2 * fmt.num_kv_heads, -1)
    held = dequantized(values.reshape(flat), scales.reshape(flat)).astype(np.float64)
    held = held.reshape(shape)
    parts = [part[:, i].reshape(count, -1) for i in range(2) for part in (values, scales)]
    return np.concatenate(parts, axis=1), held[:, 0], held[:, 1]


def attention(q, k, v, *, softmax_scale, sink=None, softcap=0.0, round_to=None):
    """q float64 [H, D], k, v [n, Hkv, D] -> out float64 [H, D], lse [H]. round_to: rounds the
    weights of the sum over v, as tensor cores are given them."""
    if k.shape[0] == 0:
        return np.zeros(q.shape), np.full(q.shape[0], -np.inf)
    k, v = (np.repeat(x, q.shape[0] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("hd,nhd->hn", q, k) * softmax_scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    m = s.max(axis=1, keepdims=True)
    weights = np.exp(s - m)
    total = weights.sum(axis=1, keepdims=True)
    denominator = total if sink is None else total + np.exp(sink[:, None].astype(np.float64) - m)
    if round_to is not None:
        bits = element_bits(round_to, weights.astype(np.float32))
        weights = element_values(round_to, bits).astype(np.float64)
    return np.einsum("hn,nhd->hd", weights, v) / denominator, (m + np.log(total))[:, 0]


class GqaCase:
    """Sequences (first position, tokens) in shuffled state slots. Rings hold the records that are
    visible; all other bytes of the slab are 0xFF, which is NaN."""

    def __init__(
        self, seqs, *, record_type="bf16", head_dim=64, kv_heads=8, heads=64, window=128,
        ring_len=None, sink_tokens=0, padding=0, seed=0, sink=True,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.fmt = fmt = gqa_format(record_type, head_dim, kv_heads)
        self.ring_len = ring_len or window + sink_tokens + max(n for _, n in seqs)
        self.layout = make_layout(fmt, self.ring_len, sink_tokens=sink_tokens)
        self.slab = poisoned_slab(self.layout, len(seqs) + 2)
        records = self.layout.view(self.slab, LAYER)
        states = rng.permutation(len(seqs) + 2)[: len(seqs)]
        self.held = []
        for (first, tokens), state in zip(seqs, states, strict=True):
            positions = np.arange(first + tokens)
            positions = positions[(positions < sink_tokens) | (positions > first - window)]
            rows, k, v = random_records(rng, fmt, len(positions))
            records[state, ring_index(positions, self.ring_len, sink_tokens), 0] = rows
            self.held.append((positions, k, v))
        self.seqs, self.window, self.sink_tokens = seqs, window, sink_tokens
        lengths = [tokens for _, tokens in seqs]
        total = sum(lengths)
        self.plan = build_decode_plan(
            i32([*np.repeat(states, lengths), *[-1] * padding]),
            i32(np.concatenate([*[np.arange(p, p + n) for p, n in seqs], np.zeros(padding)])),
            # The first padding token follows the last sequence's tokens, others are their own.
            cu_seqlens_q=i32(
                np.cumsum([0, *lengths[:-1], lengths[-1] + min(padding, 1)]).tolist()
                + list(range(total + 2, total + padding + 1))
            ),
            window=window,
            ring_len=self.ring_len,
            sink_tokens=sink_tokens,
            mode="causal",
        )
        x = rng.standard_normal((total + padding, heads, head_dim), np.float32)
        self.q = element_bits(record_type, x)
        self.sink = rng.standard_normal(heads).astype(np.float32) if sink else None

    def expected(self, **options):
        options = {"sink": self.sink, **options}
        out, rounded = np.zeros((2, *self.q.shape))
        lse = np.full(self.q.shape[:2], -np.inf, np.float32)
        q = element_values(self.fmt.type, self.q).astype(np.float64)
        token = 0
        for (first, tokens), (positions, k, v) in zip(self.seqs, self.held, strict=True):
            for p in range(first, first + tokens):
                keys = (positions > p - self.window) | (positions < self.sink_tokens)
                keys &= positions <= p
                out[token], lse[token] = attention(q[token], k[keys], v[keys], **options)
                round_to = "fp16" if self.fmt.type == "fp16" else "bf16"
                rounded[token], _ = attention(
                    q[token], k[keys], v[keys], round_to=round_to, **options
                )
                token += 1
        return Expected(out, rounded, lse)

    def check(self, out, lse, **options):
        """Within the bound, and padding is 0 and -inf."""
        given = out.view(np.float16).astype(np.float64) if self.fmt.type == "fp16" else out
        assert_within_bound(given, lse, self.expected(**options))
        real = sum(n for _, n in self.seqs)
        assert not out[real:].any()
        assert np.isneginf(lse[real:]).all()

    def only(self, i):
        """The same case with sequence i alone."""
        start = int(self.plan.cu_seqlens_q[i])
        end = int(self.plan.cu_seqlens_q[i + 1])
        alone = object.__new__(GqaCase)
        alone.__dict__.update(vars(self))
        alone.seqs, alone.held, alone.q = [self.seqs[i]], [self.held[i]], self.q[start:end].copy()
        cut = {
            name: getattr(self.plan, name)[start:end].copy()
            for name in ("state_ids", "positions", "offset_len", "index", "num_pinned")
            if getattr(self.plan, name) is not None
        }
        cut |= {"cu_seqlens_q": i32([0, end - start]), "num_seqs": 1, "max_seqlen_q": end - start}
        alone.plan = dataclasses.replace(self.plan, **cut)
        return alone


assert POISON == 0xFF  # NaN as bf16 and fp16, NaN values and scales as MXFP8


class PagedCase:
    """Sequences (first position, tokens) in a pool of shuffled blocks of 16 tokens of two layers.
    Blocks hold the records so far; all other bytes of the pool are 0xFF. The last sequence's
    tokens are followed by padding."""

    def __init__(
        self, seqs, *, record_type="bf16", head_dim=64, kv_heads=8, heads=64, block_size=16,
        padding=0, max_blocks=None, seed=0, sink=True,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.fmt = fmt = gqa_format(record_type, head_dim, kv_heads)
        self.layout = build_paged_layout([(0, fmt), (LAYER, fmt)], block_size, 32)
        needed = [div_ceil(first + tokens, block_size) for first, tokens in seqs]
        blocks = rng.permutation(sum(needed) + 2)
        self.pool = np.full(len(blocks) * self.layout.block_bytes, POISON, np.uint8)
        records = self.layout.view(self.pool, LAYER)
        self.tables = np.full((len(seqs), max_blocks or max(needed) + 1), NO_BLOCK, np.int32)
        self.held, taken = [], 0
        for i, (first, tokens) in enumerate(seqs):
            self.tables[i, : needed[i]] = blocks[taken : taken + needed[i]]
            taken += needed[i]
            positions = np.arange(first + tokens)
            rows, k, v = random_records(rng, fmt, len(positions))
            places = self.tables[i, positions // block_size]  # rounded down: the block it lies in
            records[places, positions % block_size, 0] = rows
            self.held.append((positions, k, v))
        lengths = [tokens for _, tokens in seqs]
        self.seqs, self.window, self.sink_tokens = seqs, 2**31, 0
        self.seq_ids = i32([*np.repeat(np.arange(len(seqs)), lengths), *[-1] * padding])
        parts = [np.arange(p, p + n) for p, n in seqs]
        self.positions = i32(np.concatenate([*parts, np.zeros(padding)]))
        x = rng.standard_normal((sum(lengths) + padding, heads, head_dim), np.float32)
        self.q = element_bits(record_type, x)
        self.sink = rng.standard_normal(heads).astype(np.float32) if sink else None

    expected, check = GqaCase.expected, GqaCase.check
