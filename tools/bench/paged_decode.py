"""paged_decode: one new token a sequence against all of its keys in a paged pool.

Measures `sequences` sequences of `tokens` tokens each, one query of `heads` query heads, 8 KV heads
of 128, MXFP8: 64 x 4,096 reads 554 MB. Blocks lie anywhere in the pool; input sets are its layers.
Bound by bytes: each sequence's records and its query read once, its output written. Ids, positions,
tables and the log-sum-exp are left out of the count.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from ...rawkernels.reference.bound import Expected
from .common import ATTENTION_FLOPS, Place, Shape, Work
from .inputs import host_rows, random_bf16, upload
from .pages import FORMAT, HEAD_DIM, make_pages
from .window_decode import within_bound

AXES = {"heads": (32,), "sequences": (64, 256), "tokens": (4096,)}
SMOKE = {"heads": 16, "sequences": 3, "tokens": 20}
SCALE = HEAD_DIM**-0.5
BF16_BYTES = 2
STORED_ROWS = 1 << 16  # vectors that are made and stored at a time


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {heads, sequences, tokens}."""
    heads, sequences, tokens = shape["heads"], shape["sequences"], shape["tokens"]
    size = sequences * (tokens * FORMAT.record_bytes + 2 * heads * HEAD_DIM * BF16_BYTES)
    pages = make_pages(place, sequences, tokens, size, rng)
    seq_ids = upload(place, np.arange(sequences, dtype=np.int32))
    positions = upload(place, np.full(sequences, tokens - 1, np.int32))
    queries, outputs, calls = [], [], []
    for layer in pages.layers:
        fill_layer(place, pages, layer, rng)
        q = random_bf16(place, (sequences, heads, HEAD_DIM), rng)
        out = place.memory.empty(q.shape, np.uint16)
        lse = place.memory.empty(q.shape[:2], np.float32)
        arguments = (q, pages.pool, pages.layout, layer, pages.device_tables, seq_ids, positions)
        calls.append(partial(place.ops.paged_decode, *arguments, out, lse, softmax_scale=SCALE))
        queries.append(q)
        outputs.append((out, lse))

    def check() -> dict[str, Any]:
        last = np.array([sequences - 1])
        q, out, lse = (host_rows(place, x, last) for x in (queries[0], *outputs[0]))
        tables = np.arange(pages.tables.shape[1], dtype=np.int32)[None]
        where = (tables, np.zeros(1, np.int32), np.full(1, tokens - 1, np.int32))
        pool = pages.last_blocks(place)
        exact, rounded, expected_lse = np.empty(q.shape), np.empty(q.shape), np.empty_like(lse)
        run = partial(operation("reference", "paged_decode"), q, pool, pages.layout, 0, *where)
        run(rounded, expected_lse, softmax_scale=SCALE, round_weights=True)
        run(exact, expected_lse, softmax_scale=SCALE)
        return within_bound(out, lse, Expected(exact, rounded, expected_lse))

    return Work(
        calls=tuple(calls),
        outputs=outputs[0],
        bytes=size,
        flops=ATTENTION_FLOPS * sequences * tokens * heads * HEAD_DIM,
        check=check,
    )


def fill_layer(place: Place, pages: Any, layer: int, rng: np.random.Generator) -> None:
    """Random vectors in every token of every sequence, stored a part at a time."""
    seq_ids, positions = pages.places_of_tokens()
    for start in range(0, pages.num_tokens, STORED_ROWS):
        rows = slice(start, start + STORED_ROWS)
        places = [upload(place, x[rows]) for x in (seq_ids, positions)]
        shape = (len(seq_ids[rows]), FORMAT.num_kv_heads, HEAD_DIM)
        kv = (random_bf16(place, shape, rng), random_bf16(place, shape, rng))
        place.ops.paged_store(pages.pool, pages.layout, layer, kv, pages.device_tables, *places)
