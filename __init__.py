"""ringslab: sliding-window attention over ring-buffer KV state, without torch.

`import ringslab as rs` loads nothing but this file; each public name loads its module when it is
first used (PEP 562), so that a program pays for what it touches.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import errors as errors
    from .engine.engine import Engine as Engine
    from .engine.slab import empty_slab as empty_slab
    from .engine.store import open_store as open_store
    from .layouts.budget import kv_bytes as kv_bytes
    from .layouts.config import load_config as load_config
    from .layouts.formats import RecordFormat as RecordFormat
    from .layouts.formats import make_record_format as make_record_format
    from .layouts.paged import PagedLayout as PagedLayout
    from .layouts.paged import build_paged_layout as build_paged_layout
    from .layouts.rings import required_ring_len as required_ring_len
    from .layouts.rope import Rope as Rope
    from .layouts.rope import Yarn as Yarn
    from .layouts.slots import SlotLayout as SlotLayout
    from .layouts.tiles import count_tiles as count_tiles
    from .rawkernels.apply_rope import apply_rope as apply_rope
    from .rawkernels.dequantize_mxfp8 import dequantize_mxfp8 as dequantize_mxfp8
    from .rawkernels.encode_records import encode_records as encode_records
    from .rawkernels.load_history import load_history as load_history
    from .rawkernels.paged_decode import paged_decode as paged_decode
    from .rawkernels.paged_load import paged_load as paged_load
    from .rawkernels.paged_store import paged_store as paged_store
    from .rawkernels.quantize_mxfp8 import quantize_mxfp8 as quantize_mxfp8
    from .rawkernels.ring_load import ring_load as ring_load
    from .rawkernels.ring_store import ring_store as ring_store
    from .rawkernels.seeded_activations import seeded_activations as seeded_activations
    from .rawkernels.store_records import store_records as store_records
    from .rawkernels.window_attention import window_attention as window_attention
    from .rawkernels.window_decode import window_decode as window_decode
    from .rawkernels.window_prefill import window_prefill as window_prefill
    from .schedules.batch import Request as Request
    from .schedules.plan_decode import plan_decode as plan_decode
    from .schedules.plan_prefill import plan_prefill as plan_prefill

# Module that holds each public name. `errors` is a module itself.
_HOMES = {
    "Engine": ".engine.engine",
    "PagedLayout": ".layouts.paged",
    "RecordFormat": ".layouts.formats",
    "Request": ".schedules.batch",
    "Rope": ".layouts.rope",
    "SlotLayout": ".layouts.slots",
    "Yarn": ".layouts.rope",
    "apply_rope": ".rawkernels.apply_rope",
    "build_paged_layout": ".layouts.paged",
    "count_tiles": ".layouts.tiles",
    "dequantize_mxfp8": ".rawkernels.dequantize_mxfp8",
    "empty_slab": ".engine.slab",
    "encode_records": ".rawkernels.encode_records",
    "kv_bytes": ".layouts.budget",
    "load_config": ".layouts.config",
    "load_history": ".rawkernels.load_history",
    "make_record_format": ".layouts.formats",
    "open_store": ".engine.store",
    "paged_decode": ".rawkernels.paged_decode",
    "paged_load": ".rawkernels.paged_load",
    "paged_store": ".rawkernels.paged_store",
    "plan_decode": ".schedules.plan_decode",
    "plan_prefill": ".schedules.plan_prefill",
    "quantize_mxfp8": ".rawkernels.quantize_mxfp8",
    "required_ring_len": ".layouts.rings",
    "ring_load": ".rawkernels.ring_load",
    "ring_store": ".rawkernels.ring_store",
    "seeded_activations": ".rawkernels.seeded_activations",
    "store_records": ".rawkernels.store_records",
    "window_attention": ".rawkernels.window_attention",
    "window_decode": ".rawkernels.window_decode",
    "window_prefill": ".rawkernels.window_prefill",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(".errors", __name__)
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__", "errors"])
