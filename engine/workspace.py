"""What an engine takes of its device's memory, and how much that is before it is taken."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..layouts.sizes import align_up, div_ceil
from ..rawkernels.memory import Memory, refuse_too_large
from ..schedules.batch import PlanKey
from .decode_inputs import BUFFER_ALIGN, decode_input_bytes
from .paged_pool import PagedSizes, paged_sizes
from .prefix_cache import prefix_buffer_bytes
from .scratch import Scratch, ScratchSizes, scratch_sizes, take_scratch
from .slab import slab_bytes

DIGEST_STEPS = 32  # steps whose token digests wait on the device before they are read


@dataclass(frozen=True)
class EngineSizes:
    """Bytes of each part of an engine, and the counts that they follow from.

    max_decode_seqs                 most sequences of a decode batch
    prefill_tokens, decode_tokens   most query tokens of a batch
    slab_bytes      num_state_slots * slot_bytes
    joint_bytes     a prefill layer's history and new records
    lse_bytes       log-sum-exp of a batch, for callers that give no array for it
    staging_bytes   a batch's int32 arrays and plans, twice (a step is uploaded while one runs)
    decode_bytes    fixed inputs, plans and token digests of captured decode steps; taken by `run`
                    on a GPU, or at the first call of `padded`
    snapshot_bytes  snapshots of state slots on their way off a GPU; 0 without a prefix cache
    run_bytes       q, kv and out of a batch, and token digests; taken by `run` only, or when a
                    caller hands host arrays to an engine on a GPU
    paged           the paged pool and what works on it
    scratch         what kernels take of a GPU while they run
    """

    num_state_slots: int
    max_decode_seqs: int
    prefill_tokens: int
    decode_tokens: int
    slab_bytes: int
    joint_bytes: int
    lse_bytes: int
    staging_bytes: int
    decode_bytes: int
    snapshot_bytes: int
    run_bytes: int
    paged: PagedSizes
    scratch: ScratchSizes

    @property
    def max_tokens(self) -> int:
        return max(self.prefill_tokens, self.decode_tokens)

    @property
    def total_bytes(self) -> int:
        return (
            self.slab_bytes
            + self.joint_bytes
            + self.lse_bytes
            + self.staging_bytes
            + self.decode_bytes
            + self.snapshot_bytes
            + self.run_bytes
            + self.paged.pool_bytes
            + self.paged.work_bytes
            + self.scratch.total_bytes
        )

    def describe(self) -> str:
        """One line for people: what is taken, and for what."""
        rest = self.joint_bytes + self.lse_bytes + self.staging_bytes + self.decode_bytes
        rest += self.snapshot_bytes + self.paged.work_bytes
        pool = f"paged pool {self.paged.pool_bytes:,} B, " if self.paged.pool_bytes else ""
        scratch = self.scratch.total_bytes
        kernels = f", scratch of kernels {scratch:,} B" if scratch else ""
        return (
            f"{self.total_bytes:,} B: slab {self.slab_bytes:,} B "
            f"({self.num_state_slots} state slots), {pool}workspace {rest:,} B, "
            f"run buffers {self.run_bytes:,} B{kernels}"
        )


def engine_sizes(
    cfg: Config, num_state_slots: int | None = None, *, on_gpu: bool = True
) -> EngineSizes:
    """Sizes of an engine for `cfg`, with `num_state_slots` in place of the configured number; on a
    host kernels take no scratch.

    Raises ArgumentError for a number of state slots below 1.
    """
    slots = cfg.engine.num_state_slots if num_state_slots is None else num_state_slots
    slab = slab_bytes(cfg.slot_layout, slots)
    # Without chunking, a prompt larger than the budget runs alone and whole.
    longest = cfg.engine.token_budget
    if not cfg.engine.chunked_prefill:
        longest = max(longest, cfg.max_seq_len)
    decode_seqs = min(cfg.engine.max_decode_seqs, slots)
    decode = decode_seqs * cfg.tokens_per_step
    prefill_seqs = min(cfg.engine.max_prefill_seqs, slots)
    tokens = max(longest, decode)
    local = [layer for layer in cfg.layers if layer.kind == "swa"]
    records = max(layer.record_format.record_bytes for layer in local)
    window = max(layer.window + layer.sink_tokens for layer in local)
    heads, head_dim = cfg.num_q_heads, cfg.head_dim
    vectors = 2 * heads + cfg.layers[0].record_format.num_vectors  # q, out, and kv or k and v
    bf16 = 2  # bytes
    paged = paged_sizes(cfg, slots)
    scratch = ScratchSizes()
    if on_gpu:
        scratch = scratch_sizes(cfg, paged, prefill_seqs, longest)
    return EngineSizes(
        num_state_slots=slots,
        max_decode_seqs=decode_seqs,
        prefill_tokens=longest,
        decode_tokens=decode,
        slab_bytes=slab,
        joint_bytes=(prefill_seqs * window + longest) * records,
        lse_bytes=tokens * heads * 4,
        staging_bytes=2 * _staging_bytes(cfg, longest, prefill_seqs, decode),
        decode_bytes=decode_input_bytes(plan_keys(cfg, "decode"), decode_seqs, cfg.tokens_per_step),
        snapshot_bytes=0 if cfg.prefix is None else prefix_buffer_bytes(cfg),
        run_bytes=tokens * vectors * head_dim * bf16 + digest_tokens(tokens) * 8,
        paged=paged,
        scratch=scratch,
    )


def digest_tokens(max_tokens: int) -> int:
    """uint64 digests that wait on the device: a few whole batches of the largest kind."""
    return DIGEST_STEPS * max_tokens


def plan_keys(cfg: Config, kind: str) -> tuple[PlanKey, ...]:
    """The distinct plans of a batch of that kind, in the order of the layers that use them first.
    Draft layers have a plan of their own in a decode step: their drafts see the whole block."""
    keys = [plan_key(layer, kind) for layer in cfg.layers if layer.kind == "swa"]
    return tuple(dict.fromkeys(keys))


def plan_key(layer: Any, kind: str) -> PlanKey:
    """The plan that a layer with a window uses in a batch of that kind."""
    is_draft = layer.role == "draft" and kind == "decode"
    mode = "draft_step" if is_draft else "causal"
    return PlanKey(layer.window, layer.ring_len, mode, layer.sink_tokens)


def _staging_bytes(cfg: Config, prefill_tokens: int, prefill_seqs: int, decode_tokens: int) -> int:
    """Bytes of the int32 arrays of the largest batch: its own, and each plan's."""
    seqs = max(prefill_seqs, div_ceil(decode_tokens, cfg.tokens_per_step))
    own = [seqs + 1] + 3 * [max(prefill_tokens, decode_tokens)]
    prefill, decode = [], []
    if cfg.prefix is not None:  # the place of the stage of each token
        prefill += [prefill_tokens]
    if cfg.paged_layout is not None:  # sequence of each token, bounds of the keys, block tables
        width = paged_sizes(cfg, prefill_seqs).table_width
        prefill += [prefill_tokens, prefill_seqs + 1, prefill_seqs * width]
    for key in plan_keys(cfg, "prefill"):
        prefill += [prefill_seqs + 1] + 2 * [prefill_seqs] + 2 * [prefill_tokens]
        prefill += [9 * prefill_seqs, 1, 4 * prefill_tokens]  # segments, their count, pivots
        if key.sink_tokens:  # two more segments, and pivots of their own
            prefill += [6 * prefill_seqs, 4 * prefill_tokens]
    for key in plan_keys(cfg, "decode"):
        # At least a draft block's index width; num_pinned is there with pinned positions only.
        width = key.window + cfg.tokens_per_step + key.sink_tokens
        decode += [seqs + 1] + 3 * [decode_tokens] + [2 * decode_tokens, width * decode_tokens]
    sizes = [sum(align_up(4 * n, BUFFER_ALIGN) for n in own + plan) for plan in (prefill, decode)]
    return max(sizes)


