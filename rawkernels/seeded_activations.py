"""seeded_activations: bf16 rows from a counter hash, for runs without a model."""

from typing import Any

from ..layouts.errors import ArgumentError
from ..layouts.sizes import is_count
from .arrays import BF16, as_array, backend_of, empty_like_backend
from .checks import check_hash_layer, check_seed
from .operations import operation


def seeded_activations(
    seed: int,
    layer: int,
    token_ids: Any,
    positions: Any,
    width: int,
    out: Any = None,
    *,
    stream: Any = None,
) -> Any:
    """bf16 [T, width], a pure function of (seed, layer, token, position, element); returns `out`.

    token_ids and positions: int32 [T], both >= 0; seed is taken modulo 2^64. Values lie in
    [-1.9922, 1.9922], triangular with variance 0.667, bit-identical on every backend.
    Raises ArgumentError for other shapes or dtypes.
    """
    op = "seeded_activations"
    seed = check_seed(op, seed)
    check_hash_layer(op, layer)
    token_ids, positions = as_array(token_ids, "token_ids"), as_array(positions, "positions")
    if len(token_ids.shape) != 1:
        raise ArgumentError(f"{op}: token_ids.shape={tuple(token_ids.shape)} but must be [T]")
    if not is_count(width) or width < 0:
        raise ArgumentError(f"{op}: width={width!r} but must be an integer, at least 0")
    if out is None:
        out = empty_like_backend((token_ids.shape[0], width), BF16, token_ids)
    target = as_array(out, "out")
    if tuple(target.shape) != (token_ids.shape[0], width):
        raise ArgumentError(
            f"{op}: out.shape={tuple(target.shape)} but T={token_ids.shape[0]} and width={width}"
        )
    backend = backend_of(token_ids=token_ids, positions=positions, out=target)
    operation(backend, op)(seed, layer, token_ids, positions, target, stream=stream)
    return out
