"""One sequence through prefill chunks and decode steps on a backend, with plans from the host."""

from dataclasses import dataclass

import numpy as np
from helpers import (
    i32,
    make_layout,
    operations,
    poisoned,
    poisoned_slab,
    random_bf16,
    record_format,
    to_backend,
    to_host,
)

import ringslab as rs
from ringslab.rawkernels.reference.bound import expected_prefill

HEADS, DIM, LAYER, STATE = 2, 32, 1, 2
ROPE = rs.Rope(10000.0, 16, "adjacent")
OPTIONS = {"softmax_scale": 0.2, "rope_out": ROPE}


@dataclass(frozen=True)
class Inputs:
    """q bf16 [n, HEADS, DIM], kv bf16 [n, DIM] of positions 0..n - 1, and a sink."""

    q: np.ndarray
    kv: np.ndarray
    sink: np.ndarray


def make_inputs(n, seed=0):
    rng = np.random.default_rng(seed)
    q, kv = random_bf16(rng, (n, HEADS, DIM), 2.0), random_bf16(rng, (n, DIM))
    return Inputs(q, kv, rng.standard_normal(HEADS).astype(np.float32))


class SequenceDriver:
    """Holds a slab of three poisoned slots on the backend; the sequence lives in slot 2."""

    def __init__(self, backend, inputs, window=128, ring_len=134, plane_order="interleaved"):
        self.backend, self.inputs = backend, inputs
        self.sizes = {"window": window, "ring_len": ring_len}
        self.format = record_format(DIM, plane_order=plane_order)
        self.layout = make_layout(self.format, ring_len)
        self.slab = to_backend(poisoned_slab(self.layout, 3), backend)
        self.ops = operations(backend)

    def _options(self):
        return {**OPTIONS, "sink": self._place(self.inputs.sink)}

    def _place(self, x):
        return to_backend(x, self.backend)

    def prefill(self, first, count):
        """Tokens first .. first + count as one chunk; returns (out, lse) on the host."""
        plan = rs.plan_prefill([STATE], [count], [first + count], **self.sizes)
        plan = self._place(plan)
        records = poisoned(
            (plan.history_rows + count, self.format.record_bytes), np.uint8, self.backend
        )
        new = records[plan.history_rows :]
        tokens = slice(first, first + count)
        out = poisoned((count, HEADS, DIM), np.uint16, self.backend)
        lse = poisoned((count, HEADS), np.float32, self.backend)
        self.ops.load_history(self.slab, self.layout, LAYER, plan, records)
        kv = self._place(self.inputs.kv[tokens])
        self.ops.encode_records(kv, plan.positions, new, record_format=self.format, rope=ROPE)
        q = self._place(self.inputs.q[tokens])
        self.ops.window_prefill(q, records, plan, self.format, out, lse, **self._options())
        ids = plan.token_state_ids
        self.ops.store_records(self.slab, self.layout, LAYER, new, ids, plan.positions)
        return to_host(out), to_host(lse)

    def decode(self, first, count=1, kv=None):
        """One step of `count` tokens from `first`; kv replaces the inputs' own (drafts)."""
        positions = i32(range(first, first + count))
        states = np.full(count, STATE, np.int32)
        plan = rs.plan_decode(states, positions, cu_seqlens_q=i32([0, count]), **self.sizes)
        plan = self._place(plan)
        tokens = slice(first, first + count)
        kv = self._place(self.inputs.kv[tokens] if kv is None else kv)
        ids, where = plan.state_ids, plan.positions
        self.ops.ring_store(self.slab, self.layout, LAYER, kv, ids, where, rope=ROPE)
        out = poisoned((count, HEADS, DIM), np.uint16, self.backend)
        lse = poisoned((count, HEADS), np.float32, self.backend)
        q = self._place(self.inputs.q[tokens])
        self.ops.window_decode(q, self.slab, self.layout, LAYER, plan, out, lse, **self._options())
        return to_host(out), to_host(lse)

    def chunks(self, sizes, first=0):
        """Prefill chunks of these sizes one after the other; (out, lse) of all their tokens."""
        parts = []
        for size in sizes:
            parts.append(self.prefill(first, size))
            first += size
        return join(parts)

    def steps(self, first, last):
        """Decode steps of one token for positions first .. last - 1."""
        return join([self.decode(position) for position in range(first, last)])


def join(parts):
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def equal_chunks(n, size):
    return [min(size, n - start) for start in range(0, n, size)]


def expected_whole(inputs, window=128, ring_len=134):
    """The reference over the whole sequence as one prompt."""
    n = inputs.kv.shape[0]
    driver = SequenceDriver("reference", inputs, window, ring_len)
    plan = rs.plan_prefill([STATE], [n], [n], window=window, ring_len=ring_len)
    records = np.zeros((window + n, driver.format.record_bytes), np.uint8)
    driver.ops.encode_records(
        inputs.kv, plan.positions, records[window:], record_format=driver.format, rope=ROPE
    )
    return expected_prefill(inputs.q, records, plan, driver.format, sink=inputs.sink, **OPTIONS)
