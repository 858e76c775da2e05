"""All operations of one backend, so that an engine decides once where its work runs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from ..layouts.errors import ArgumentError
from ..layouts.sizes import is_word

Backend = Literal["cuda", "cpu", "reference"]
BACKENDS = ("cuda", "cpu", "reference")


@dataclass(frozen=True)
class Operations:
    """The functions of one backend. They fill arrays given by the caller and return None; bf16
    arrays may be `ml_dtypes.bfloat16` or uint16 bits. `stream` (keyword, last) is a CuPy stream or
    None for the current one; the host ignores it."""

    backend: Backend
    quantize_mxfp8: Callable[..., None]
    dequantize_mxfp8: Callable[..., None]
    apply_rope: Callable[..., None]
    encode_records: Callable[..., None]
    store_records: Callable[..., None]
    ring_store: Callable[..., None]
    load_history: Callable[..., None]
    ring_load: Callable[..., None]
    paged_store: Callable[..., None]
    paged_load: Callable[..., None]
    paged_decode: Callable[..., None]
    window_prefill: Callable[..., None]
    window_decode: Callable[..., None]
    seeded_activations: Callable[..., None]
    stack_activations: Callable[..., None]
    digest_outputs: Callable[..., None]
    window_attention: Callable[..., None]


OPERATION_NAMES = tuple(name for name in Operations.__dataclass_fields__ if name != "backend")


def load_operations(backend: Backend) -> Operations:
    """The operations of a backend, imported now: "cuda", "cpu" or "reference".

    Raises ArgumentError for another name. Nothing is compiled and no device is touched yet.
    """
    if not is_word(backend, BACKENDS):
        raise ArgumentError(f"backend={backend!r} but must be one of {', '.join(BACKENDS)}")
    functions = {name: operation(backend, name) for name in OPERATION_NAMES}
    return Operations(backend=backend, **functions)


def operation(backend: Backend, name: str) -> Callable[..., None]:
    """One operation of a backend, imported now."""
    return getattr(import_module(f".{backend}.{name}", __package__), name)
