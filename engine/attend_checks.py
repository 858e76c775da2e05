"""What `Engine.attend` checks of a caller's arrays, before it stores any."""

from typing import Any

import numpy as np

from ..layouts.config import Config, LayerConfig
from ..layouts.errors import ArgumentError, ConfigError
from ..rawkernels.arrays import BF16, UINT16, as_array, bf16_bits, is_cuda

FLOAT32 = np.dtype(np.float32)
OUT_DTYPES, LSE_DTYPES = (BF16, UINT16), (FLOAT32,)


def activation_bits(cfg: Config, num_tokens: int, q: Any, kv: Any) -> tuple[Any, Any]:
    """q [T, num_q_heads, head_dim] and kv as bf16 bits, where they are: [T, head_dim] for latent
    layers, else (k, v) of [T, num_kv_heads, head_dim] each.

    Raises ArgumentError for a pair where one is due or the reverse, another shape or dtype,
    strides, or two places.
    """
    is_pair = isinstance(kv, (tuple, list))
    if is_pair and cfg.latent:
        raise ArgumentError(
            "attend: kv is a pair, but the layers of this configuration are latent: one "
            "vector [T, head_dim] is key and value"
        )
    if not cfg.latent and not (is_pair and len(kv) == 2):
        raise ArgumentError(
            "attend: kv must be the pair (k, v), [T, num_kv_heads, head_dim] each: the layers of "
            "this configuration keep keys and values apart"
        )
    q = bf16_bits(as_array(q, "q"), "q")
    check_shape("q", q, (num_tokens, cfg.num_q_heads, cfg.head_dim))
    if cfg.latent:
        kv = bf16_bits(as_array(kv, "kv"), "kv")
        check_shape("kv", kv, (num_tokens, cfg.head_dim))
    else:
        kv = tuple(bf16_bits(as_array(x, n), n) for x, n in zip(kv, ("k", "v"), strict=True))
    for name, array in named_parts(q, kv)[1:]:
        if not cfg.latent:
            check_shape(name, array, (num_tokens, cfg.num_kv_heads, cfg.head_dim))
        if is_cuda(q) != is_cuda(array):
            raise ArgumentError(f"attend: one of q and {name} is a host array, the other on a GPU")
    return q, kv


def named_parts(q: Any, kv: Any) -> list[tuple[str, Any]]:
    """The arrays of an attention's input with the names that messages give them."""
    pair = isinstance(kv, tuple)
    return [("q", q), ("k", kv[0]), ("v", kv[1])] if pair else [("q", q), ("kv", kv)]


def check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != tuple(shape):
        raise ArgumentError(
            f"attend: {name}.shape={tuple(array.shape)} but the batch needs {tuple(shape)}"
        )


def check_backend(name: str, array: Any, backend: str) -> None:
    """A host engine takes no array on a GPU; an engine on a GPU uploads host arrays."""
    if backend != "cuda" and is_cuda(array):
        raise ArgumentError(
            f"attend: {name} is on a GPU but the engine runs on backend {backend!r}"
        )


def check_result(name: str, array: Any, shape: tuple, dtypes: tuple, backend: str) -> None:
    """An array of the caller's that is written to."""
    check_shape(name, array, shape)
    check_backend(name, array, backend)
    if array.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ArgumentError(f"attend: {name}.dtype={array.dtype} but must be {wanted}")
    if backend == "cuda" and not is_cuda(array):
        raise ArgumentError(f"attend: {name} is a host array but the engine runs on a GPU")


def refuse_unsupported(cfg: Config) -> None:
    """Raises ConfigError for a layer that the engine cannot run."""
    for layer in cfg.layers:
        fmt = layer.record_format
        if fmt.type not in ("mxfp8", "bf16"):
            raise ConfigError(
                f"{cfg.path}: layer {layer.id}: record format {fmt.id!r} is of type {fmt.type}; "
                "the engine works on bf16 vectors and takes mxfp8 and bf16"
            )
    if not cfg.latent and cfg.run.activations == "file":
        raise ConfigError(
            f"{cfg.path}: run.activations is file, which holds latent vectors only; models that "
            "keep K and V apart run with seeded or stacked"
        )


def check_sink(sink: Any, num_q_heads: int) -> Any:
    """Sink logits as an array, float32 [num_q_heads], on the host or a GPU. Raises ArgumentError
    for another shape or dtype."""
    array = as_array(sink, "sink")
    if array.dtype != np.float32 or tuple(array.shape) != (num_q_heads,):
        raise ArgumentError(
            f"set_sink: sink is {array.dtype} {tuple(array.shape)} but must be float32 "
            f"({num_q_heads},), one logit a query head"
        )
    return array


def layer_of(cfg: Config, layer: Any) -> LayerConfig:
    """The layer of that id. Raises ArgumentError where there is none."""
    last = len(cfg.layers) - 1
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
        raise ArgumentError(f"layer={layer!r} but must be an integer")
    if not 0 <= layer <= last:
        raise ArgumentError(f"layer={layer} but must be 0 .. {last}")
    return cfg.layers[layer]
