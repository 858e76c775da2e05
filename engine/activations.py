"""Where a run's queries and keys come from: the seeded hash, a stack of it, or recorded arrays.

All three give queries that are rotated already and keys that are not, as `attend` takes them.
"""

from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.memory import Memory
from ..rawkernels.operations import Operations, load_operations
from ..rawkernels.reference.activation_hash import hash_values
from ..schedules.batch import Batch
from .activation_source import ActivationSource
from .recorded import open_recorded
from .recorded_source import file_source

SINK_LAYER = 1 << 20  # first hash layer of sink logits, above every layer's activations
VALUE_LAYER = 1 << 21  # first hash layer of values, where K and V are apart


def open_source(cfg: Config, ops: Operations, memory: Memory, max_tokens: int) -> ActivationSource:
    """The activation source that `cfg.run` names, for batches of up to `max_tokens`. What it queues
    goes to the current stream.

    Raises ActivationError where recorded arrays are missing, of a wrong dtype or shape, or not
    finite; ConfigError has already refused other kinds.
    """
    kind = cfg.run.activations
    if kind == "file":
        recorded = open_recorded(
            cfg.run.activations_path, len(cfg.layers), cfg.num_q_heads, cfg.head_dim
        )
        return file_source(recorded, memory, max_tokens)
    reference = load_operations("reference")
    fill = _stacked_fill if kind == "stacked" else _seeded_fill
    seed = cfg.run.seed

    def fill_batch(layer: int, batch: Batch, q: Any, kv: Any, previous: Any) -> None:
        arrays = batch.on_device
        fill(ops, seed, layer, arrays.token_ids, arrays.positions, q, kv, previous)

    def rows(layer, request_id, token_ids, positions, previous, q_from=0):
        # Keys of a long history may be wanted with one query; only a stack makes both at once.
        first = 0 if kind == "stacked" and layer > 0 else q_from
        q = np.empty((len(token_ids) - first, cfg.num_q_heads, cfg.head_dim), np.uint16)
        kv = _host_kv(cfg, len(token_ids))
        fill(reference, seed, layer, token_ids, positions, q, kv, previous)
        return q[q_from - first :], kv

    return ActivationSource(
        kind=kind,
        on_device=True,
        fill=fill_batch,
        rows=rows,
        prepare=lambda batch: None,
        check_lengths=lambda ids, lengths: None,
    )


def seeded_sinks(cfg: Config) -> list[np.ndarray | None]:
    """Sink logits of each layer that has them, float32 [num_q_heads] in [-2, 2]."""
    zero = np.zeros(1, np.int32)
    return [
        hash_values(cfg.run.seed, SINK_LAYER + layer.id, zero, zero, cfg.num_q_heads)[0].copy()
        if layer.sink
        else None
        for layer in cfg.layers
    ]


def _host_kv(cfg: Config, num_tokens: int) -> Any:
    """uint16 [T, head_dim], or k and v of [T, num_kv_heads, head_dim]."""
    if cfg.latent:
        return np.empty((num_tokens, cfg.head_dim), np.uint16)
    shape = (num_tokens, cfg.num_kv_heads, cfg.head_dim)
    return np.empty(shape, np.uint16), np.empty(shape, np.uint16)


def _seeded_fill(ops, seed, layer, token_ids, positions, q, kv, previous) -> None:
    """Keys from seed 2s, queries from 2s + 1, so that the two never share a row; values, where they
    are apart, from seed 2s and the hash layer VALUE_LAYER + layer. q may be of the last tokens
    only."""
    key_seed = 2 * seed % 2**64
    parts = kv if isinstance(kv, tuple) else (kv,)
    for part, hash_layer in zip(parts, (layer, VALUE_LAYER + layer), strict=False):
        ops.seeded_activations(key_seed, hash_layer, token_ids, positions, _flat(part))
    late = slice(len(token_ids) - len(q), None)
    ops.seeded_activations(
        (key_seed + 1) % 2**64, layer, token_ids[late], positions[late], _flat(q)
    )


def _stacked_fill(ops, seed, layer, token_ids, positions, q, kv, previous) -> None:
    """Layer 0 is seeded; every other mixes its hash into the output of the layer before.

    With K and V apart, the heads of a KV head's group count as one of num_kv_heads * head_dim dims,
    so that the one vector that `stack_activations` makes is K of all KV heads; V is made the same
    way from the hash layer VALUE_LAYER + layer, with q for its room until it gets its own numbers.
    """
    if layer == 0:
        _seeded_fill(ops, seed, layer, token_ids, positions, q, kv, previous)
    elif not isinstance(kv, tuple):
        ops.stack_activations(previous, seed, layer, token_ids, positions, q, kv)
    else:
        k, v = map(_flat, kv)
        wide = (len(q), -1 if len(q) else 0, k.shape[1])
        before, queries = previous.reshape(wide), q.reshape(wide)
        for part, hash_layer in ((v, VALUE_LAYER + layer), (k, layer)):
            ops.stack_activations(before, seed, hash_layer, token_ids, positions, queries, part)


def _flat(x: Any) -> Any:
    """[T, H, D] as [T, H * D]."""
    return x if x.ndim == 2 else x.reshape(len(x), x.shape[1] * x.shape[2])
