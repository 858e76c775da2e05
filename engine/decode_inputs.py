"""The inputs of decode steps in fixed device buffers, for steps that are captured in a graph.

A captured step reads the same addresses whenever it is replayed, so what changes from step to step
(token ids, positions, state slots, sequence bounds) is copied to those addresses, and the plans are
built from it on the device. A step is captured for a few sizes; a smaller batch is padded: padding
tokens have state id -1, see no key and are not stored, padding sequences have no tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..layouts.config import Config
from ..layouts.errors import BatchError
from ..layouts.plans import DecodePlan
from ..layouts.sizes import align_up
from ..rawkernels.memory import Memory
from ..rawkernels.operations import operation
from ..rawkernels.plan_checks import index_width
from ..schedules.batch import Batch, BatchArrays, HostBatch, PlanKey
from .pinned import PinnedPair

BUFFER_ALIGN = 256  # bytes between the starts of arrays in one buffer
# What a padding token has in each row of the token block: token_ids, positions, token_state_ids,
# swa_valid_start.
PADDING = np.array([[0], [0], [-1], [0]], np.int32)


class StepSize(NamedTuple):
    """Room of a captured step: sequences, and tokens of each (1, or tokens_per_step)."""

    num_seqs: int
    seqlen_q: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.seqlen_q


def step_sizes(max_seqs: int, tokens_per_step: int) -> tuple[StepSize, ...]:
    """The sizes that steps are captured for, fewest tokens first: 1, 2, 3, 4, 6, 8, 12, 16, ...
    max_seqs sequences (so at most half as much again as a batch has, above 2), each of one token
    and of tokens_per_step."""
    counts = {max_seqs}
    power = 1
    while power < max_seqs:
        counts |= {power, min(power + power // 2, max_seqs)}  # exact, or 1 + 0
        power *= 2
    lengths = sorted({1, tokens_per_step})
    sizes = [StepSize(count, length) for count in counts for length in lengths]
    return tuple(sorted(sizes, key=lambda size: (size.num_tokens, size.num_seqs)))


def can_be_fixed(cfg: Config) -> bool:
    """Whether decode steps can run over fixed buffers: their plans are then built on the device,
    where plans with pinned positions are not."""
    return not any(layer.sink_tokens for layer in cfg.layers)


def decode_input_bytes(keys: tuple[PlanKey, ...], max_seqs: int, tokens_per_step: int) -> int:
    """Device bytes of the largest step's arrays, plans and token digests."""
    size = StepSize(max_seqs, tokens_per_step)
    plans = sum(count for key in keys for count in _plan_ints(key, size))
    return 4 * (_packed_ints(size) + plans) + align_up(8 * size.num_tokens, BUFFER_ALIGN)


@dataclass(frozen=True, eq=False)
class StepArrays:
    """One size's view of the fixed buffers.

    batch    on_device and plans are the fixed arrays, padding included; its host arrays are those
             of an all-padding batch, whatever is on the device
    valid    int32 [T]     swa_valid_start of each token
    digests  uint64 [T]    sums of a run's captured digest_outputs
    packed   int32         token block [4, T] and cu_seqlens_q, as they are uploaded
    host     the same in each of the two pinned buffers: all of it, token block, cu_seqlens_q
    """

    size: StepSize
    batch: Batch
    valid: Any
    digests: Any
    packed: Any
    host: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]


