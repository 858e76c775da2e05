"""ring_load: the keys and values of prefill chunks, out of the rings and the new records."""

from typing import Any

from ..layouts.plans import PrefillPlan
from ..layouts.slots import RingKind, SlotLayout
from .arrays import as_array, backend_of
from .checks import check_plan
from .operations import operation


def ring_load(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    records: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    kind: RingKind = "swa",
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Decode what the queries of each chunk see into contiguous k and v, the input of
    `window_attention`; returns (cu_seqlens_k, k, v).

    slab: flat uint8, rings of K and V, the chunk not stored yet; records: uint8 [>= T,
    record_bytes], the chunk's new records, as `encode_records` makes them. For each sequence k and
    v get the positions that its first query sees before the chunk (the pinned ones, then the
    window's), and the chunk's own: window_attention(q, k, v, plan.cu_seqlens_q, cu_seqlens_k,
    window=plan.window, sink_tokens=plan.sink_tokens) then gives what window_prefill gives over the
    joint buffer. A padding sequence (state id -1) has no keys.

    cu_seqlens_k: int32 [num_seqs + 1], filled: where each sequence's rows start, and the end. k, v:
    [>= plan.most_keys, num_kv_heads, head_dim], bf16 (bfloat16 or uint16 bits), or float16 for an
    fp16 format; rows past the end are untouched.

    Raises ArgumentError for other shapes or dtypes, a plan made for another ring and, on the host,
    a state id out of range (a GPU gives zeros).
    """
    check_plan("ring_load", plan, PrefillPlan)
    slab, records = as_array(slab, "slab"), as_array(records, "records")
    outputs = {
        "cu_seqlens_k": as_array(cu_seqlens_k, "cu_seqlens_k"),
        "k": as_array(k, "k"),
        "v": as_array(v, "v"),
    }
    backend = backend_of(slab=slab, records=records, pivots=plan.pivots, **outputs)
    operation(backend, "ring_load")(
        slab, layout, layer, plan, records, *outputs.values(), kind=kind, stream=stream
    )
    return cu_seqlens_k, k, v