@dataclass(frozen=True)
class Workspace:
    """Device arrays of an engine beside its slab; flat, cut to the batch at hand."""

    sizes: EngineSizes
    joint: Any  # uint8 [joint_bytes]
    lse: Any  # float32 [max_tokens, num_q_heads]
    staging: "Staging"
    scratch: Scratch

    def joint_rows(self, rows: int, record_bytes: int) -> Any:
        """uint8 [rows, record_bytes] at the start of the joint buffer."""
        return self.joint[: rows * record_bytes].reshape(rows, record_bytes)


@dataclass(frozen=True)
class RunBuffers:
    """Activations of one batch on the device, bf16 bits, and digests of the last steps' tokens."""

    q: Any  # uint16 [max_tokens, num_q_heads, head_dim]
    kv: Any  # uint16 [max_tokens, head_dim], or k and v, [max_tokens, num_kv_heads, head_dim] each
    out: Any  # uint16 [max_tokens, num_q_heads, head_dim]
    digests: Any  # uint64 [digest_tokens]

    def first(self, num_tokens: int) -> tuple[Any, Any, Any]:
        """q, kv and out of so many tokens."""
        cut = slice(0, num_tokens)
        pair = isinstance(self.kv, tuple)
        kv = tuple(part[cut] for part in self.kv) if pair else self.kv[cut]
        return self.q[cut], kv, self.out[cut]


