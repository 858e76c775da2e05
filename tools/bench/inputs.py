"""Inputs of benchmarks: random, finite, of the right distribution of bytes, in memory that no other
input set shares.

bf16 vectors come from the counter hash of `seeded_activations`, so that gigabytes of them are made
where they are needed. Record bytes are uniform E4M3 without NaN, with scales around 2^-7.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ...engine.slab import slab_bytes, take_slab
from ...layouts.config import Config, LayerConfig
from ...layouts.formats import E4M3_NAN_BYTE, RecordFormat
from ...layouts.plans import DecodePlan
from ...layouts.sizes import div_exact
from ...layouts.slots import SlotLayout
from ...schedules.plan_decode import plan_decode
from .common import POISON_BYTE, Place

SCALE_CODES = (117, 123)  # first and last + 1: values up to 448 * 2^-5
FIRST_POSITIONS = (10_000, 1_000_000)  # of sequences; past any ring's length, so that rings wrap
SPARE_SLOTS = 3  # state slots that no sequence owns
SAMPLE_SEQUENCES = 2  # looked at by a check: the reference is slow
SAMPLE_ROWS = 32


def upload(place: Place, array: np.ndarray) -> Any:
    """A copy of a host array where the place works."""
    array = np.ascontiguousarray(array)
    copy = place.memory.empty(array.shape, array.dtype)
    place.memory.upload(copy, array)
    return copy


def upload_plan(place: Place, plan: Any) -> Any:
    """A plan with its arrays where the place works."""
    arrays = {
        f.name: upload(place, getattr(plan, f.name))
        for f in fields(plan)
        if isinstance(getattr(plan, f.name), np.ndarray)
    }
    return replace(plan, **arrays)


def host_rows(place: Place, array: Any, rows: np.ndarray) -> np.ndarray:
    """Some rows of an array, on the host."""
    return np.stack([place.memory.to_host(array[int(row)]) for row in rows])


def sample_rows(num_rows: int, rng: np.random.Generator, most: int = SAMPLE_ROWS) -> np.ndarray:
    """The first and the last row and some between, ascending."""
    if num_rows <= most:
        return np.arange(num_rows)
    inner = rng.choice(num_rows - 2, most - 2, replace=False) + 1
    return np.sort(np.concatenate([[0, num_rows - 1], inner]))


def random_bf16(place: Place, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """bf16 bits [T, ...] in -2 .. 2, of variance 2/3."""
    out = place.memory.empty(shape, np.uint16)
    ids = upload(place, np.arange(shape[0], dtype=np.int32))
    seed = int(rng.integers(2**62))
    place.ops.seeded_activations(seed, 0, ids, ids, out.reshape(shape[0], -1))
    return out


def new_vectors(place: Place, fmt: RecordFormat, tokens: int, rng: np.random.Generator) -> Any:
    """What records of `fmt` are made from, bf16 bits: [tokens, head_dim], or the pair (k, v)."""
    if fmt.latent:
        return random_bf16(place, (tokens, fmt.head_dim), rng)
    shape = (tokens, fmt.num_kv_heads, fmt.head_dim)
    return random_bf16(place, shape, rng), random_bf16(place, shape, rng)


def vector_bytes(fmt: RecordFormat) -> int:
    """Bytes of one token of `new_vectors`."""
    return 2 * fmt.num_vectors * fmt.head_dim


def host_vectors(place: Place, kv: Any, rows: np.ndarray) -> Any:
    """Some tokens of `new_vectors`, on the host."""
    if isinstance(kv, tuple):
        return tuple(host_rows(place, part, rows) for part in kv)
    return host_rows(place, kv, rows)


def random_records(num_rows: int, fmt: RecordFormat, rng: np.random.Generator) -> np.ndarray:
    """Records on the host, uint8 [num_rows, record_bytes], all finite."""
    if fmt.type != "mxfp8":
        words = div_exact(fmt.record_bytes, 2)  # of bf16 or fp16
        bits = rng.standard_normal((num_rows, words), np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    parts = rng.integers(0, 256, (num_rows * fmt.num_parts, fmt.part_bytes), np.uint8)
    values, scales = parts[:, : fmt.part_value_bytes], parts[:, fmt.part_value_bytes :]
    np.subtract(values, 1, out=values, where=(values & E4M3_NAN_BYTE) == E4M3_NAN_BYTE)
    scales[...] = rng.integers(*SCALE_CODES, scales.shape)
    return parts.reshape(num_rows, fmt.record_bytes)


def window_layers(cfg: Config) -> tuple[LayerConfig, ...]:
    """Layers with the window, ring and format of the first layer that has a window: the input sets
    of a bench rotate over them, as a step does."""
    first = next(layer for layer in cfg.layers if layer.window is not None)
    same = [
        layer
        for layer in cfg.layers
        if (layer.window, layer.ring_len, layer.record_format)
        == (first.window, first.ring_len, first.record_format)
    ]
    return tuple(same)


def poisoned_slab(place: Place, layout: SlotLayout, num_slots: int) -> Any:
    slab = take_slab(layout, slab_bytes(layout, num_slots), place.memory)
    slab.fill(POISON_BYTE)
    return slab


def fill_ring(
    place: Place, slab: Any, layout: SlotLayout, layer: LayerConfig, rng: np.random.Generator
) -> None:
    """Random records in every row of a layer's rings."""
    fmt = layer.record_format
    num_slots = div_exact(slab.size, layout.slot_bytes)
    ring_len = layout.ring(layer.id).ring_len
    records = random_records(num_slots * ring_len, fmt, rng)
    records = records.reshape(num_slots, ring_len, 1, -1)
    records = upload(place, records)
    if fmt.plane_order == "interleaved":
        layout.view(slab, layer.id)[...] = records
        return
    values, scales = layout.planes(slab, layer.id)
    values[...] = records[..., : fmt.value_bytes]
    scales[...] = records[..., fmt.value_bytes :]


