"""Checks the `prefix` section of a configuration."""

from math import lcm

from .bind import Binder
from .config_schema import ConfigFile
from .config_types import PrefixConfig
from .store_url import STORE_URLS, store_kind


def derive_prefix(
    file: ConfigFile, binder: Binder, compression_ratio: dict[int, int]
) -> PrefixConfig | None:
    """The prefix cache of a file, or None where it asks for none. Faults go to the binder."""
    section = file.prefix
    if section is None or section.contract == "none":
        return None
    ratio = lcm(*compression_ratio.values())
    if section.block_size % ratio != 0:
        binder.fault(
            "prefix.block_size",
            section.block_size,
            f"a multiple of {ratio}, the compression ratios: compression state is not stored, and "
            "is empty only between two groups",
        )
    if store_kind(section.store) is None:
        binder.fault("prefix.store", section.store, STORE_URLS)
    if not file.engine.chunked_prefill:
        binder.fault(
            "engine.chunked_prefill", "false", "true, for chunks that end where a snapshot is due"
        )
    if file.run.activations == "file":
        binder.fault(
            "run.activations", "file", "seeded or stacked: recorded arrays belong to one request"
        )
    if file.paged is not None:
        check_pages(file, binder)
    elif section.contract != "full":
        check_producers_first(file, binder)
        if any(group.sink_tokens for group in file.layer_groups):
            binder.fault(
                "prefix.contract",
                section.contract,
                "full where a layer keeps its first keys visible: a replay does not make them",
            )
    return PrefixConfig(
        contract=section.contract,
        block_size=section.block_size,
        snapshot_blocks=section.snapshot_blocks,
        budget_bytes=section.budget_bytes,
        store=section.store,
    )


def check_pages(file: ConfigFile, binder: Binder) -> None:
    """Blocks of the cache are whole pages, and pages are stored, not rebuilt."""
    section, page = file.prefix, file.paged.block_size
    if section.contract != "full":
        binder.fault("prefix.contract", section.contract, "full where layers see all keys")
    if section.block_size % page != 0:
        binder.fault(
            "prefix.block_size", section.block_size, f"a multiple of paged.block_size {page}"
        )


def check_producers_first(file: ConfigFile, binder: Binder) -> None:
    """A replay rebuilds the rings that are not stored. What lies above one of them and is stored
    would carry the replay's error into the next snapshot."""
    layers = {
        role: [
            layer
            for group in file.layer_groups
            if group.role == role
            for layer in (group.layers or (group.first, group.last))
        ]
        for role in ("producer", "consumer")
    }
    if not layers["producer"]:
        binder.fault("prefix.contract", file.prefix.contract, "full where no layer is a producer")
    elif layers["consumer"] and min(layers["consumer"]) < max(layers["producer"]):
        binder.fault(
            "prefix.contract",
            file.prefix.contract,
            f"full where a consumer (layer {min(layers['consumer'])}) lies below a producer "
            f"({max(layers['producer'])})",
        )
