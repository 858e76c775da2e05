"""The attention shapes that tests and benches share: every edge of windows, rings and tiles.

A case is small numbers and names; `decode_inputs` and `prefill_inputs` make its arrays. Slabs are
poisoned with 0xFF but for the records that the sequences have stored.
"""

from dataclasses import dataclass

import numpy as np
from helpers import (
    encoded,
    i32,
    make_layout,
    operations,
    poisoned_slab,
    random_kv,
    random_values,
    record_format,
    store,
)

import ringslab as rs

ROPE_OUT = rs.Rope(10000.0, 32, "adjacent")
ROPE_HALF = rs.Rope(160000.0, 32, "half", rs.Yarn(16, 65536, 32, 1))


@dataclass(frozen=True)
class Case:
    """`sequences`: (first new position, number of new tokens) of each sequence, in batch order.
    `padding`: padding tokens behind the last sequence of a decode batch."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    window: int = 128
    ring_len: int = 134
    heads: int = 4
    head_dim: int = 64
    sink: bool = True
    rope_out: rs.Rope | None = None
    record_type: str = "mxfp8"
    plane_order: str = "interleaved"
    block: bool = False
    padding: int = 0
    kv_heads: int = 0  # 0: latent; else K and V apart
    softcap: float = 0.0
    sink_tokens: int = 0

    def __str__(self):
        return self.name


DECODE_CASES = (
    Case("first_token", ((0, 1),)),
    Case("length_0_and_1", ((5, 0), (0, 1), (9, 0)), heads=1),
    Case("nothing", ((5, 0), (7, 0))),
    Case("window_1", ((7, 1), (0, 2), (12, 6)), window=1, ring_len=7),
    Case("window_at_least_sequence", ((50, 1), (126, 1), (3, 6)), sink=False),
    Case("exactly_full_ring", ((133, 1), (128, 6), (127, 1))),
    Case("one_past_full", ((134, 1), (129, 6), (135, 1))),
    Case("wrap", ((1000, 6), (267, 6), (400, 1)), rope_out=ROPE_OUT),
    Case("tight_ring", ((1000, 6), (130, 6), (133, 3)), ring_len=133),
    Case("ragged_tokens", ((200, 3), (10, 1), (500, 2), (0, 5)), heads=5),
    Case("padding_tokens", ((200, 3), (10, 2)), padding=3, rope_out=ROPE_HALF),
    Case("many_sequences", tuple((11 * i * i, 1 + i % 6) for i in range(9)), heads=3, head_dim=32),
    Case("head_dim_32", ((300, 2),), heads=7, head_dim=32),
    Case("head_dim_96", ((300, 2),), heads=17, head_dim=96, rope_out=ROPE_HALF),
    Case("head_dim_160", ((300, 2), (40, 1)), heads=2, head_dim=160),
    Case("head_dim_256", ((300, 2),), heads=16, head_dim=256),
    Case("head_dim_512", ((300, 6), (20, 6)), heads=64, head_dim=512, rope_out=ROPE_OUT),
    Case("heads_65", ((300, 3),), heads=65, head_dim=32),
    Case("bf16_records", ((1000, 6), (20, 2)), record_type="bf16"),
    Case("bf16_records_512", ((150, 6),), record_type="bf16", head_dim=512, heads=8),
    Case("planar", ((1000, 6), (20, 2)), plane_order="planar"),
    Case("planar_512", ((1000, 2),), plane_order="planar", head_dim=512, heads=8),
    Case("window_5", ((3, 2), (4, 1), (5, 3), (100, 6)), window=5, ring_len=13, heads=2),
    Case("window_130", ((500, 6), (129, 2)), window=130, ring_len=140),
    Case("large_window", ((3000, 2), (1500, 1)), window=1999, ring_len=2010, heads=2),
    Case("draft_block", ((1000, 5), (0, 5), (60, 2)), block=True, ring_len=140),
)

PREFILL_CASES = (
    Case("new_prompt", ((0, 300),)),
    Case("one_token", ((0, 1), (77, 1)), heads=1),
    Case("nothing", ((5, 0), (7, 0))),
    Case("empty_between", ((2, 7), (5, 0), (0, 1), (300, 129))),
    Case("window_1", ((7, 3), (0, 9)), window=1, ring_len=7),
    Case("window_at_least_sequence", ((3, 40), (0, 90)), sink=False),
    Case("chunk_longer_than_ring", ((140, 300),), rope_out=ROPE_OUT),
    Case("chunk_over_the_wrap", ((2048, 30), (130, 10)), heads=5),
    Case("window_5", ((3, 2), (4, 20), (100, 33)), window=5, ring_len=13, heads=3, head_dim=32),
    Case("head_dim_96", ((50, 70),), heads=17, head_dim=96, rope_out=ROPE_HALF),
    Case("head_dim_160", ((50, 20),), heads=2, head_dim=160),
    Case("head_dim_256", ((50, 20),), heads=16, head_dim=256),
    Case("head_dim_512", ((120, 35), (0, 5)), heads=64, head_dim=512, rope_out=ROPE_OUT),
    Case("heads_65", ((300, 3),), heads=65, head_dim=32),
    Case("bf16_records", ((1000, 60), (20, 2)), record_type="bf16"),
    Case("planar", ((1000, 60), (20, 2)), plane_order="planar"),
    Case("large_window", ((2500, 20), (0, 30)), window=1999, ring_len=2010, heads=2),
)


# Grouped-query heads: groups of 1, of a number that no tile divides, of 8; all record types.
GQA_DECODE_CASES = (
    Case("mistral", ((1000, 6), (20, 2), (0, 1)), heads=32, head_dim=128, kv_heads=8, sink=False),
    Case("gpt_oss", ((1000, 1), (127, 1), (128, 1)), heads=64, head_dim=64, kv_heads=8),
    Case("gemma", ((300, 2), (3, 6)), heads=4, head_dim=128, kv_heads=2, softcap=5.0, sink=False),
    Case("gqa_bf16", ((1000, 6), (20, 2)), heads=6, kv_heads=2, record_type="bf16", softcap=2.0),
    Case("gqa_fp16", ((1000, 6), (133, 1)), heads=6, kv_heads=2, record_type="fp16"),
    Case("gqa_planar", ((1000, 6), (20, 2)), heads=4, kv_heads=2, plane_order="planar"),
    Case("one_kv_head", ((140, 3),), heads=5, head_dim=32, kv_heads=1),
    Case("group_of_1", ((300, 2), (40, 1)), heads=3, head_dim=96, kv_heads=3),
    Case("group_of_9", ((300, 2),), heads=18, kv_heads=2),
    Case("head_256", ((300, 2),), heads=4, head_dim=256, kv_heads=2, record_type="bf16"),
    Case("gqa_padding", ((200, 3), (7, 0), (10, 2)), heads=4, kv_heads=2, padding=3),
    Case("gqa_window_1", ((7, 1), (0, 2), (12, 6)), 1, 7, heads=4, kv_heads=2),
    Case("gqa_long", ((3000, 2), (1500, 1)), 1999, 2010, heads=4, kv_heads=2),
)
# Rings with pinned positions.
PINNED_DECODE_CASES = (
    Case(
        "pinned", ((1000, 6), (20, 2), (2, 1), (0, 1)), 16, 26, heads=4, kv_heads=2, sink_tokens=4
    ),
    Case("pinned_bf16", ((57, 3), (3, 3)), 5, 12, 6, kv_heads=2, record_type="bf16", sink_tokens=5),
    Case(
        "pinned_planar", ((40, 3),), 9, 19, heads=2, kv_heads=2, plane_order="planar", sink_tokens=7
    ),
    Case("pinned_latent", ((40, 3), (1, 2)), 9, 19, sink_tokens=7),
)
GQA_PREFILL_CASES = (
    Case("mistral", ((0, 40), (300, 9)), heads=32, head_dim=128, kv_heads=8, sink=False),
    Case("gpt_oss", ((150, 20), (0, 5)), heads=64, head_dim=64, kv_heads=8),
    Case("gemma", ((50, 20), (3, 6)), heads=4, head_dim=128, kv_heads=2, softcap=5.0, sink=False),
    Case("gqa_bf16", ((140, 60), (20, 2)), heads=6, kv_heads=2, record_type="bf16", softcap=2.0),
    Case("gqa_fp16", ((140, 30),), heads=6, kv_heads=2, record_type="fp16"),
    Case("gqa_planar", ((1000, 60), (20, 2)), heads=4, kv_heads=2, plane_order="planar"),
    Case("gqa_nothing", ((5, 0), (7, 0)), heads=4, kv_heads=2),
    Case("gqa_empty_between", ((2, 7), (5, 0), (0, 1), (300, 129)), heads=2, kv_heads=1),
    Case("gqa_window_1", ((7, 3), (0, 9)), 1, 7, heads=4, kv_heads=2),
    Case("head_256", ((50, 20),), heads=4, head_dim=256, kv_heads=2, record_type="bf16"),
    Case("gqa_long", ((2500, 5), (0, 9)), 1999, 2010, heads=4, kv_heads=2),
)
PINNED_PREFILL_CASES = (
    Case(
        "pinned", ((100, 30), (2, 9), (0, 40), (19, 3)), 16, 26, heads=4, kv_heads=2, sink_tokens=4
    ),
    Case("pinned_wide", ((9, 9), (1, 3), (30, 2)), 3, 20, heads=2, kv_heads=2, sink_tokens=12),
    Case("pinned_latent", ((40, 30), (1, 20)), 9, 19, sink_tokens=7),
)


def options_of(case, rng):
    """softmax_scale, sink, rope_out of a case, and softcap where it has one; host arrays."""
    sink = rng.standard_normal(case.heads).astype(np.float32) * 2 if case.sink else None
    options = {"softmax_scale": case.head_dim**-0.5, "sink": sink, "rope_out": case.rope_out}
    return {**options, "softcap": case.softcap} if case.softcap else options


def format_of(case):
    return record_format(case.head_dim, case.record_type, case.plane_order, case.kv_heads)


def store_history(case, rng, slab, layout, state_id, first, count):
    """Store what a sequence has before its first query, and `count` records from `first` on: the
    pinned positions, and the newest that a window can hold."""
    pinned = np.arange(min(case.sink_tokens, first))
    recent = np.arange(max(0, first - case.window, len(pinned)), first + count)
    positions = np.concatenate([pinned, recent]).astype(np.int32)
    kv = random_kv(rng, len(positions), layout.ring(1).record_format)
    store(slab, layout, 1, kv, state_id, positions)


def decode_inputs(case, seed=0):
    """(q, slab, layout, layer, plan, options): host arrays. State ids are shuffled, layer 1 of 2 is
    read, and each slot holds what its sequence has stored, older positions poisoned."""
    rng = np.random.default_rng(seed)
    layout = make_layout(format_of(case), case.ring_len, sink_tokens=case.sink_tokens)
    slots = len(case.sequences) + 1
    slab = poisoned_slab(layout, slots)
    state_of = rng.permutation(slots)[: len(case.sequences)]
    state_ids, positions, cu = [], [], [0]
    for state_id, (first, count) in zip(state_of, case.sequences, strict=True):
        store_history(case, rng, slab, layout, state_id, first, count)
        state_ids += [state_id] * count
        positions += range(first, first + count)
        cu.append(len(positions))
    if case.padding:  # one more sequence, of padding alone
        state_ids += [-1] * case.padding
        positions += [0] * case.padding
        cu.append(len(positions))
    plan = rs.plan_decode(
        i32(state_ids),
        i32(positions),
        window=case.window,
        ring_len=case.ring_len,
        cu_seqlens_q=i32(cu),
        block=case.block,
        sink_tokens=case.sink_tokens,
    )
    q = random_values(rng, (len(positions), case.heads, case.head_dim), case.record_type, 2.0)
    return q, slab, layout, 1, plan, options_of(case, rng)


def prefill_inputs(case, seed=0):
    """(q, records, plan, record_format, options): host arrays. The joint buffer is made by
    load_history from a slab as in `decode_inputs`, and by encode_records."""
    rng = np.random.default_rng(seed)
    fmt = format_of(case)
    layout = make_layout(fmt, case.ring_len, sink_tokens=case.sink_tokens)
    slots = len(case.sequences) + 1
    slab = poisoned_slab(layout, slots)
    state_ids = i32(rng.permutation(slots)[: len(case.sequences)])
    for state_id, (first, _) in zip(state_ids, case.sequences, strict=True):
        store_history(case, rng, slab, layout, state_id, first, 0)
    firsts, counts = i32(case.sequences).T
    plan = rs.plan_prefill(
        state_ids,
        counts,
        firsts + counts,
        window=case.window,
        ring_len=case.ring_len,
        sink_tokens=case.sink_tokens,
    )
    tokens = int(counts.sum())
    records = np.full((plan.history_rows + tokens, fmt.record_bytes), 0xFF, np.uint8)
    operations("reference").load_history(slab, layout, 1, plan, records)
    records[plan.history_rows :] = encoded(random_kv(rng, tokens, fmt), fmt)
    q = random_values(rng, (tokens, case.heads, case.head_dim), case.record_type, 2.0)
    return q, records, plan, fmt, options_of(case, rng)