@dataclass
class DecodeInputs:
    """The fixed buffers, and what was captured over them. `upload` and all that reads the buffers
    go to the engine's stream, in this order."""

    memory: Memory
    keys: tuple[PlanKey, ...]
    sizes: tuple[StepSize, ...]
    plan_op: Callable[..., None]
    ints: Any  # int32, device
    digests: Any  # uint64, device
    pinned: PinnedPair
    paged: Any = None  # the engine's PagedPool, if it has one
    fitting: dict[tuple[int, int], StepSize] = field(default_factory=dict)
    steps: dict[StepSize, StepArrays] = field(default_factory=dict)
    plan_graphs: dict[StepSize, Callable[[], None]] = field(default_factory=dict)

    def fit(self, host: HostBatch) -> StepSize:
        """The smallest size that holds a batch."""
        needs = host.num_seqs, 1 + int(host.num_drafts.max())  # of a decode batch
        if needs not in self.fitting:
            holds = [size for size in self.sizes if size[0] >= needs[0] and size[1] >= needs[1]]
            assert holds, f"{needs[0]} sequences of {needs[1]} tokens, past {self.sizes}"
            self.fitting[needs] = holds[0]
        return self.fitting[needs]

    def upload(self, host: HostBatch) -> StepArrays:
        """Copies a batch's arrays, padded, to the fixed buffers of the size that fits, in one piece
        and in stream order: what was queued before still reads the batch before."""
        step = self.arrays(self.fit(host))
        packed, block, cu_seqlens_q = step.host[self.pinned.claim()]
        tokens, seqs = host.num_tokens, host.num_seqs
        block[0, :tokens] = host.token_ids
        block[1, :tokens] = host.positions
        block[2, :tokens] = host.token_state_ids
        # A sequence that decodes lacks nothing: after a hit, all windows are past swa_valid_start.
        block[3, :tokens] = 0
        if tokens < step.size.num_tokens:
            block[:, tokens:] = PADDING
        cu_seqlens_q[: seqs + 1] = host.cu_seqlens_q
        if seqs < step.size.num_seqs:
            cu_seqlens_q[seqs + 1 :] = tokens
        self.memory.upload(step.packed, packed)
        self.pinned.sent()
        return step

    def fill_plans(self, step: StepArrays) -> None:
        """Queues the plan kernels of a step (a launch for each plan, when it is not captured)."""
        arrays = step.batch.on_device
        for key, plan in step.batch.plans.items():
            self.plan_op(
                arrays.token_state_ids,
                arrays.positions,
                arrays.cu_seqlens_q,
                step.valid,
                plan.offset_len,
                plan.index,
                window=key.window,
                ring_len=key.ring_len,
                mode=key.mode,
            )

    def replay_plans(self, step: StepArrays) -> None:
        """`fill_plans` as a graph of its own, captured at the first call of a size."""
        launch = self.plan_graphs.get(step.size)
        if launch is None:
            self.fill_plans(step)
            self.plan_graphs[step.size] = self.memory.capture(lambda: self.fill_plans(step))
        else:
            launch()

    def arrays(self, size: StepSize) -> StepArrays:
        """The views of a size; the same objects whenever it is asked for."""
        if size not in self.steps:
            self.steps[size] = self._view(size)
        return self.steps[size]

    def _view(self, size: StepSize) -> StepArrays:
        tokens, seqs = size.num_tokens, size.num_seqs
        count = 4 * tokens + seqs + 1
        packed = self.ints[:count]
        block = packed[: 4 * tokens].reshape(4, tokens)
        cu_seqlens_q = packed[4 * tokens :]
        on_device = BatchArrays(block[0], block[1], block[2], cu_seqlens_q)
        if self.paged is not None:
            on_device = self.paged.name_states(on_device)
        largest = max(self.sizes, key=lambda one: one.num_tokens)
        start, plans = _packed_ints(largest), {}
        for key in self.keys:
            room = _plan_ints(key, largest)
            width = index_width(key.mode, key.window, size.seqlen_q)
            index = self.ints[start + room[0] :][: tokens * width]
            plans[key] = DecodePlan(
                window=key.window,
                ring_len=key.ring_len,
                num_seqs=seqs,
                max_seqlen_q=size.seqlen_q,
                cu_seqlens_q=cu_seqlens_q,
                state_ids=on_device.token_state_ids,
                positions=on_device.positions,
                offset_len=self.ints[start : start + 2 * tokens].reshape(tokens, 2),
                index=index.reshape(tokens, width),
            )
            start += sum(room)
        host = tuple(
            (flat[:count], flat[: 4 * tokens].reshape(4, tokens), flat[4 * tokens : count])
            for flat in self.pinned.host
        )
        batch = _padding_batch(size, plans, on_device)
        return StepArrays(size, batch, block[3], self.digests[:tokens], packed, host)


def take_decode_inputs(
    keys: tuple[PlanKey, ...],
    max_seqs: int,
    cfg: Config,
    memory: Memory,
    backend: str,
    paged: Any = None,
) -> DecodeInputs:
    """The fixed buffers of an engine, `decode_input_bytes` of its device's memory. `keys`: the
    plans of its decode batches. On a host backend the reference builds the plans. Raises BatchError
    where `can_be_fixed` says no."""
    if not can_be_fixed(cfg):
        raise BatchError("padded: layers with sink_tokens have no steps of fixed shape")
    sizes = step_sizes(max_seqs, cfg.tokens_per_step)
    largest = sizes[-1]
    plans = sum(count for key in keys for count in _plan_ints(key, largest))
    return DecodeInputs(
        memory=memory,
        keys=keys,
        sizes=sizes,
        plan_op=operation("cuda" if backend == "cuda" else "reference", "plan_decode"),
        ints=memory.empty((_packed_ints(largest) + plans,), np.int32),
        digests=memory.empty((largest.num_tokens,), np.uint64),
        pinned=PinnedPair(memory, _packed_ints(largest)),
        paged=paged,
    )


def _packed_ints(size: StepSize) -> int:
    return _aligned(4 * size.num_tokens + size.num_seqs + 1)


def _plan_ints(key: PlanKey, size: StepSize) -> tuple[int, int]:
    """int32 of offset_len and of index, each aligned."""
    width = index_width(key.mode, key.window, size.seqlen_q)
    return _aligned(2 * size.num_tokens), _aligned(width * size.num_tokens)


def _aligned(ints: int) -> int:
    return align_up(4 * ints, BUFFER_ALIGN) // 4  # exact: BUFFER_ALIGN is a multiple of 4


def _padding_batch(
    size: StepSize, plans: dict[PlanKey, DecodePlan], on_device: BatchArrays
) -> Batch:
    tokens, seqs = size.num_tokens, size.num_seqs

    def int32(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    return Batch(
        step=-1,
        kind="decode",
        request_ids=("",) * seqs,
        slots=int32(seqs) - 1,
        state_ids=int32(seqs) - 1,
        cu_seqlens_q=int32(seqs + 1),
        seqlens_k=int32(seqs),
        is_last_chunk=np.zeros(seqs, bool),
        token_ids=int32(tokens),
        positions=int32(tokens),
        token_state_ids=int32(tokens) - 1,
        num_drafts=int32(seqs),
        start_positions=int32(seqs),
        swa_valid_start=int32(seqs),
        first_outputs=int32(seqs),
        plans=plans,
        on_device=on_device,
    )
