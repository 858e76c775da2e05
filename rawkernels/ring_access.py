"""Where the bytes of a record lie in a slab, the same arithmetic for both plane orders."""

from dataclasses import dataclass

from ..layouts.errors import ArgumentError
from ..layouts.formats import RecordFormat
from ..layouts.slots import RingKind, SlotLayout


@dataclass(frozen=True)
class RingAccess:
    """Byte addresses of a layer's ring. The record at ring index i of state slot s has its
    `value_bytes` of values from s * slot_bytes + value_offset + i * value_stride on, and its
    `scale_bytes` of scales from s * slot_bytes + scale_offset + i * scale_stride on.

    A latent record is one part. A record of K and V is two parts: V's values lie
    `value_part_stride` behind K's, V's scales `scale_part_stride` behind K's. All counts are bytes,
    but for `ring_len` and `sink_tokens`: positions below it stay at their ring index, the others
    share the rest of the ring.
    """

    format: RecordFormat
    ring_len: int
    slot_bytes: int
    value_offset: int
    value_stride: int
    value_bytes: int
    scale_offset: int
    scale_stride: int
    scale_bytes: int
    value_part_stride: int
    scale_part_stride: int
    sink_tokens: int


def ring_access(op: str, layout: SlotLayout, layer: int, kind: RingKind = "swa") -> RingAccess:
    """Addresses of a layer's ring. Raises LayoutError where the layer has no such ring, and
    ArgumentError where the ring holds compression state, which has no records, or `layout` is no
    SlotLayout."""
    if not isinstance(layout, SlotLayout):
        raise ArgumentError(f"{op}: layout is {type(layout).__name__}, not a SlotLayout")
    ring = layout.ring(layer, kind)
    fmt = ring.record_format
    if fmt is None:
        raise ArgumentError(f"{op}: {ring.name} holds float32 state, not records")
    planar = fmt.plane_order == "planar"
    before_scales = fmt.value_bytes * ring.ring_len if planar else fmt.part_value_bytes
    return RingAccess(
        format=fmt,
        ring_len=ring.ring_len,
        slot_bytes=layout.slot_bytes,
        value_offset=ring.offset,
        value_stride=fmt.value_bytes if planar else fmt.record_bytes,
        value_bytes=fmt.value_bytes,
        scale_offset=ring.offset + before_scales,
        scale_stride=fmt.scale_bytes if planar else fmt.record_bytes,
        scale_bytes=fmt.scale_bytes,
        value_part_stride=fmt.part_value_bytes if planar else fmt.part_bytes,
        scale_part_stride=fmt.part_scale_bytes if planar else fmt.part_bytes,
        sink_tokens=ring.sink_tokens,
    )
