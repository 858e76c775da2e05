"""What every backend checks first in the operations that make, store and load records."""

from typing import Any

from ..layouts.errors import ArgumentError
from ..layouts.formats import RecordFormat
from .checks import (
    I32,
    U8,
    check_array,
    check_output,
    check_place,
    check_record_format,
    check_ring_len,
    check_rope,
    check_rows,
    check_slab,
    check_units,
    vector_dtypes,
)
from .ring_access import RingAccess, ring_access


def check_kv(op: str, kv: Any, positions: Any, rope: Any, fmt: RecordFormat) -> int:
    """Number of tokens in `kv`: an array for a latent format, a pair (k, v) for K and V apart."""
    tokens = _check_vectors(op, kv, fmt)
    if rope is not None:
        check_rope(op, rope, fmt.head_dim)
        if positions is None:
            raise ArgumentError(f"{op}: positions=None but rope is given; pass int32 [T] positions")
    if positions is not None:
        check_array(op, "positions", positions, I32, ((tokens, "the number of vectors"),))
    return tokens


def _check_vectors(op: str, kv: Any, fmt: RecordFormat) -> int:
    head_dim = (fmt.head_dim, "the format's head_dim")
    if fmt.latent:
        if isinstance(kv, tuple):
            raise ArgumentError(
                f"{op}: kv is a pair but record format {fmt.id!r} is latent; pass one array [T, D]"
            )
        check_array(op, "kv", kv, vector_dtypes(fmt), ((None, ""), head_dim))
        return kv.shape[0]
    if not isinstance(kv, tuple):
        raise ArgumentError(
            f"{op}: kv is one array but record format {fmt.id!r} holds K and V of num_kv_heads="
            f"{fmt.num_kv_heads} apart; pass kv=(k, v), each [T, {fmt.num_kv_heads}, {head_dim[0]}]"
        )
    k, v = kv
    heads = (fmt.num_kv_heads, "the format's num_kv_heads")
    check_array(op, "k", k, vector_dtypes(fmt), ((None, ""), heads, head_dim))
    check_array(op, "v", v, vector_dtypes(fmt), ((k.shape[0], "k.shape[0]"), heads, head_dim))
    return k.shape[0]


def kv_places(kv: Any) -> dict[str, Any]:
    """The arrays of `kv` by name, for `check_place` and `backend_of`."""
    return {"k": kv[0], "v": kv[1]} if isinstance(kv, tuple) else {"kv": kv}


def check_encode_records(kv: Any, positions: Any, out: Any, fmt: Any, rope: Any) -> int:
    """Number of tokens."""
    op = "encode_records"
    check_record_format(op, fmt)
    tokens = check_kv(op, kv, positions, rope, fmt)
    axes = ((tokens, "the number of vectors"), (fmt.record_bytes, "the format's record_bytes"))
    check_output(op, "out", out, U8, axes)
    check_place(op, **kv_places(kv), positions=positions, out=out)
    return tokens


def check_store_records(
    slab: Any,
    layout: Any,
    layer: int,
    records: Any,
    state_ids: Any,
    positions: Any,
    kind: str,
    stage: tuple[Any, Any] | None,
) -> tuple[RingAccess, int, int]:
    """The ring's addresses, and the number of state slots and of places."""
    op = "store_records"
    num_slots = check_slab(op, slab, layout, written=True)
    access = ring_access(op, layout, layer, kind)
    record_bytes = (access.format.record_bytes, "the ring's record_bytes")
    check_array(op, "records", records, U8, ((None, ""), record_bytes))
    rows = ((records.shape[0], "records.shape[0]"),)
    check_array(op, "state_ids", state_ids, I32, rows)
    check_array(op, "positions", positions, I32, rows)
    check_place(op, slab=slab, records=records, state_ids=state_ids, positions=positions)
    if stage is None:
        return access, num_slots, 0
    num_places = check_units(
        op, "stage slab", stage[0], "slot_bytes", layout.slot_bytes, written=True
    )
    check_array(op, "places", stage[1], I32, rows)
    check_place(op, slab=slab, stage_slab=stage[0], places=stage[1])
    return access, num_slots, num_places


