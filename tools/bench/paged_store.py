"""paged_store: rotate keys, quantize and scatter new vectors into the blocks of a paged pool.

Measures `sequences` sequences of `tokens` tokens each, 8 KV heads of 128, MXFP8: 64 x 1,024 is
65,536 tokens. Blocks lie anywhere in the pool; input sets are its layers. Bound by bytes: K and V
in bf16 and two indices read, a record written.
"""

from functools import partial
from typing import Any

import numpy as np

from ...layouts.config import Config
from ...layouts.rope import Rope
from ...rawkernels.operations import operation
from .common import Place, Shape, Work
from .inputs import host_rows, upload
from .pages import FORMAT, HEAD_DIM, VECTOR_BYTES, make_pages
from .records import INDEX_BYTES, require_equal

AXES = {"sequences": (64,), "tokens": (1024,)}
SMOKE = {"sequences": 3, "tokens": 20}
ROPE = Rope(10_000.0, HEAD_DIM, "half")


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {sequences, tokens}."""
    sequences, tokens = shape["sequences"], shape["tokens"]
    size = sequences * tokens * (VECTOR_BYTES + 2 * INDEX_BYTES + FORMAT.record_bytes)
    pages = make_pages(place, sequences, tokens, size, rng)
    host_places = pages.places_of_tokens()
    places = [upload(place, x) for x in host_places]
    vectors, calls = [], []
    for layer in pages.layers:
        kv = pages.new_vectors(place, rng)
        arguments = (pages.pool, pages.layout, layer, kv, pages.device_tables, *places)
        calls.append(partial(place.ops.paged_store, *arguments, rope=ROPE))
        vectors.append(kv)

    def check() -> dict[str, Any]:
        found = pages.last_blocks(place)
        rows = np.arange(pages.num_tokens - tokens, pages.num_tokens)
        kv = tuple(host_rows(place, part, rows) for part in vectors[0])
        wanted = np.full(found.shape, 0xFF, np.uint8)
        tables = np.arange(pages.tables.shape[1], dtype=np.int32)[None]
        where = np.zeros(tokens, np.int32), host_places[1][rows]
        reference = operation("reference", "paged_store")
        reference(wanted, pages.layout, 0, kv, tables, *where, rope=ROPE)
        shape = (-1, pages.layout.block_bytes)
        cut = slice(0, pages.layout.layer_bytes(0))
        return require_equal(
            found.reshape(shape)[:, cut], wanted.reshape(shape)[:, cut], "blocks of a sequence"
        )

    return Work(calls=tuple(calls), outputs=(), bytes=size, flops=0, check=check)
