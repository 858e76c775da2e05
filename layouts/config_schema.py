"""What a configuration file holds, key by key; `bind` reads these annotations.

A key is required unless it has a default here. Keys marked derived are stated in the file and
computed again by `config_derive`; a difference is an error.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from .bind import Bound
from .rings import MAX_POSITION

# Bounds that keep a slip (a missing separator, a byte count in place of a length) from becoming a
# huge allocation. All are far above any model.
MAX_LAYERS = 1024
MAX_RING_LEN = 1 << 20
MAX_BYTES = 1 << 48

Count = Annotated[int, Bound(least=1, most=1 << 20)]
LayerId = Annotated[int, Bound(least=0, most=MAX_LAYERS - 1)]
Bytes = Annotated[int, Bound(least=0, most=MAX_BYTES)]
PositiveFloat = Annotated[float, Bound(above=0.0)]
WINDOW_FIX = (
    "write the number of keys that a query sees, itself included; null is for kind global, whose "
    "layers see all keys"
)
Window = Annotated[int, Bound(least=1, most=MAX_RING_LEN, fix=WINDOW_FIX)]


@dataclass(frozen=True)
class ModelSection:
    num_layers: Annotated[int, Bound(least=1, most=MAX_LAYERS)]  # without draft layers
    num_draft_layers: Annotated[int, Bound(least=0, most=MAX_LAYERS)]
    num_q_heads: Count
    num_kv_heads: Count
    head_dim: Count
    tokens_per_step: Annotated[int, Bound(least=1, most=1024)]  # drafts + 1
    max_seq_len: Annotated[int, Bound(least=1, most=MAX_POSITION + 1)]
    vocab_size: Annotated[int, Bound(least=1, most=2**31 - 1)]


@dataclass(frozen=True)
class FieldSection:
    id: str
    type: Literal["e4m3", "e8m0", "bf16", "fp16"]  # derived
    shape: tuple[Count, ...]  # derived
    offset: Bytes  # derived
    doc: str


@dataclass(frozen=True)
class FormatSection:
    id: str
    type: Literal["mxfp8", "bf16", "fp16"]
    plane_order: Literal["interleaved", "planar"]
    latent: bool
    num_kv_heads: Count
    head_dim: Count
    scale_rounding: Literal["ceil", "floor"] | None
    amax_floor: Annotated[float, Bound(least=0.0)] | None
    record_bytes: Bytes  # derived
    fields: tuple[FieldSection, ...]


@dataclass(frozen=True)
class YarnSection:
    factor: Annotated[float, Bound(least=1.0)]
    original_length: Annotated[int, Bound(least=1, most=MAX_POSITION)]
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    truncate: bool = True  # the ramp begins and ends at whole pairs
    attention_factor: PositiveFloat = 1.0  # multiplies rotated queries and keys


@dataclass(frozen=True)
class RopeSection:
    theta: Annotated[float, Bound(above=1.0)]
    dims: Annotated[int, Bound(least=2, most=1 << 20)]
    pairing: Literal["adjacent", "half"]
    yarn: YarnSection | None
    linear_factor: Annotated[float, Bound(least=1.0)] | None = None  # positions are divided by it


@dataclass(frozen=True)
class LayerGroupSection:
    """Layers that differ only in their id: either `layers`, or `first` and `last` (inclusive)."""

    id: str
    num_layers: Count  # derived
    role: Literal["producer", "consumer", "draft"]
    kind: Literal["swa", "global"]
    window: Window | None  # null: kind global
    rope: RopeSection
    softmax_scale: PositiveFloat
    softcap: Annotated[float, Bound(above=0.0, fix="null turns it off")] | None
    sink: bool
    inverse_rope_out: bool
    record_format: str
    layers: tuple[LayerId, ...] | None = None
    first: LayerId | None = None
    last: LayerId | None = None
    sink_tokens: Annotated[int, Bound(least=0, most=MAX_RING_LEN)] = 0  # first keys stay visible


@dataclass(frozen=True)
class RingSection:
    """The rings of one layer group, one a layer, in the order of the layers' ids."""

    layer_group: str
    ring_len: Annotated[int, Bound(least=1, most=MAX_RING_LEN)]
    stored: bool  # derived
    record_bytes: Bytes  # derived
    scale_plane_offset: Bytes | None  # derived; from the ring's start, null where not planar
    padding_bytes: Bytes  # derived
    ring_bytes: Bytes  # derived; padding included
    offset: Bytes  # derived; the first of the group's rings, from the slot's start