@dataclass(frozen=True)
class Sequences:
    """Sequences of one step: random state slots, random first positions, `queries` tokens each."""

    state_ids: np.ndarray  # int32 [num_seqs]
    first: np.ndarray  # int32 [num_seqs]
    queries: int
    num_slots: int

    @property
    def num_seqs(self) -> int:
        return self.state_ids.shape[0]

    @property
    def token_state_ids(self) -> np.ndarray:
        return np.repeat(self.state_ids, self.queries)

    @property
    def positions(self) -> np.ndarray:
        offsets = np.arange(self.queries, dtype=np.int32)
        return (self.first[:, None] + offsets).reshape(-1).astype(np.int32)

    @property
    def cu_seqlens_q(self) -> np.ndarray:
        return np.arange(self.num_seqs + 1, dtype=np.int32) * np.int32(self.queries)

    def plan(self, layer: LayerConfig) -> DecodePlan:
        return plan_decode(
            self.token_state_ids,
            self.positions,
            window=layer.window,
            ring_len=layer.ring_len,
            cu_seqlens_q=self.cu_seqlens_q,
        )


def random_sequences(num_seqs: int, queries: int, rng: np.random.Generator) -> Sequences:
    num_slots = num_seqs + SPARE_SLOTS
    return Sequences(
        state_ids=rng.permutation(num_slots)[:num_seqs].astype(np.int32),
        first=rng.integers(*FIRST_POSITIONS, num_seqs).astype(np.int32),
        queries=queries,
        num_slots=num_slots,
    )


def sample_of(sequences: Sequences) -> tuple[Sequences, np.ndarray]:
    """The first and the last sequence in state slots of their own, 0 and 1, and which they were."""
    which = np.unique([0, sequences.num_seqs - 1])[:SAMPLE_SEQUENCES]
    chosen = Sequences(
        state_ids=np.arange(len(which), dtype=np.int32),
        first=sequences.first[which],
        queries=sequences.queries,
        num_slots=len(which),
    )
    return chosen, which


def sample_slots(
    place: Place, slab: Any, layout: SlotLayout, sequences: Sequences, which: np.ndarray
) -> np.ndarray:
    """The state slots of some sequences as a small slab on the host."""
    by_slot = slab.reshape(-1, layout.slot_bytes)
    return host_rows(place, by_slot, sequences.state_ids[which]).reshape(-1)


def token_rows(which: np.ndarray, queries: int) -> np.ndarray:
    """Rows of the tokens of some sequences."""
    return (which[:, None] * queries + np.arange(queries)).reshape(-1)
