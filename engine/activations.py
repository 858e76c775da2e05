"""Where a run's queries and keys come from: the seeded hash, a stack of it, or recorded arrays.

All three give queries that are rotated already and keys that are not, as `attend` takes them. A
source is a struct of two functions, so that the step loop and the verification ask the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.memory import Memory
from ..rawkernels.operations import Operations, load_operations
from ..rawkernels.reference.activation_hash import hash_values
from ..schedules.batch import Batch
from .recorded import RecordedArrays, open_recorded

SINK_LAYER = 1 << 20  # first hash layer of sink logits, above every layer's activations


@dataclass(frozen=True)
class ActivationSource:
    """kind: "seeded", "stacked" or "file".

    fill(layer, batch, q, kv, previous)          fills uint16 q [T, H, D] and kv [T, D] on the
                                                 engine's device; `previous` is the output of the
                                                 layer before (used by "stacked" above layer 0)
    rows(layer, request_id, token_ids, positions, previous) -> (q, kv)
                                                 the same numbers on the host, by the reference
    check_lengths(ids, lengths)                  ActivationError where a request has more positions
                                                 than the source
    """

    kind: str
    fill: Callable[[int, Batch, Any, Any, Any], None]
    rows: Callable[[int, str, np.ndarray, np.ndarray, Any], tuple[np.ndarray, np.ndarray]]
    check_lengths: Callable[[list[str], list[int]], None]


def open_source(cfg: Config, ops: Operations, memory: Memory, stream: Any) -> ActivationSource:
    """The activation source that `cfg.run` names.

    Raises ActivationError where recorded arrays are missing, of a wrong dtype or shape, or not
    finite; ConfigError has already refused other kinds.
    """
    kind = cfg.run.activations
    if kind == "file":
        recorded = open_recorded(
            cfg.run.activations_path, len(cfg.layers), cfg.num_q_heads, cfg.head_dim
        )
        return _file_source(recorded, memory)
    reference = load_operations("reference")
    fill = _stacked_fill if kind == "stacked" else _seeded_fill
    seed = cfg.run.seed

    def fill_batch(layer: int, batch: Batch, q: Any, kv: Any, previous: Any) -> None:
        arrays = batch.on_device
        fill(ops, seed, layer, arrays.token_ids, arrays.positions, q, kv, previous, stream)

    def rows(layer, request_id, token_ids, positions, previous):
        q = np.empty((len(token_ids), cfg.num_q_heads, cfg.head_dim), np.uint16)
        kv = np.empty((len(token_ids), cfg.head_dim), np.uint16)
        fill(reference, seed, layer, token_ids, positions, q, kv, previous, None)
        return q, kv

    return ActivationSource(kind, fill_batch, rows, lambda ids, lengths: None)


def seeded_sinks(cfg: Config) -> list[np.ndarray | None]:
    """Sink logits of each layer that has them, float32 [num_q_heads] in [-2, 2]."""
    zero = np.zeros(1, np.int32)
    return [
        hash_values(cfg.run.seed, SINK_LAYER + layer.id, zero, zero, cfg.num_q_heads)[0].copy()
        if layer.sink
        else None
        for layer in cfg.layers
    ]


def _seeded_fill(ops, seed, layer, token_ids, positions, q, kv, previous, stream) -> None:
    """Keys from seed 2s, queries from 2s + 1, so that the two never share a row."""
    key_seed = 2 * seed % 2**64
    flat = q.reshape(q.shape[0], q.shape[1] * q.shape[2])
    ops.seeded_activations(key_seed, layer, token_ids, positions, kv, stream=stream)
    ops.seeded_activations(
        (key_seed + 1) % 2**64, layer, token_ids, positions, flat, stream=stream
    )


def _stacked_fill(ops, seed, layer, token_ids, positions, q, kv, previous, stream) -> None:
    """Layer 0 is seeded; every other mixes its hash into the output of the layer before."""
    if layer == 0:
        _seeded_fill(ops, seed, layer, token_ids, positions, q, kv, previous, stream)
    else:
        ops.stack_activations(previous, seed, layer, token_ids, positions, q, kv, stream=stream)


def _file_source(recorded: RecordedArrays, memory: Memory) -> ActivationSource:
    def fill(layer: int, batch: Batch, q: Any, kv: Any, previous: Any) -> None:
        parts = [recorded.arrays(layer, id) for id in batch.request_ids]
        starts = (batch.seqlens_k - batch.seqlens_q).tolist()
        ends = batch.seqlens_k.tolist()
        spans = list(zip(parts, starts, ends, strict=True))
        for target, which in ((q, 0), (kv, 1)):
            rows = [pair[which][start:end] for pair, start, end in spans]
            memory.upload(target, np.ascontiguousarray(np.concatenate(rows)))

    def rows(layer, request_id, token_ids, positions, previous):
        q, kv = recorded.arrays(layer, request_id)
        return np.ascontiguousarray(q[positions]), np.ascontiguousarray(kv[positions])

    return ActivationSource("file", fill, rows, recorded.check_lengths)
