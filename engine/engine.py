"""The engine: submit requests, take batches, attend layer by layer, commit.

    with Engine(cfg) as engine:
        engine.submit(Request("a", prompt, max_new_tokens=20))
        while (batch := engine.next_batch()) is not None:
            for layer in range(len(cfg.layers)):
                out = engine.attend(layer, batch, *queries_and_keys(layer, batch))
            engine.commit(batch, accepted, next_tokens, drafts)

`next_batch`, `attend` and `commit` belong to one thread; results are queued on the engine's stream.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.errors import ArgumentError, BatchError
from ..rawkernels.arrays import BF16, as_array, empty_like_backend, is_cuda
from ..rawkernels.checks import check_flag
from ..rawkernels.memory import load_memory, refuse_too_large
from ..schedules.batch import Batch, HostBatch, Request, with_plans
from ..schedules.scheduler import Scheduler
from .attend_checks import (
    LSE_DTYPES,
    OUT_DTYPES,
    check_result,
    check_sink,
    layer_of,
    refuse_unsupported,
)
from .attend_inputs import bring_activations
from .backends import check_device_number, choose_backend
from .batch_order import BatchOrder
from .batches import build_batch, scheduler_limits
from .decode_inputs import DecodeInputs, StepArrays, take_decode_inputs
from .prefix_cache import open_prefix
from .startup import take_tools, upload_sink
from .state_reset import reset_states, take_reset
from .step import attend_layer
from .workspace import engine_sizes, plan_keys, take_run_buffers


class Engine:
    """Prefill and decode of many sequences over one slab.

    cfg              a `Config` of `load_config`
    backend          "auto" (a GPU where one can be used, else the CPU), "cuda", "cpu", "reference"
    num_state_slots  sequences that can hold state at once; None takes the configured number
    device, stream   GPU number, and a CuPy stream or None for the current one of each call
    check_finite     refuse non-finite q and kv (reads them back: for debugging)

    Takes its memory now, but what only `run`, `padded` and host arrays for a GPU need, at the first
    of them; `engine_sizes(cfg, num_state_slots)` says how much that is. Raises DeviceMemoryError
    where it does not fit, BackendError where the backend cannot run here.
    The sinks of layers that have them are seeded numbers until `set_sink` gives the model's.
    """

    def __init__(
        self,
        cfg: Config,
        backend: str = "auto",
        num_state_slots: int | None = None,
        device: int = 0,
        stream: Any = None,
        *,
        check_finite: bool = False,
    ):
        if not isinstance(cfg, Config):
            raise ArgumentError(f"cfg is {type(cfg).__name__}; pass what load_config returns")
        check_flag("Engine", "check_finite", check_finite)
        refuse_unsupported(cfg)
        self.cfg = cfg
        self.backend = choose_backend(backend, check_device_number(device))
        self.sizes = engine_sizes(cfg, num_state_slots, on_gpu=self.backend == "cuda")
        self.check_finite = check_finite
        self.memory = load_memory(self.backend, device, stream)
        with self.memory.scope():
            self.tools = take_tools(cfg, self.sizes, self.memory, self.backend)
            self._reset = take_reset(cfg.slot_layout, self.memory)
            self.prefix, planner = open_prefix(cfg, self.memory, self.backend)
            if self.prefix is not None:
                self.tools = replace(self.tools, stage=self.prefix.stage)
        limits = scheduler_limits(cfg, self.sizes.num_state_slots)
        self.scheduler = Scheduler(limits, planner)
        self._run_buffers = None
        self._decode_inputs: DecodeInputs | None = None
        # `run` sets it: decode batches then come in the fixed buffers, padded, and their plans are
        # there once `fill_plans` has run.
        self.fixed_decodes = False
        self.step_graphs: dict = {}  # captured decode steps by StepSize, kept from run to run
        self._order = BatchOrder(len(cfg.layers))
        self._closed = False

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the engine's memory; twice is nothing. Results stay valid."""
        if self._closed:
            return
        self._closed = True
        self._order.close()
        self.step_graphs.clear()
        self._run_buffers = self._decode_inputs = self._reset = self.tools = None
        if self.prefix is not None:
            self.prefix.close()

    @property
    def slab(self) -> Any:
        """The flat uint8 slab, for `cfg.slot_layout.view`."""
        self._check_alive()
        return self.tools.slab

    @property
    def done(self) -> bool:
        """True where no request waits, runs or is preempted."""
        return self.scheduler.done

    @property
    def open_step(self) -> StepArrays | None:
        """The open decode batch in the fixed buffers, where it is there."""
        return self._order.step

    def submit(self, request: Request) -> None:
        """Queues a request. Raises RequestError, and queues nothing, for an empty or negative
        prompt, an id that is still running, or more tokens than max_seq_len."""
        self._check_alive()
        self.scheduler.submit(request)

    def abort(self, id: str) -> None:
        """Ends a request in whatever state it is and frees its slot; ended ones stay as they are.
        Raises RequestError for an id that was never submitted."""
        self._check_alive()
        self.scheduler.abort(id)

    def abort_all(self) -> None:
        """Ends every request and drops the open batch, if there is one: after a fault, or a Ctrl-C
        in the middle of a call, the engine can begin anew. What is cached stays."""
        self._check_alive()
        self._order.close()
        self.scheduler.abort_all()

    def preempt(self, id: str) -> None:
        """Sends a running request back to the head of the queue; what it has generated is kept and
        its state recomputed. Raises RequestError where it holds no slot."""
        self._check_alive()
        self.scheduler.preempt(id)

    def tokens(self, id: str) -> np.ndarray:
        """Prompt and generated tokens of a request, int32 [n]."""
        return self.scheduler.tokens(id)

    def set_sink(self, layer: int, sink: Any) -> None:
        """Gives a layer its sink logits, float32 [num_q_heads], in place of the seeded ones.

        Raises ArgumentError for another shape or dtype and for a layer without a sink; with a
        prefix cache also BatchError while requests run.
        """
        self._check_alive()
        config = layer_of(self.cfg, layer)
        if not config.sink:
            raise ArgumentError(f"set_sink: layer={layer} has sink: false in {self.cfg.path}")
        array = check_sink(sink, self.cfg.num_q_heads)
        if self.prefix is not None:
            self.prefix.check_idle("set_sink", self.done)
        with self.memory.scope():
            host = self.memory.to_host(array) if is_cuda(array) else array
            self.tools.sinks[layer] = upload_sink(self.memory, host)
            self.step_graphs.clear()  # they read the ones before
            if self.prefix is not None:
                self.prefix.set_sinks(self.tools.sinks)

    def next_batch(self) -> Batch | None:
        """The next prefill or decode batch with its plans, or None where nothing can run now.

        Raises BatchError while the last batch is not committed. Where anything else is raised (no
        memory, Ctrl-C) there is no batch; its requests are preempted, and come again.
        """
        self._check_alive()
        self._order.check_none_open()
        if self.scheduler.in_flight is not None:  # an earlier call was cut off: nobody has it
            self.scheduler.take_back(self.scheduler.in_flight)
        ranges = self.tools.watch.ranges
        with ranges.span("next_batch"), self.memory.scope():
            host = self.scheduler.next_batch()
            if host is None:
                return None
            try:
                batch = self._begin(host)
                self._order.open(host, batch)
            except BaseException:
                self._order.close()  # it may be in the fixed buffers already
                self.scheduler.take_back(host)
                raise
        return batch

    def padded(self, batch: Batch) -> Batch:
        """The open decode batch with room to spare, for a step that is captured in a CUDA graph.

        Its arrays and plans on the device are fixed for each shape (`num_seqs`, `num_tokens`): the
        same addresses whenever a batch of that shape comes, filled anew by this call. The batch's
        tokens come first, then padding (state id -1), which is not stored and gives 0. `attend`
        takes it in the place of the batch; `commit` takes the batch itself. Its host arrays say
        nothing. Call it outside a capture. Raises BatchError for a prefill batch, or one that is
        not the open one.
        """
        self._check_open("padded", batch)
        if batch.kind != "decode":
            raise BatchError("padded: this is a prefill batch; only decode steps have fixed shapes")
        with self.memory.scope():
            if self.memory.capturing():
                raise BatchError("padded: call it before the capture; it uploads the batch")
            step = self.decode_inputs().upload(self._order.host)
            self._order.step = step
            self._decode_inputs.replay_plans(step)
        return step.batch

    def replayed(self, batch: Batch, layers: Any = None) -> None:
        """Notes that a captured graph has attended `layers` (all of them where left out) of the
        open batch, as the calls of `attend` that were captured would have."""
        self._check_open("replayed", batch)
        try:
            named = range(len(self.cfg.layers)) if layers is None else list(layers)
        except TypeError:
            raise ArgumentError(f"replayed: layers={layers!r} but must be layer ids") from None
        for layer in () if layers is None else named:
            layer_of(self.cfg, layer)
        self._order.check_records(named)
        self._order.attended(named)

    def attend(
        self, layer: int, batch: Batch, q: Any, kv: Any, out: Any = None, lse: Any = None
    ) -> Any:
        """Stores the batch's new records of a layer and attends, in the order its kind needs.

        layer  0 .. num_layers - 1, then the draft layers; each once a batch
        q      bf16 [T, num_q_heads, head_dim], rotated already
        kv     bf16 [T, head_dim], or (k, v) of [T, num_kv_heads, head_dim] each, not rotated
        out    bf16 like q, lse float32 [T, num_q_heads] natural and without the sink; allocated
               where left out

        Returns out: NumPy bfloat16 on the host, CuPy uint16 bits on a GPU. On a GPU host arrays
        are uploaded first. Raises BatchError for a batch that is not the open one, a layer that
        was attended already, or one that missed an earlier batch of a sequence; ArgumentError for
        wrong shapes, dtypes, strides or devices (nothing has been stored then).
        """
        config = layer_of(self.cfg, layer)
        self._check_open("attend", batch)
        with self.memory.scope():
            self._order.check_layer(layer, again=self.memory.capturing())
            q, kv = bring_activations(self, layer, batch, q, kv)
            if out is None:
                out = empty_like_backend(q.shape, BF16, q)
            if lse is None:
                lse = self.tools.workspace.lse[: batch.num_tokens]
            out, lse = as_array(out, "out"), as_array(lse, "lse")
            check_result("out", out, q.shape, OUT_DTYPES, self.backend)
            check_result("lse", lse, q.shape[:2], LSE_DTYPES, self.backend)
            attend_layer(self.tools, config, batch, q, kv, out, lse)
        self._order.attended([layer])
        return out

    def commit(
        self,
        batch: Batch,
        accepted: Any,
        next_tokens: Any = None,
        drafts: Any = None,
        finished: Any = None,
    ) -> None:
        """Ends a batch: which drafts stay, which token follows, what is drafted next.

        accepted     int32 [num_seqs]   drafts kept, 0 .. num_drafts (all 0 in a prefill)
        next_tokens  int32 [num_seqs]   token after the kept ones; ignored where a prompt goes on
        drafts       int32 [num_seqs, <= tokens_per_step - 1], padded with -1
        finished     bool [num_seqs]    sequences that end here, max_new_tokens aside

        Layers that the caller left out of the batch count as missing for its sequences. Raises
        BatchError for a batch that is not the open one, ArgumentError for values out of range, such
        as a token outside the vocabulary (the batch stays open then). What saving snapshots raises
        comes when the batch has ended.
        """
        self._check_open("commit", batch)
        with self.tools.watch.ranges.span("commit"):
            self.scheduler.commit(self._order.host, accepted, next_tokens, drafts, finished)
        lacking = self._order.lacking()
        self._order.close()  # whatever becomes of snapshots: the scheduler's batch is over
        if self.prefix is not None:
            with self.memory.scope():
                self.prefix.after_step(self.tools, lacking)

    def run(self, trace: Any = None, **options: Any) -> dict:
        """Replays a trace and returns the report. `trace`: a path, a list of `Request` or
        `TraceEntry`, or None for the configured one; options as in `run_trace`."""
        from .run import run_trace

        self._check_alive()
        return run_trace(self, trace, **options)

    def run_buffers(self) -> Any:
        """Activation buffers of one batch on the device, taken at the first call."""
        if self._run_buffers is None:
            self._run_buffers = take_run_buffers(self.cfg, self.sizes, self.memory)
        return self._run_buffers

    def decode_inputs(self) -> DecodeInputs:
        """Fixed buffers of decode steps, taken at the first call."""
        if self._decode_inputs is None:
            sizes, memory = self.sizes, self.memory
            what, asked = "fixed inputs of decode steps", sizes.decode_bytes
            refuse_too_large(what, asked, memory.free_bytes()[0], memory.place)
            self._decode_inputs = take_decode_inputs(
                plan_keys(self.cfg, "decode"),
                sizes.max_decode_seqs,
                self.cfg,
                memory,
                self.backend,
                self.tools.paged,
            )
        return self._decode_inputs

    def _begin(self, host: HostBatch) -> Batch:
        """The batch on the device, and what must be queued before its first layer."""
        with self.tools.watch.ranges.span("plan", size=host.num_tokens):
            batch = self._build(host)
        fresh = host.state_ids[host.is_first_chunk]
        reset_states(self.tools.slab, self.cfg.slot_layout, self._reset, fresh)
        if self.prefix is not None:
            self.prefix.before_step(self.tools)
        return batch

    def _build(self, host: HostBatch) -> Batch:
        paged = self.tools.paged
        if paged is not None:
            paged.sync(self.scheduler.blocks, host)
        if host.kind == "prefill" or not self.fixed_decodes:
            staging = self.tools.workspace.staging
            staged = None if self.prefix is None else self.prefix.staged_places(host)
            return build_batch(self.cfg, host, staging, self.backend, paged, staged)
        self._order.step = self.decode_inputs().upload(host)
        padded = self._order.step.batch
        return with_plans(host, padded.plans, padded.on_device)

    def _check_open(self, call: str, batch: Batch) -> None:
        self._check_alive()
        self._order.check_open(call, batch)

    def _check_alive(self) -> None:
        if self._closed:
            raise BatchError("the engine is closed; make a new one")