def take_workspace(cfg: Config, sizes: EngineSizes, memory: Memory) -> Workspace:
    """The workspace of an engine; raises DeviceMemoryError where it does not fit."""
    refuse_too_large(
        "engine workspace",
        sizes.joint_bytes + sizes.lse_bytes + sizes.staging_bytes + sizes.scratch.total_bytes,
        memory.free_bytes()[0],
        memory.place,
    )
    return Workspace(
        sizes=sizes,
        joint=memory.empty((sizes.joint_bytes,), np.uint8),
        lse=memory.empty((sizes.max_tokens, cfg.num_q_heads), np.float32),
        staging=take_staging(sizes.staging_bytes // 2, memory),  # exact: it is twice one buffer
        scratch=take_scratch(sizes.scratch, memory),
    )


def take_run_buffers(cfg: Config, sizes: EngineSizes, memory: Memory) -> RunBuffers:
    """The buffers of a run; raises DeviceMemoryError where they do not fit."""
    refuse_too_large("run buffers", sizes.run_bytes, memory.free_bytes()[0], memory.place)
    rows, heads, head_dim = sizes.max_tokens, cfg.num_q_heads, cfg.head_dim
    if cfg.latent:
        kv = memory.empty((rows, head_dim), np.uint16)
    else:
        shape = (rows, cfg.num_kv_heads, head_dim)
        kv = (memory.empty(shape, np.uint16), memory.empty(shape, np.uint16))
    return RunBuffers(
        q=memory.empty((rows, heads, head_dim), np.uint16),
        kv=kv,
        out=memory.empty((rows, heads, head_dim), np.uint16),
        digests=memory.empty((digest_tokens(rows),), np.uint64),
    )


@dataclass
class Staging:
    """Two pairs of a pinned host buffer and a device buffer, used in turn, so that one step's
    arrays travel in one copy while the step before them still runs."""

    memory: Memory
    host: tuple[np.ndarray, np.ndarray]
    device: tuple[Any, Any]
    events: list
    turn: int = 0

    def upload(self, arrays: Iterable[np.ndarray]) -> list[Any]:
        """Device copies of int32 arrays, which last until the upload after next."""
        arrays = list(arrays)
        host, device = self.host[self.turn], self.device[self.turn]
        if self.events[self.turn] is not None:
            self.memory.wait(self.events[self.turn])  # the copy out of this buffer, two steps ago
        views, start = [], 0
        for array in arrays:
            assert array.dtype == np.int32, array.dtype
            end = start + array.size
            host[start:end] = array.reshape(-1)
            views.append(device[start:end].reshape(array.shape))
            start = align_up(4 * end, BUFFER_ALIGN) // 4  # exact: BUFFER_ALIGN is a multiple of 4
        self.memory.upload(device[:start], host[:start])
        self.events[self.turn] = self.memory.record(self.events[self.turn])
        self.turn = 1 - self.turn
        return views


def take_staging(size: int, memory: Memory) -> Staging:
    ints = size // 4  # exact: a multiple of BUFFER_ALIGN
    return Staging(
        memory,
        tuple(memory.pinned((ints,), np.int32) for _ in range(2)),
        tuple(memory.empty((ints,), np.int32) for _ in range(2)),
        [None, None],
    )
