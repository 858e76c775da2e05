"""Which query tokens `--verify` looks at, and what the run made of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.memory import Memory
from ..schedules.batch import Batch
from .tokens import hash_words

SAMPLE_STREAM, STACK_STREAM = 201, 202  # first words of the hashes that choose samples
MAX_STACKED_SAMPLES = 64  # each keeps a window of outputs of the layer before: 8 MB in V4.1
# A quarter of a stacked run's samples are computed from layer 0 up: the first layers and positions
# of the shortest request. Further up rounding grows until such a check says little.
STACK_LAYERS = 4
STACK_POSITIONS = 64


@dataclass(frozen=True)
class Sample:
    """One query token of one layer; `whole_stack`: computed again from layer 0 up as well."""

    request_id: str
    layer: int
    position: int
    whole_stack: bool = False


@dataclass(frozen=True)
class Seen:
    """How a sample was computed: kind of batch, first position of its sequence in the batch, and
    the sequence's tokens of the batch from there on, int32."""

    kind: str
    first_position: int
    token_ids: np.ndarray


@dataclass
class Capture:
    """Outputs and log-sum-exps of sampled tokens, copied on the engine's device as the run makes
    them, and in a stacked run the outputs of the layer before over all positions that the token may
    see.

    A position may be computed more than once (a rejected draft, a preemption); the last one stays,
    as it does in the ring, but for what a replay computes below a cached prefix.
    """

    memory: Memory
    samples: list[Sample]
    outputs: Any  # uint16 [num_samples, num_q_heads, head_dim] on the device
    lses: Any  # float32 [num_samples, num_q_heads] on the device
    inputs: Any  # uint16 [num_samples, input rows, num_q_heads, head_dim], or None
    reach: tuple[int, int]  # positions before and after a sample's own that have input rows
    by_request: dict[str, list[int]]
    seen: dict[int, Seen] = field(default_factory=dict)
    hits: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    input_hits: dict[int, list[tuple[int, slice, slice]]] = field(default_factory=dict)
    # Samples whose inputs a prefix hit left out in part, and whose whole stack it did not compute.
    blind: set[int] = field(default_factory=set)
    rebuilt: set[int] = field(default_factory=set)

    def begin(self, batch: Batch) -> None:
        """Finds the samples, and the input rows of samples, that this batch computes."""
        self.hits, self.input_hits = {}, {}
        if not self.samples:
            return
        starts, ends = batch.seqlens_k - batch.seqlens_q, batch.seqlens_k
        for row, request_id in enumerate(batch.request_ids):
            for i in self.by_request.get(request_id, ()):
                start, end = int(starts[row]), int(ends[row])
                own = int(batch.first_outputs[row])  # those below are no outputs of the request
                first_token = int(batch.cu_seqlens_q[row])
                sample = self.samples[i]
                # Once the sequence is past the sample, what it saw must stay: a draft behind it may
                # be computed again with another token, and a replay gives other outputs.
                if sample.position < max(start, own):
                    continue
                if own > 0:
                    self.rebuilt.add(i)
                    if sample.position - self.reach[0] < own:
                        self.blind.add(i)
                if sample.position < end:
                    token = first_token + sample.position - start
                    self.hits.setdefault(sample.layer, []).append((i, token))
                    tokens = batch.token_ids[first_token : first_token + end - start]
                    self.seen[i] = Seen(batch.kind, start, tokens.copy())
                if self.inputs is not None and sample.layer > 0:
                    self._find_inputs(i, sample, start, end, first_token)

    @property
    def wants_outputs(self) -> bool:
        """Whether `take` copies anything of the batch that `begin` was called with."""
        return bool(self.hits or self.input_hits)

    def _find_inputs(self, i: int, sample: Sample, start: int, end: int, first_token: int) -> None:
        base = sample.position - self.reach[0]  # position of input row 0
        low, high = max(start, base), min(end, sample.position + self.reach[1] + 1)
        if low < high:
            rows = slice(low - base, high - base)
            tokens = slice(first_token + low - start, first_token + high - start)
            self.input_hits.setdefault(sample.layer - 1, []).append((i, rows, tokens))

    def take(self, layer: int, out: Any, lse: Any) -> None:
        """Copies the rows that are wanted of a layer's output [T, num_q_heads, head_dim] and
        log-sum-exp [T, num_q_heads]."""
        for i, token in self.hits.get(layer, ()):
            self.outputs[i] = out[token]
            self.lses[i] = lse[token]
        for i, rows, tokens in self.input_hits.get(layer, ()):
            self.inputs[i, rows] = out[tokens]

    def input_rows(self, i: int, first: int, last: int) -> np.ndarray:
        """Outputs of the layer before sample i's at positions first .. last, on the host:
        uint16 [last - first + 1, num_q_heads, head_dim]."""
        base = self.samples[i].position - self.reach[0]
        assert base <= first <= last <= self.samples[i].position + self.reach[1]
        return self.memory.to_host(self.inputs[i, first - base : last - base + 1])