@dataclass(frozen=True)
class CompressionSection:
    """Compression state of the layers that own a compressed cache."""

    layers: tuple[LayerId, ...]
    ratio: Annotated[int, Bound(least=1, most=1 << 16)]
    dim: Count
    num_entries: Annotated[int, Bound(least=1, most=MAX_RING_LEN)]
    entry_bytes: Bytes  # derived
    padding_bytes: Bytes  # derived
    ring_bytes: Bytes  # derived; padding included
    offset: Bytes  # derived


@dataclass(frozen=True)
class PagedLayerSection:
    """The records of one group of global layers in a block, one run of records a layer."""

    layer_group: str
    record_bytes: Bytes  # derived
    padding_bytes: Bytes  # derived
    layer_bytes: Bytes  # derived; block_size records of one layer, padding included
    offset: Bytes  # derived; the first of the group's layers, from the block's start


@dataclass(frozen=True)
class PagedSection:
    """Blocks of the paged pool; one block holds block_size tokens of every global layer."""

    block_size: Annotated[int, Bound(least=1, most=1 << 16)]
    align_bytes: Annotated[int, Bound(least=16, most=1 << 20)]
    layers: tuple[PagedLayerSection, ...]
    block_bytes: Bytes  # derived


@dataclass(frozen=True)
class SlotSection:
    align_bytes: Annotated[int, Bound(least=16, most=1 << 20)]
    rings: tuple[RingSection, ...]
    compression: tuple[CompressionSection, ...]
    stored_bytes: Bytes  # derived
    slot_bytes: Bytes  # derived


@dataclass(frozen=True)
class EngineSection:
    num_state_slots: Count
    token_budget: Annotated[int, Bound(least=1, most=1 << 24)]
    max_prefill_seqs: Count
    max_decode_seqs: Count
    chunked_prefill: bool
    num_blocks: Annotated[int, Bound(least=1, most=2**31 - 1)] | None = None  # of the paged pool


@dataclass(frozen=True)
class TraceSection:
    kind: Literal["synthetic", "mooncake", "azure"]
    path: str | None
    num_requests: Annotated[int, Bound(least=1, most=1 << 31)] | None  # null: all of the trace
    prompt_len: tuple[
        Annotated[int, Bound(least=1, most=MAX_POSITION)],
        Annotated[int, Bound(least=1, most=MAX_POSITION)],
    ]
    output_len: tuple[
        Annotated[int, Bound(least=0, most=MAX_POSITION)],
        Annotated[int, Bound(least=0, most=MAX_POSITION)],
    ]
    max_prompt_len: Annotated[int, Bound(least=1, most=MAX_POSITION)] | None
    # Tokens that one of a trace's hash ids stands for here; lengths shrink or grow with it.
    hash_block_tokens: Annotated[int, Bound(least=2, most=1 << 20)] = 512
    # Seconds of the run for a second of the trace; null: arrival times are not waited for.
    time_scale: PositiveFloat | None = None


@dataclass(frozen=True)
class RunSection:
    seed: Annotated[int, Bound(least=0, most=2**64 - 1)]
    activations: Literal["seeded", "stacked", "file"]
    activations_path: str | None
    accept_rate: Annotated[float, Bound(least=0.0, most=1.0)]
    drafts: Literal["seeded", "ngram"]
    verify_samples: Annotated[int, Bound(least=0, most=1 << 31)]
    trace: TraceSection
    repeat_rate: Annotated[float, Bound(least=0.0, most=0.95)] = 0.0  # of generated passages


@dataclass(frozen=True)
class PrefixSection:
    """The prefix cache; without this section, or with contract none, there is none."""

    contract: Literal["none", "full", "exact", "bounded"]
    block_size: Annotated[int, Bound(least=1, most=1 << 20)]  # tokens
    snapshot_blocks: Annotated[int, Bound(least=1, most=1 << 20)]  # blocks between snapshots
    budget_bytes: Annotated[int, Bound(least=1, most=MAX_BYTES)] | None  # null: no bound
    store: str  # memory:, lmdb:PATH or redis://HOST:PORT/DB


@dataclass(frozen=True)
class ConfigFile:
    name: str
    version: Annotated[int, Bound(least=1, most=2**31 - 1)]
    model: ModelSection
    record_formats: tuple[FormatSection, ...]
    layer_groups: tuple[LayerGroupSection, ...]
    slot: SlotSection
    engine: EngineSection
    run: RunSection
    paged: PagedSection | None = None  # models with global layers
    prefix: PrefixSection | None = None
