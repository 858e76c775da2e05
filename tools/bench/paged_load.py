"""paged_load: whole sequences out of a paged pool, decoded to K and V in bf16.

Measures `sequences` sequences of `tokens` tokens each, 8 KV heads of 128, MXFP8: 64 x 1,024 is
65,536 rows. Blocks lie anywhere in the pool; input sets are its layers. Bound by bytes: a record
read, K and V written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...rawkernels.operations import operation
from .common import Place, Shape, Work
from .inputs import host_rows, upload
from .pages import FORMAT, HEAD_DIM, KV_HEADS, VECTOR_BYTES, make_pages
from .records import require_equal

AXES = {"sequences": (64,), "tokens": (1024,)}
SMOKE = {"sequences": 3, "tokens": 20}


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, tokens}."""
    sequences, tokens = shape["sequences"], shape["tokens"]
    size = sequences * tokens * (VECTOR_BYTES + FORMAT.record_bytes)
    pages = make_pages(place, sequences, tokens, size, rng)
    places = [upload(place, x) for x in pages.places_of_tokens()]
    ends = upload(place, np.arange(sequences + 1, dtype=np.int32) * np.int32(tokens))
    outputs, calls = [], []
    for layer in pages.layers:
        kv = pages.new_vectors(place, rng)
        place.ops.paged_store(pages.pool, pages.layout, layer, kv, pages.device_tables, *places)
        rows = (pages.num_tokens, KV_HEADS, HEAD_DIM)
        k, v = (place.memory.empty(rows, np.uint16) for _ in range(2))
        arguments = (pages.pool, pages.layout, layer, pages.device_tables, ends, k, v)
        calls.append(partial(place.ops.paged_load, *arguments))
        outputs.append((k, v))

    def check() -> dict[str, Any]:
        rows = np.arange(pages.num_tokens - tokens, pages.num_tokens)
        found = [host_rows(place, part, rows) for part in outputs[0]]
        wanted = [np.empty(part.shape, np.uint16) for part in found]
        tables = np.arange(pages.tables.shape[1], dtype=np.int32)[None]
        cu_seqlens_k = np.array([0, tokens], np.int32)
        reference = operation("reference", "paged_load")
        pool = pages.last_blocks(place)
        reference(pool, pages.layout, 0, tables, cu_seqlens_k, *wanted)
        return require_equal(np.stack(found), np.stack(wanted), "K and V of a sequence")

    return Work(calls=tuple(calls), outputs=outputs[0], bytes=size, flops=0, check=check)
