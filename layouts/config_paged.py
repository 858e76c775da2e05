"""Derives the bytes of a block of the paged pool again and compares them with what the file
states."""

from .bind import Binder
from .config_schema import ConfigFile, PagedLayerSection
from .formats import RecordFormat
from .paged import PagedLayout, build_paged_layout
from .sizes import align_up


def derive_paged(
    file: ConfigFile,
    binder: Binder,
    formats: dict[str, RecordFormat],
    groups: dict[str, tuple[int, ...]],
) -> PagedLayout | None:
    """The layout of the file's paged pool; None where no layer is global, or a fault was added."""
    wanted = [group for group in file.layer_groups if group.kind == "global"]
    if not check_presence(file, binder, [group.id for group in wanted]) or not wanted:
        return None
    paged = file.paged
    if paged.align_bytes % 16 != 0:
        binder.fault(
            "paged.align_bytes", paged.align_bytes, "a multiple of 16, the bytes a kernel loads"
        )
        return None
    by_id = {group.id: group for group in wanted}
    layers: list[tuple[int, RecordFormat]] = []
    seen: set[str] = set()
    for i, section in enumerate(paged.layers):
        at = f"paged.layers[{i}]"
        if section.layer_group not in by_id or section.layer_group in seen:
            again = "once each " if section.layer_group in seen else ""
            binder.fault(
                f"{at}.layer_group", section.layer_group, f"{again}one of {', '.join(by_id)}"
            )
            continue
        seen.add(section.layer_group)
        record_format = formats[by_id[section.layer_group].record_format]
        compare_layer(section, record_format, file, binder, at)
        layers += [(layer, record_format) for layer in groups[section.layer_group]]
    missing = [group for group in by_id if group not in seen]
    if missing:
        binder.fault(
            "paged.layers", f"nothing for {', '.join(missing)}", "an entry for each global group"
        )
    if binder.faults:
        return None
    layout = build_paged_layout(layers, paged.block_size, paged.align_bytes)
    for i, section in enumerate(paged.layers):
        first = layout.layer(groups[section.layer_group][0])
        binder.derived(f"paged.layers[{i}].offset", section.offset, first.offset)
    binder.derived("paged.block_bytes", paged.block_bytes, layout.block_bytes)
    return layout


def check_presence(file: ConfigFile, binder: Binder, wanted: list[str]) -> bool:
    """Whether `paged` and `engine.num_blocks` are there exactly where a layer is global."""
    before = len(binder.faults)
    if not wanted:
        if file.paged is not None:
            binder.fault("paged", "a mapping", "no such key where no layer group is global")
        if file.engine.num_blocks is not None:
            binder.fault(
                "engine.num_blocks",
                file.engine.num_blocks,
                "no such key where no layer group is global",
            )
        return len(binder.faults) == before
    what = f"for the global layer groups {', '.join(wanted)}"
    if file.paged is None:
        binder.fault("", "no key paged", f"one {what}", "add paged")
    if file.engine.num_blocks is None:
        binder.fault("engine", "no num_blocks", f"a number of blocks {what}", "add num_blocks")
    return len(binder.faults) == before


def compare_layer(
    section: PagedLayerSection,
    record_format: RecordFormat,
    file: ConfigFile,
    binder: Binder,
    path: str,
) -> None:
    used = file.paged.block_size * record_format.record_bytes
    layer_bytes = align_up(used, file.paged.align_bytes)
    binder.derived(f"{path}.record_bytes", section.record_bytes, record_format.record_bytes)
    binder.derived(f"{path}.padding_bytes", section.padding_bytes, layer_bytes - used)
    binder.derived(f"{path}.layer_bytes", section.layer_bytes, layer_bytes)
