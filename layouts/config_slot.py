"""Derives the bytes of a state slot again and compares them with what the file states."""

from .bind import Binder
from .config_schema import CompressionSection, ConfigFile, RingSection
from .formats import RecordFormat
from .rings import required_ring_len
from .sizes import align_up
from .slots import Ring, SlotLayout, build_slot_layout

STATE_ROWS = 2  # an entry of compression state is a row of values and a row of scores
STATE_ELEMENT_BYTES = 4  # float32


class SlotDeriver:
    """The slot section of one file. `derive` fills `ring_len` by group and `compression_ratio` by
    layer, and gives the layout."""

    def __init__(
        self,
        file: ConfigFile,
        binder: Binder,
        formats: dict[str, RecordFormat],
        groups: dict[str, tuple[int, ...]],
    ) -> None:
        self.file, self.binder, self.formats, self.groups = file, binder, formats, groups
        self.ring_len: dict[str, int] = {}
        self.compression_ratio: dict[int, int] = {}

    def derive(self) -> SlotLayout | None:
        """The layout, or None where a fault was added."""
        slot = self.file.slot
        if slot.align_bytes % 16 != 0:
            self.binder.fault(
                "slot.align_bytes", slot.align_bytes, "a multiple of 16, the bytes a kernel loads"
            )
            return None
        rings: list[Ring] = []
        for i, section in enumerate(slot.rings):
            rings += self.group_rings(section, f"slot.rings[{i}]")
        missing = [
            group.id
            for group in self.file.layer_groups
            if group.kind == "swa" and group.id not in self.ring_len
        ]
        if missing:
            self.binder.fault(
                "slot.rings", f"no rings for {', '.join(missing)}", "rings for each layer group"
            )
        for i, section in enumerate(slot.compression):
            rings += self.state_rings(section, f"slot.compression[{i}]")
        if self.binder.faults:
            return None
        layout = build_slot_layout(rings, slot.align_bytes)
        self.compare_offsets(layout)
        self.binder.derived("slot.stored_bytes", slot.stored_bytes, layout.stored_bytes)
        self.binder.derived("slot.slot_bytes", slot.slot_bytes, layout.slot_bytes)
        return layout

    def group_rings(self, section: RingSection, path: str) -> list[Ring]:
        """The rings of one layer group, not yet placed; all sizes compared."""
        binder = self.binder
        groups = {group.id: group for group in self.file.layer_groups if group.kind == "swa"}
        if section.layer_group not in groups or section.layer_group in self.ring_len:
            again = "once each " if section.layer_group in self.ring_len else ""
            binder.fault(
                f"{path}.layer_group", section.layer_group, f"{again}one of {', '.join(groups)}"
            )
            return []
        group = groups[section.layer_group]
        self.ring_len[group.id] = section.ring_len
        tokens = self.file.model.tokens_per_step
        pinned = group.sink_tokens
        needed = required_ring_len(group.window, tokens, pinned)
        if section.ring_len < needed:
            more, count = (" + sink_tokens", f" + {pinned}") if pinned else ("", "")
            binder.fault(
                f"{path}.ring_len",
                section.ring_len,
                f"at least window + tokens_per_step - 1{more} = {group.window} + {tokens} - 1"
                f"{count} = {needed} ({section.ring_len} < {needed})",
                f"write {needed} or more; {needed + 1} is usual",
            )
        record_format = self.formats[group.record_format]
        planar = record_format.plane_order == "planar"
        scales_at = section.ring_len * record_format.value_bytes if planar else None
        binder.derived(
            f"{path}.stored", section.stored, group.role == "producer", "only producers are stored"
        )
        binder.derived(f"{path}.record_bytes", section.record_bytes, record_format.record_bytes)
        binder.derived(f"{path}.scale_plane_offset", section.scale_plane_offset, scales_at)
        self.compare_sizes(section, section.ring_len * record_format.record_bytes, path)
        return [
            Ring(
                name=f"layer{layer}_swa",
                layer=layer,
                kind="swa",
                ring_len=section.ring_len,
                record_bytes=record_format.record_bytes,
                stored=group.role == "producer",
                record_format=record_format,
                sink_tokens=pinned,
            )
            for layer in self.groups[group.id]
        ]

    def state_rings(self, section: CompressionSection, path: str) -> list[Ring]:
        """The compression state of the owners in one section, not yet placed."""
        binder, tokens = self.binder, self.file.model.tokens_per_step
        wrong = [layer for layer in section.layers if layer >= self.file.model.num_layers]
        twice = [layer for layer in section.layers if layer in self.compression_ratio]
        if wrong or not section.layers:
            binder.fault(
                f"{path}.layers",
                list(section.layers),
                f"layer ids 0 .. {self.file.model.num_layers - 1}; draft layers own none",
            )
        if twice or list(section.layers) != sorted(set(section.layers)):
            binder.fault(f"{path}.layers", list(section.layers), "ascending ids, each owner once")
            return []
        self.compression_ratio.update(dict.fromkeys(section.layers, section.ratio))
        needed = section.ratio + tokens - 1
        if section.num_entries < needed:
            binder.fault(
                f"{path}.num_entries",
                section.num_entries,
                f"at least ratio + tokens_per_step - 1 = {section.ratio} + {tokens} - 1 = {needed} "
                f"({section.num_entries} < {needed})",
            )
        entry_bytes = STATE_ROWS * section.dim * STATE_ELEMENT_BYTES
        binder.derived(f"{path}.entry_bytes", section.entry_bytes, entry_bytes)
        self.compare_sizes(section, section.num_entries * entry_bytes, path)
        return [
            Ring(
                name=f"layer{layer}_compression",
                layer=layer,
                kind="compression",
                ring_len=section.num_entries,
                record_bytes=entry_bytes,
                stored=False,
                record_format=None,
            )
            for layer in section.layers
        ]

    def compare_sizes(
        self, section: RingSection | CompressionSection, used_bytes: int, path: str
    ) -> None:
        ring_bytes = align_up(used_bytes, self.file.slot.align_bytes)
        self.binder.derived(f"{path}.padding_bytes", section.padding_bytes, ring_bytes - used_bytes)
        self.binder.derived(f"{path}.ring_bytes", section.ring_bytes, ring_bytes)

    def compare_offsets(self, layout: SlotLayout) -> None:
        slot = self.file.slot
        for i, ring in enumerate(slot.rings):
            first = layout.ring(self.groups[ring.layer_group][0], "swa")
            self.binder.derived(f"slot.rings[{i}].offset", ring.offset, first.offset)
        for i, state in enumerate(slot.compression):
            first = layout.ring(state.layers[0], "compression")
            self.binder.derived(f"slot.compression[{i}].offset", state.offset, first.offset)
