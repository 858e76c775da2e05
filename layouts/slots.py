"""The bytes of a state slot: which ring lies where, and strided views of a slab onto them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from .errors import LayoutError
from .flat_bytes import count_units, records_view
from .formats import RecordFormat
from .sizes import align_up, is_count, is_word

RingKind = Literal["swa", "compression"]
SLAB_ALIGN = 256  # bytes; the slab's base, so that every 16-byte access of a record is aligned


@dataclass(frozen=True)
class Ring:
    """One ring of a state slot; `offset` and `bytes` (padding included) count from the slot's
    start. `record_format` is None for compression state, whose entries are float32 [2, dim]:
    a row of values, then a row of scores. `sink_tokens`: positions below it are pinned, see
    `ring_index`."""

    name: str
    layer: int
    kind: RingKind
    ring_len: int
    record_bytes: int
    stored: bool
    record_format: RecordFormat | None
    offset: int = 0
    bytes: int = 0
    sink_tokens: int = 0

    @property
    def used_bytes(self) -> int:
        return self.ring_len * self.record_bytes


@dataclass(frozen=True)
class SlotLayout:
    """All rings of one sequence, in the order of their bytes: stored rings first, then rings that
    are not stored, then compression state. Build it with `build_slot_layout`."""

    rings: tuple[Ring, ...]
    align_bytes: int
    slot_bytes: int
    stored_bytes: int

    def ring(self, layer: int, kind: RingKind = "swa") -> Ring:
        """The ring of a layer. Raises LayoutError where the layer has none of that kind."""
        if not is_count(layer) or not is_word(kind, get_args(RingKind)):
            raise LayoutError(
                f"layer={layer!r} kind={kind!r} but must be an integer and one of "
                f"{', '.join(get_args(RingKind))}"
            )
        ring = self._ring_of.get((layer, kind))
        if ring is not None:
            return ring
        layers = [ring.layer for ring in self.rings if ring.kind == kind]
        raise LayoutError(f"layer={layer} has no ring of kind={kind!r}; layers that do: {layers}")

    @cached_property
    def _ring_of(self) -> dict[tuple[int, RingKind], Ring]:
        return {(ring.layer, ring.kind): ring for ring in self.rings}

    def view(self, slab: Any, layer: int, kind: RingKind = "swa") -> Any:
        """uint8 [num_state_slots, ring_len, 1, record_bytes] view of a layer's records.

        No copy; the row stride is `slot_bytes`. `slab` is a flat uint8 NumPy or CuPy array of
        num_state_slots * slot_bytes. Raises LayoutError for a planar ring, whose records are not
        whole (use `planes`), and for a slab of another shape, dtype or stride.
        """
        ring = self.ring(layer, kind)
        if ring.record_format is not None and ring.record_format.plane_order == "planar":
            raise LayoutError(
                f"view: {ring.name} is planar, so its records are not whole in the ring; "
                "use SlotLayout.planes, which gives the value plane and the scale plane"
            )
        return self._records(slab, ring.offset, ring.ring_len, ring.record_bytes)

    def planes(self, slab: Any, layer: int, kind: RingKind = "swa") -> tuple[Any, Any]:
        """The value bytes and the scale bytes of a layer's ring as two uint8 views,
        [num_state_slots, ring_len, 1, value_bytes] and [num_state_slots, ring_len, 1, scale_bytes],
        for planar and interleaved rings alike. Raises LayoutError as `view` does."""
        ring = self.ring(layer, kind)
        fmt = ring.record_format
        if fmt is None:
            raise LayoutError(f"planes: {ring.name} holds float32 state, not records")
        if not fmt.latent and fmt.scale_bytes > 0:
            raise LayoutError(
                f"planes: {ring.name} holds the scales of K between K and V; only a latent record "
                "has one run of values and one of scales"
            )
        if fmt.plane_order == "interleaved":
            whole = self.view(slab, layer, kind)
            return whole[..., : fmt.value_bytes], whole[..., fmt.value_bytes :]
        scales_at = ring.offset + ring.ring_len * fmt.value_bytes
        return (
            self._records(slab, ring.offset, ring.ring_len, fmt.value_bytes),
            self._records(slab, scales_at, ring.ring_len, fmt.scale_bytes),
        )

    def check_slab(self, slab: Any) -> int:
        """Number of state slots in a slab. Raises LayoutError unless it is flat, contiguous uint8
        of a whole number of slots."""
        return count_units("slab", slab, "slot_bytes", self.slot_bytes)

    def _records(self, slab: Any, offset: int, ring_len: int, record_bytes: int) -> Any:
        self.check_slab(slab)
        return records_view(slab, self.slot_bytes, offset, ring_len, record_bytes)


def build_slot_layout(rings: Iterable[Ring], align_bytes: int) -> SlotLayout:
    """Place rings in a state slot: stored, not stored, compression state, each in the order given.

    The end of each ring is padded to `align_bytes`, a multiple of 16. Raises LayoutError for
    another alignment, for no rings or an empty one, for a record size that is not its format's,
    for a ring without room behind its pinned positions, for two rings of one layer and kind, and
    for a stored compression state.
    """
    if align_bytes < 16 or align_bytes % 16 != 0:
        raise LayoutError(f"align_bytes={align_bytes} but must be a positive multiple of 16")
    rings = tuple(rings)
    if not rings:
        raise LayoutError("a state slot needs at least one ring")
    ordered = (
        [r for r in rings if r.kind != "compression" and r.stored]
        + [r for r in rings if r.kind != "compression" and not r.stored]
        + [r for r in rings if r.kind == "compression"]
    )
    placed: list[Ring] = []
    seen: set[tuple[int, str]] = set()
    offset = stored_bytes = 0
    for ring in ordered:
        if (ring.layer, ring.kind) in seen:
            raise LayoutError(f"layer={ring.layer} has two rings of kind={ring.kind!r}")
        if ring.ring_len < 1 or ring.record_bytes < 1:
            raise LayoutError(
                f"{ring.name}: ring_len={ring.ring_len} record_bytes={ring.record_bytes} but both "
                "must be at least 1"
            )
        if not 0 <= ring.sink_tokens < ring.ring_len:
            raise LayoutError(
                f"{ring.name}: sink_tokens={ring.sink_tokens} but must be 0 .. ring_len - 1 = "
                f"{ring.ring_len - 1}"
            )
        if ring.record_format is not None and ring.record_bytes != ring.record_format.record_bytes:
            raise LayoutError(
                f"{ring.name}: record_bytes={ring.record_bytes} but record format "
                f"{ring.record_format.id} has {ring.record_format.record_bytes}"
            )
        if ring.kind == "compression" and ring.stored:
            raise LayoutError(f"{ring.name}: compression state is never stored")
        seen.add((ring.layer, ring.kind))
        size = align_up(ring.used_bytes, align_bytes)
        placed.append(replace(ring, offset=offset, bytes=size))
        offset += size
        stored_bytes = offset if ring.stored else stored_bytes
    return SlotLayout(tuple(placed), align_bytes, offset, stored_bytes)
