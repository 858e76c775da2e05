"""paged_load: the keys and values of whole sequences, out of a paged pool."""

from typing import Any

from ..layouts.paged import PagedLayout
from .arrays import as_array, backend_of
from .operations import operation


def paged_load(
    pool: Any,
    layout: PagedLayout,
    layer: int,
    block_tables: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    *,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Decode positions 0, 1, .. of each sequence into k and v, the input of `window_attention`;
    returns (k, v).

    pool: flat uint8; block_tables: int32 [>= num_seqs, max_blocks], sequence i in row i;
    cu_seqlens_k: int32 [num_seqs + 1], where each sequence's rows of k and v start, and the end;
    k, v: [rows, num_kv_heads, head_dim] with at least cu_seqlens_k[-1] rows, those past it
    untouched: bf16 (bfloat16 or uint16 bits), or float16 for an fp16 format. MXFP8 numbers are
    exact in bf16 where float32 holds them as normal numbers.

    Raises ArgumentError for other shapes or dtypes and, on the host, for ends, positions or blocks
    out of range (on a GPU such a row is zeros).
    """
    arrays = {
        "pool": as_array(pool, "pool"),
        "block_tables": as_array(block_tables, "block_tables"),
        "cu_seqlens_k": as_array(cu_seqlens_k, "cu_seqlens_k"),
        "k": as_array(k, "k"),
        "v": as_array(v, "v"),
    }
    backend = backend_of(**arrays)
    source, *others = arrays.values()
    operation(backend, "paged_load")(source, layout, layer, *others, stream=stream)
    return k, v
