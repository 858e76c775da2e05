"""Queries and keys of a caller, brought to where the engine works."""

from typing import Any

from ..rawkernels.arrays import is_cuda
from ..schedules.batch import Batch
from .attend_checks import activation_bits, check_backend, named_parts
from .finite import check_finite_bits


def bring_activations(engine: Any, layer: int, batch: Batch, q: Any, kv: Any) -> tuple[Any, Any]:
    """q and kv of `Engine.attend` as bf16 bits on the engine's device, checked; host arrays go
    into the run buffers of an engine on a GPU. Raises ArgumentError, and ActivationError for
    values that are not finite where the engine refuses them."""
    memory = engine.memory
    q, kv = activation_bits(engine.cfg, batch.num_tokens, q, kv)
    parts = named_parts(q, kv)
    for name, array in parts:
        check_backend(name, array, engine.backend)
        if engine.check_finite:
            where = f"layer {layer}, step {batch.step}: {name}"
            check_finite_bits(memory.to_host(array), where)
    if engine.backend != "cuda" or is_cuda(q):
        return q, kv
    room_q, room_kv, _ = engine.run_buffers().first(batch.num_tokens)
    for (_, target), (_, source) in zip(named_parts(room_q, room_kv), parts, strict=True):
        memory.upload(target, source)
    return room_q, room_kv
