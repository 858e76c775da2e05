"""stack_activations: the inputs of a layer, mixed from the output of the layer before."""

from typing import Any

from ..layouts.errors import ArgumentError
from .arrays import BF16, as_array, backend_of, empty_like_backend
from .checks import check_hash_layer, check_seed
from .operations import operation


def stack_activations(
    previous: Any,
    seed: int,
    layer: int,
    token_ids: Any,
    positions: Any,
    q: Any = None,
    kv: Any = None,
    *,
    stream: Any = None,
) -> tuple[Any, Any]:
    """(q bf16 [T, H, D], kv bf16 [T, D]) of a layer from `previous`, bf16 [T, H, D].

    token_ids and positions: int32 [T]. q[t, h, d] = 0.5 hash(2 seed + 1)[t, h D + d] +
    previous[t, (h + 1) % H, d]; kv[t, d] = 0.5 hash(2 seed)[t, d] + previous[t, d % H, d], summed
    in float32 and rounded to bf16; the same bits on every backend.
    Raises ArgumentError for other shapes or dtypes.
    """
    seed = check_seed("stack_activations", seed)
    check_hash_layer("stack_activations", layer)
    previous = as_array(previous, "previous")
    token_ids, positions = as_array(token_ids, "token_ids"), as_array(positions, "positions")
    shape = tuple(previous.shape)
    if len(shape) != 3:
        raise ArgumentError(f"stack_activations: previous.shape={shape} but must be [T, H, D]")
    q = empty_like_backend(shape, BF16, previous) if q is None else q
    kv = empty_like_backend((shape[0], shape[2]), BF16, previous) if kv is None else kv
    q_array, kv_array = as_array(q, "q"), as_array(kv, "kv")
    backend = backend_of(previous=previous, token_ids=token_ids, q=q_array, kv=kv_array)
    operation(backend, "stack_activations")(
        previous, seed, layer, token_ids, positions, q_array, kv_array, stream=stream
    )
    return q, kv
