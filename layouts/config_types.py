"""What `load_config` returns: frozen, hashable, with every derived number checked."""

from dataclasses import dataclass
from typing import Literal

from .config_schema import TraceSection
from .errors import ConfigError
from .formats import RecordFormat
from .paged import PagedLayout
from .rope import Rope
from .slots import SlotLayout

# The trace of a run needs no derived values, so its section of the file is used as it is.
TraceConfig = TraceSection


@dataclass(frozen=True)
class LayerConfig:
    """One layer. `window` counts the query itself, and the first `sink_tokens` keys stay visible
    beside it; a layer of kind "global" has None for `window` and `ring_len`, and its records lie in
    the paged pool. `compression_ratio` is None unless the layer owns compression state;
    `softmax_scale` multiplies q . k.
    """

    id: int
    group: str
    kind: Literal["swa", "global"]
    role: Literal["producer", "consumer", "draft"]
    window: int | None
    ring_len: int | None
    rope: Rope
    softmax_scale: float
    softcap: float | None
    sink: bool
    inverse_rope_out: bool
    record_format: RecordFormat
    stored: bool
    compression_ratio: int | None
    sink_tokens: int = 0


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine: state slots, prefill tokens a batch, sequences a batch, and blocks of
    the paged pool (None where no layer is global)."""

    num_state_slots: int
    token_budget: int
    max_prefill_seqs: int
    max_decode_seqs: int
    chunked_prefill: bool
    num_blocks: int | None = None


@dataclass(frozen=True)
class RunConfig:
    """A run: `repeat_rate` of the generated passages repeat an earlier one, which drafts of kind
    "ngram" live on. `trace.num_requests` and `trace.max_prompt_len` also limit a recorded trace,
    while `trace.prompt_len` and `trace.output_len`, first and last length, shape a synthetic
    one."""

    seed: int
    activations: Literal["seeded", "stacked", "file"]
    activations_path: str | None
    accept_rate: float
    drafts: Literal["seeded", "ngram"]
    verify_samples: int
    trace: TraceConfig
    repeat_rate: float = 0.0


@dataclass(frozen=True)
class PrefixConfig:
    """A prefix cache: `block_size` tokens have one key; a snapshot is kept at every
    `snapshot_blocks`-th boundary, in the store at `store`, up to `budget_bytes` (None: no bound).
    contract: what a restored sequence is worth (docs/prefix.md)."""

    contract: Literal["full", "exact", "bounded"]
    block_size: int
    snapshot_blocks: int
    budget_bytes: int | None
    store: str


@dataclass(frozen=True)
class Config:
    """A whole configuration; frozen and hashable. `layers` holds the model's layers, then its draft
    layers: `num_layers + num_draft_layers` in all, each at the index of its id."""

    name: str
    path: str
    version: int
    num_layers: int
    num_draft_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_step: int
    max_seq_len: int
    vocab_size: int
    record_formats: tuple[RecordFormat, ...]
    layers: tuple[LayerConfig, ...]
    slot_layout: SlotLayout
    engine: EngineConfig
    run: RunConfig
    paged_layout: PagedLayout | None = None
    prefix: PrefixConfig | None = None  # None: no prefix cache

    @property
    def latent(self) -> bool:
        """Whether one vector a token is key and value of all heads (K = V); otherwise K and V come
        apart, `num_kv_heads` vectors of each."""
        return self.layers[0].record_format.latent

    def record_format(self, id: str) -> RecordFormat:
        """The record format of that id. Raises ConfigError where there is none."""
        for record_format in self.record_formats:
            if isinstance(id, str) and record_format.id == id:
                return record_format
        known = ", ".join(record_format.id for record_format in self.record_formats)
        raise ConfigError(f"{self.path}: no record format {id!r}; there are: {known}")
