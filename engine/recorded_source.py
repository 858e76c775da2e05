"""The activation source of recorded arrays.

On a GPU all of them are copied to the device when the run starts, if they take at most half of what
is free there; a step then gathers its rows by request and position. Otherwise, and on the host, the
rows of each layer are collected on the host and uploaded.
"""

from typing import Any

import numpy as np

from ..rawkernels.memory import Memory
from ..schedules.batch import Batch
from .activation_source import ActivationSource
from .pinned import PinnedPair
from .recorded import RecordedArrays

FREE_SHARE = 2  # at most one part in so many of the free device memory goes to recorded arrays


def file_source(recorded: RecordedArrays, memory: Memory, max_tokens: int) -> ActivationSource:
    """The source of `recorded`, for batches of up to `max_tokens` tokens."""
    size = sum(array.nbytes for array in recorded.by_name.values())
    if memory.place != "cpu" and size <= memory.free_bytes()[0] // FREE_SHARE:
        return device_source(recorded, memory, max_tokens)

    def fill(layer: int, batch: Batch, q: Any, kv: Any, previous: Any) -> None:
        parts = [recorded.arrays(layer, id) for id in batch.request_ids]
        starts = (batch.seqlens_k - batch.seqlens_q).tolist()
        ends = batch.seqlens_k.tolist()
        spans = list(zip(parts, starts, ends, strict=True))
        for target, which in ((q, 0), (kv, 1)):
            rows = [pair[which][start:end] for pair, start, end in spans]
            memory.upload(target, np.ascontiguousarray(np.concatenate(rows)))

    return _source(recorded, fill, lambda batch: None, on_device=False)


def device_source(recorded: RecordedArrays, memory: Memory, max_tokens: int) -> ActivationSource:
    """The source with all arrays where the engine runs: of each layer q [N, num_q_heads, head_dim]
    and kv [N, head_dim], the owners' rows one after the other."""
    layers = range(recorded.num_layers)
    q_rows = [_joined(recorded, f"q.{layer}", memory) for layer in layers]
    kv_rows = [_joined(recorded, f"kv.{layer}", memory) for layer in layers]
    # Layers may be recorded for different numbers of positions, so each has its own first rows.
    firsts = [_first_rows(recorded, layer) for layer in layers]
    same = all(first == firsts[0] for first in firsts)
    planes = 1 if same else len(layers)
    row_ids = memory.empty((planes, max_tokens), np.int32)
    memory.zero(row_ids)  # rows of padding tokens are read, and must be there
    pinned = PinnedPair(memory, planes * max_tokens)

    def prepare(batch: Batch) -> None:
        host = pinned.host[pinned.claim()].reshape(planes, max_tokens)
        lengths, tokens = batch.seqlens_q, batch.num_tokens
        for plane, first in zip(range(planes), firsts, strict=False):
            starts = [first.get(id, first.get("", 0)) for id in batch.request_ids]
            host[plane, :tokens] = np.repeat(starts, lengths) + batch.positions
            memory.upload(row_ids[plane, :tokens], host[plane, :tokens])
        pinned.sent()

    def fill(layer: int, batch: Batch, q: Any, kv: Any, previous: Any) -> None:
        rows = row_ids[0 if same else layer, : q.shape[0]]
        memory.take_rows(q_rows[layer], rows, q)
        memory.take_rows(kv_rows[layer], rows, kv)

    return _source(recorded, fill, prepare, on_device=True)


def _source(recorded: RecordedArrays, fill: Any, prepare: Any, *, on_device: bool) -> Any:
    def rows(layer, request_id, token_ids, positions, previous, q_from=0):
        q, kv = recorded.arrays(layer, request_id)
        return np.ascontiguousarray(q[positions[q_from:]]), np.ascontiguousarray(kv[positions])

    return ActivationSource(
        kind="file",
        on_device=on_device,
        fill=fill,
        rows=rows,
        prepare=prepare,
        check_lengths=recorded.check_lengths,
    )


def _owners(recorded: RecordedArrays) -> list[str]:
    """Request ids with arrays of their own, after "" for the arrays of all others, if there are."""
    shared = [""] if "q.0" in recorded.by_name else []
    return shared + sorted(recorded.owners)


def _owned(recorded: RecordedArrays, name: str) -> list[np.ndarray]:
    return [recorded.by_name[f"{id}/{name}" if id else name] for id in _owners(recorded)]


def _first_rows(recorded: RecordedArrays, layer: int) -> dict[str, int]:
    """Of each owner, the row of its position 0."""
    lengths = [len(array) for array in _owned(recorded, f"q.{layer}")]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return dict(zip(_owners(recorded), starts, strict=True))


def _joined(recorded: RecordedArrays, name: str, memory: Memory) -> Any:
    parts = _owned(recorded, name)
    joined = memory.empty((sum(map(len, parts)), *parts[0].shape[1:]), np.uint16)
    start = 0
    for part in parts:
        memory.upload(joined[start : start + len(part)], np.ascontiguousarray(part))
        start += len(part)
    return joined
