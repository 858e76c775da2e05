"""Which query tokens `--verify` looks at, and their outputs as the run made them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.memory import Memory
from ..schedules.batch import Batch
from .tokens import hash_words

SAMPLE_STREAM = 201  # first word of the hashes that choose samples
STACKED_POSITIONS = 256  # a stack is recomputed whole, so its samples stay near the start
STACKED_REQUESTS = 2


@dataclass(frozen=True)
class Sample:
    """One query token of one layer."""

    request_id: str
    layer: int
    position: int


@dataclass(frozen=True)
class Seen:
    """How a sample was computed: kind of batch, first position of its sequence in the batch, and
    the sequence's tokens of the batch from there on, int32."""

    kind: str
    first_position: int
    token_ids: np.ndarray


@dataclass
class Capture:
    """Outputs of sampled tokens, copied on the engine's device as the run makes them.

    A position may be computed more than once (a rejected draft, a preemption); the last one stays.
    """

    samples: list[Sample]
    outputs: Any  # uint16 [num_samples, num_q_heads, head_dim] on the device
    by_request: dict[str, list[int]]
    seen: dict[int, Seen] = field(default_factory=dict)
    hits: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def begin(self, batch: Batch) -> None:
        """Finds the samples that this batch computes: (sample, token) by layer."""
        self.hits = {}
        if not self.samples:
            return
        starts, ends = batch.seqlens_k - batch.seqlens_q, batch.seqlens_k
        for row, request_id in enumerate(batch.request_ids):
            for i in self.by_request.get(request_id, ()):
                sample = self.samples[i]
                if starts[row] <= sample.position < ends[row]:
                    begin, end = batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]
                    token = int(begin + sample.position - starts[row])
                    self.hits.setdefault(sample.layer, []).append((i, token))
                    self.seen[i] = Seen(
                        batch.kind, int(starts[row]), batch.token_ids[begin:end].copy()
                    )

    def take(self, layer: int, out: Any) -> None:
        """Copies the sampled rows of a layer's output [T, num_q_heads, head_dim]."""
        for i, token in self.hits.get(layer, ()):
            self.outputs[i] = out[token]


def open_capture(samples: list[Sample], cfg: Config, memory: Memory) -> Capture:
    by_request: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        by_request.setdefault(sample.request_id, []).append(i)
    shape = (len(samples), cfg.num_q_heads, cfg.head_dim)
    return Capture(samples, memory.empty(shape, np.uint16), by_request)


def choose_samples(cfg: Config, ids: list[str], lengths: list[int]) -> list[Sample]:
    """`cfg.run.verify_samples` different samples (fewer where there are not so many), spread over
    requests, layers and positions by the run's seed. `lengths` are the positions that each request
    computes.

    A stacked run is checked on few requests, near their start and on the model's own layers: each
    check recomputes the whole stack below it, and a draft layer's input depends on what was
    drafted.
    """
    stacked = cfg.run.activations == "stacked"
    num_layers = cfg.num_layers if stacked else len(cfg.layers)
    requests = [(id, length) for id, length in zip(ids, lengths, strict=True) if length > 0]
    if stacked:
        shortest = sorted(requests, key=lambda request: request[1])[:STACKED_REQUESTS]
        requests = [(id, min(length, STACKED_POSITIONS)) for id, length in shortest]
    if not requests or cfg.run.verify_samples == 0:
        return []
    draws = np.arange(4 * cfg.run.verify_samples)  # more than wanted: some fall together
    words = [hash_words(cfg.run.seed, SAMPLE_STREAM, draws, axis) for axis in range(3)]
    chosen: dict[Sample, None] = {}
    for request_word, layer_word, position_word in zip(*words, strict=True):
        id, length = requests[int(request_word) % len(requests)]
        sample = Sample(id, int(layer_word) % num_layers, int(position_word) % length)
        chosen[sample] = None
        if len(chosen) == cfg.run.verify_samples:
            break
    return list(chosen)