@dataclass
class Watched:
    """Outputs of up to `count` tokens that every run of a trace computes, whatever a prefix cache
    gave it: last tokens of prompts and generated ones. A run fills `outputs`, uint16 [num_q_heads,
    head_dim] each, on the host."""

    count: int
    outputs: dict[Sample, np.ndarray] = field(default_factory=dict)

    def samples(
        self, cfg: Config, ids: list[str], prompt_lens: list[int], lengths: list[int]
    ) -> list[Sample]:
        """What to look at; the same for every run of a trace."""
        spans = zip(ids, prompt_lens, lengths, strict=True)
        late = [(id, prompt - 1, length) for id, prompt, length in spans]
        layers = cfg.num_layers  # draft layers see other drafts in another run
        return _draw(cfg.run.seed, SAMPLE_STREAM, self.count, [late], layers, whole_stack=False)

    def take(self, capture: "Capture") -> None:
        outputs = capture.memory.to_host(capture.outputs)
        self.outputs = {capture.samples[i]: outputs[i] for i in sorted(capture.seen)}


def open_capture(
    samples: list[Sample],
    cfg: Config,
    memory: Memory,
    longest: int = 0,
    *,
    with_inputs: bool = True,
) -> Capture:
    """Takes the device memory of a capture: `num_samples` outputs, and in a stacked run (where
    `with_inputs`) a window of inputs for each; where a layer is global, inputs of `longest` tokens,
    the most of a request."""
    by_request: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        by_request.setdefault(sample.request_id, []).append(i)
    heads = (cfg.num_q_heads, cfg.head_dim)
    # A draft sees the window of the token it hangs on, and the drafts after it.
    drafts = cfg.tokens_per_step - 1
    whole = [longest for y in cfg.layers if y.window is None or y.sink_tokens]
    reach = max(whole + [y.window - 1 + drafts for y in cfg.layers if y.window is not None])
    reach = (reach, drafts)
    inputs = None
    if cfg.run.activations == "stacked" and with_inputs:
        inputs = memory.empty((len(samples), sum(reach) + 1, *heads), np.uint16)
    outputs = memory.empty((len(samples), *heads), np.uint16)
    lses = memory.empty((len(samples), cfg.num_q_heads), np.float32)
    return Capture(memory, samples, outputs, lses, inputs, reach, by_request)


def choose_samples(
    cfg: Config, ids: list[str], prompt_lens: list[int], lengths: list[int]
) -> list[Sample]:
    """`cfg.run.verify_samples` different samples (fewer where there are not so many, at most
    MAX_STACKED_SAMPLES in a stacked run), spread over requests, layers and positions by the run's
    seed. `lengths` are the positions that each request computes, its prompt's among them.

    Prompts and generated tokens take turns, and so do the layers: with twice as many samples as
    layers each layer is looked at in prefill and in decode, although a trace's prompts may be a
    hundred times as long as its outputs.
    """
    spans = list(zip(ids, prompt_lens, lengths, strict=True))
    prompts = [(id, 0, min(prompt, length)) for id, prompt, length in spans if length > 0]
    generated = [(id, prompt, length) for id, prompt, length in spans if length > prompt]
    parts = [part for part in (prompts, generated) if part]
    count, seed = cfg.run.verify_samples, cfg.run.seed
    if not parts:
        return []
    ground: list[Sample] = []
    if cfg.run.activations == "stacked":
        count = min(count, MAX_STACKED_SAMPLES)
        id, length = min(zip(ids, lengths, strict=True), key=lambda pair: pair[1] or np.inf)
        shortest = [(id, 0, min(length, STACK_POSITIONS))]
        depth = min(cfg.num_layers, STACK_LAYERS)
        quarter = -(-count // 4)
        ground = _draw(seed, STACK_STREAM, quarter, [shortest], depth, whole_stack=True)
    rest, layers = count - len(ground), len(cfg.layers)
    return ground + _draw(seed, SAMPLE_STREAM, rest, parts, layers, whole_stack=False)


def _draw(
    seed: int, stream: int, count: int, parts: list, num_layers: int, *, whole_stack: bool
) -> list[Sample]:
    """Up to `count` different samples of `parts`, lists of (id, first position, end) that take
    turns."""
    layers = np.argsort(hash_words(seed, stream, np.arange(num_layers), 2), kind="stable").tolist()
    draws = np.arange(4 * count)  # more than wanted: some fall together
    words = [hash_words(seed, stream, draws, axis).tolist() for axis in range(2)]
    chosen: dict[Sample, None] = {}
    for draw, (request_word, position_word) in enumerate(zip(*words, strict=True)):
        if len(chosen) == count:
            break
        turn, part_id = divmod(draw, len(parts))
        part = parts[part_id]
        id, first, end = part[request_word % len(part)]
        position = first + position_word % (end - first)
        chosen[Sample(id, layers[turn % num_layers], position, whole_stack)] = None
    return list(chosen)
