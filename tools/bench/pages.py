"""What the benches of the paged operations share: pools of the shape of Mistral 7B and Gemma, 8 KV
heads of 128 in MXFP8 records and blocks of 16 tokens, whatever the configuration says."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...layouts.formats import RecordFormat, make_record_format
from ...layouts.paged import PagedLayout, build_paged_layout
from .common import POISON_BYTE, Place, num_sets
from .inputs import host_rows, random_bf16, upload

KV_HEADS, HEAD_DIM, BLOCK_SIZE, ALIGN_BYTES = 8, 128, 16, 32
FORMAT: RecordFormat = make_record_format("mxfp8", HEAD_DIM, latent=False, num_kv_heads=KV_HEADS)
VECTOR_BYTES = 2 * 2 * KV_HEADS * HEAD_DIM  # bf16 K and V of a token
SPARE_BLOCKS = 3  # that no sequence owns


@dataclass(frozen=True)
class Pages:
    """Sequences of equal length in randomly chosen blocks; input sets are layers of one pool."""

    layout: PagedLayout
    pool: Any
    tables: np.ndarray  # int32 [sequences, blocks of each]
    device_tables: Any
    sequences: int
    tokens: int

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.tokens

    @property
    def layers(self) -> range:
        return range(len(self.layout.layers))

    def new_vectors(self, place: Place, rng: np.random.Generator) -> tuple[Any, Any]:
        """(k, v) of all tokens."""
        shape = (self.num_tokens, KV_HEADS, HEAD_DIM)
        return random_bf16(place, shape, rng), random_bf16(place, shape, rng)

    def places_of_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """seq_ids and positions int32 [T] of all tokens."""
        seq_ids = np.repeat(np.arange(self.sequences, dtype=np.int32), self.tokens)
        return seq_ids, np.tile(np.arange(self.tokens, dtype=np.int32), self.sequences)

    def last_blocks(self, place: Place) -> np.ndarray:
        """The blocks of the last sequence as a small pool on the host, in their order."""
        blocks = self.pool.reshape(-1, self.layout.block_bytes)
        return host_rows(place, blocks, self.tables[-1]).reshape(-1)


def make_pages(
    place: Place, sequences: int, tokens: int, bytes_of_a_call: int, rng: np.random.Generator
) -> Pages:
    """A pool of poison for `sequences` of `tokens` each, with as many layers as input sets."""
    layers = [(layer, FORMAT) for layer in range(num_sets(bytes_of_a_call))]
    layout = build_paged_layout(layers, BLOCK_SIZE, ALIGN_BYTES)
    each = layout.blocks_of(tokens)
    num_blocks = sequences * each + SPARE_BLOCKS
    tables = rng.permutation(num_blocks)[: sequences * each].astype(np.int32)
    tables = tables.reshape(sequences, each)
    pool = place.memory.empty((num_blocks * layout.block_bytes,), np.uint8)
    pool.fill(POISON_BYTE)
    return Pages(layout, pool, tables, upload(place, tables), sequences, tokens)