def check_ring_store(
    slab: Any,
    layout: Any,
    layer: int,
    kv: Any,
    state_ids: Any,
    positions: Any,
    rope: Any,
    kind: str,
) -> tuple[RingAccess, int]:
    """The ring's addresses and the number of state slots."""
    op = "ring_store"
    num_slots = check_slab(op, slab, layout, written=True)
    access = ring_access(op, layout, layer, kind)
    check_record_format(op, access.format)
    if positions is None:
        raise ArgumentError(f"{op}: positions=None but each token needs one to find its row")
    tokens = check_kv(op, kv, positions, rope, access.format)
    check_array(op, "state_ids", state_ids, I32, ((tokens, "the number of vectors"),))
    check_place(op, slab=slab, **kv_places(kv), state_ids=state_ids, positions=positions)
    return access, num_slots


def check_ring_load(
    slab: Any,
    layout: Any,
    layer: int,
    plan: Any,
    records: Any,
    cu_seqlens_k: Any,
    k: Any,
    v: Any,
    kind: str,
) -> tuple[RingAccess, int]:
    """The ring's addresses and the number of state slots."""
    op = "ring_load"
    num_slots = check_slab(op, slab, layout, written=False)
    access = ring_access(op, layout, layer, kind)
    fmt = access.format
    if fmt.latent:
        raise ArgumentError(
            f"{op}: record format {fmt.id!r} is latent; it loads records of K and V apart"
        )
    check_ring_len(op, plan, layer, access)
    check_array(op, "records", records, U8, ((None, ""), (fmt.record_bytes, "record_bytes")))
    check_rows(op, "records", records, plan.num_tokens, "the plan's tokens")
    check_output(op, "cu_seqlens_k", cu_seqlens_k, I32, ((plan.num_seqs + 1, "num_seqs + 1"),))
    check_key_buffers(op, fmt, k, v)
    check_rows(op, "k", k, plan.most_keys, "plan.most_keys")
    tokens = (plan.num_tokens, "the plan's tokens")
    columns = {"plan.pivots": plan.pivots, "plan.pinned_pivots": plan.pinned_pivots}
    for name, pivots in columns.items():
        if pivots is not None:
            check_array(op, name, pivots, I32, (tokens, (4, "columns")))
    arrays = {"records": records, "pivots": plan.pivots, "cu_seqlens_k": cu_seqlens_k}
    check_place(op, slab=slab, **arrays, k=k, v=v)
    return access, num_slots


def check_key_buffers(op: str, fmt: RecordFormat, k: Any, v: Any) -> None:
    """k and v [rows, num_kv_heads, head_dim] that records of `fmt` are decoded into."""
    heads = (fmt.num_kv_heads, "the format's num_kv_heads")
    head_dim = (fmt.head_dim, "the format's head_dim")
    check_output(op, "k", k, vector_dtypes(fmt), ((None, ""), heads, head_dim))
    check_output(op, "v", v, vector_dtypes(fmt), ((k.shape[0], "k.shape[0]"), heads, head_dim))


def check_load_history(
    slab: Any, layout: Any, layer: int, plan: Any, out: Any, kind: str
) -> tuple[RingAccess, int]:
    """The ring's addresses and the number of state slots."""
    op = "load_history"
    num_slots = check_slab(op, slab, layout, written=False)
    access = ring_access(op, layout, layer, kind)
    check_ring_len(op, plan, layer, access)
    check_array(op, "plan.segments", plan.segments, I32, ((None, ""), (3, "columns")))
    check_array(op, "plan.num_segments", plan.num_segments, I32, ((1, "one count"),))
    record_bytes = (access.format.record_bytes, "the ring's record_bytes")
    check_output(op, "out", out, U8, ((None, ""), record_bytes))
    check_rows(op, "out", out, plan.history_rows, "num_seqs * window")
    check_place(op, slab=slab, segments=plan.segments, num_segments=plan.num_segments, out=out)
    return access, num_slots
