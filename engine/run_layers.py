"""All layers of a batch of a run: activations, attention, digest, sampled outputs.

A decode step is captured in a CUDA graph where it can be: an engine's first step of each size runs
call by call and is then captured; every later one, also of later runs where activations are not
recorded, is an upload of its inputs and one launch. Steps that are looked into (their operations
timed, outputs of theirs sampled for `--verify`) run call by call, with the same calls on the same
buffers, so that no bit depends on how a step ran.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..schedules.batch import Batch
from .activation_source import ActivationSource
from .decode_inputs import StepArrays, StepSize
from .digests import DigestLog
from .samples import Capture
from .step import attend_layer


@dataclass
class DecodeGraphs:
    """Captured decode steps of an engine, and how those of a run ran."""

    launches: dict[StepSize, Callable[[], None]] = field(default_factory=dict)
    replayed_steps: int = 0
    called_steps: int = 0

    def as_report(self) -> dict[str, Any]:
        return {
            "captured": [list(size) for size in sorted(self.launches)],
            "replayed_steps": self.replayed_steps,
            "called_steps": self.called_steps,
        }


@dataclass
class LayerRunner:
    """What the layers of a run work with; `graphs` is None where decode steps are not captured."""

    engine: Any
    source: ActivationSource
    digests: DigestLog
    capture: Capture
    graphs: DecodeGraphs | None

    def run(self, batch: Batch, *, sample: bool) -> None:
        """Queues every layer of the open batch; `sample`: its operations are timed."""
        self.source.prepare(batch)
        self.capture.begin(batch)
        watch = self.engine.tools.watch
        log = self.digests.begin(batch.num_tokens)  # may wait, so before a timed step is held
        with watch.step(batch.kind, batch.num_seqs, batch.num_tokens, sample=sample):
            if self.graphs is None or batch.kind == "prefill":
                self._attend(batch, log)
            else:
                self._decode(batch, self.engine.open_step, log, sample=sample)

    def _attend(self, batch: Batch, log: Any) -> None:
        """Layer by layer, as an embedding caller does it."""
        engine, size = self.engine, batch.num_tokens
        q, kv, out = engine.run_buffers().first(size)
        lse = engine.tools.workspace.lse[:size]
        for layer in range(len(engine.cfg.layers)):
            self._fill(layer, batch, q, kv, out)
            engine.attend(layer, batch, q, kv, out, lse)
            self._keep(layer, out, lse, log)

    def _decode(self, batch: Batch, step: StepArrays, log: Any, *, sample: bool) -> None:
        """The step in its fixed buffers: replayed, or called."""
        graphs, memory = self.graphs, self.engine.memory
        launch = graphs.launches.get(step.size)
        looked_into = sample or self.capture.wants_outputs
        if launch is not None and not looked_into:
            with self.engine.tools.watch.ranges.span("replay", size=batch.num_tokens):
                launch()
            graphs.replayed_steps += 1
        else:
            self.call_step(step)
            graphs.called_steps += 1
            if launch is None and not looked_into:
                # Without the run's own samples, so that later runs can replay it.
                queued = partial(queue_step, self.engine, self.source, step)
                graphs.launches[step.size] = memory.capture(queued)
        memory.copy(log, step.digests)
        self.engine.replayed(batch)

    def call_step(self, step: StepArrays, num_layers: int | None = None) -> None:
        """Queues one decode step over the fixed buffers, as `queue_step`, and takes samples."""
        queue_step(self.engine, self.source, step, self.capture.take, num_layers)

    def _fill(self, layer: int, batch: Batch, q: Any, kv: Any, out: Any) -> None:
        fill_layer(self.engine, self.source, layer, batch, q, kv, out)

    def _keep(self, layer: int, out: Any, lse: Any, digests: Any) -> None:
        """The sampled outputs of a layer, and its digests."""
        self.capture.take(layer, out, lse)
        digest_layer(self.engine, layer, out, digests)


def queue_step(
    engine: Any,
    source: ActivationSource,
    step: StepArrays,
    take: Callable[[int, Any, Any], None] | None = None,
    num_layers: int | None = None,
) -> None:
    """Queues one decode step over the fixed buffers: plans, then every layer, or the first
    `num_layers`. `take` is given each layer's out and lse. Nothing here looks at a batch's values
    on the host, allocates, or waits."""
    size = step.size.num_tokens
    q, kv, out = engine.run_buffers().first(size)
    lse = engine.tools.workspace.lse[:size]
    engine.memory.zero(step.digests)
    with engine.tools.watch.op("plan_decode", 0, size):
        engine.decode_inputs().fill_plans(step)
    for layer in engine.cfg.layers[:num_layers]:
        fill_layer(engine, source, layer.id, step.batch, q, kv, out)
        attend_layer(engine.tools, layer, step.batch, q, kv, out, lse)
        if take is not None:
            take(layer.id, out, lse)
        digest_layer(engine, layer.id, out, step.digests)


def fill_layer(
    engine: Any, source: ActivationSource, layer: int, batch: Batch, q: Any, kv: Any, out: Any
) -> None:
    """Queries and keys of a layer; `out` has the outputs of the layer before."""
    with engine.tools.watch.op(f"{source.kind}_activations", layer, len(q)):
        source.fill(layer, batch, q, kv, out)


def digest_layer(engine: Any, layer: int, out: Any, digests: Any) -> None:
    """Adds a layer's outputs to the digests of their tokens; draft layers have none."""
    cfg, tools = engine.cfg, engine.tools
    if layer < cfg.num_layers:
        flat = out.reshape(len(out), cfg.num_q_heads * cfg.head_dim)
        with tools.watch.op("digest_outputs", layer, len(out)):
            tools.ops.digest_outputs(flat, layer, digests)
