"""The JSON report of a run: keys, percentiles, and how it is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..layouts.budget import kv_bytes
from ..layouts.config import Config
from ..layouts.sizes import align_up
from ..layouts.slots import SlotLayout
from ..rawkernels.attention_variants import attention_variant
from .output_files import write_whole

SCHEMA_VERSION = 1  # grows when a key changes its meaning or goes away
PERCENTILES = (50, 90, 99)


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """p50, p90, p99, mean and max of times in seconds; None where there are none."""
    if not seconds:
        return None
    array = np.asarray(seconds, dtype=np.float64)
    found = {f"p{p}": float(np.percentile(array, p)) for p in PERCENTILES}
    return {**found, "mean": float(array.mean()), "max": float(array.max())}


def bytes_per_sequence(layout: SlotLayout, slab: Any, num_state_slots: int) -> dict[str, int]:
    """Bytes that a sequence takes of the slab, and what the formula says: over all rings,
    ring_len * record_bytes padded to align_bytes."""
    formula = sum(align_up(r.ring_len * r.record_bytes, layout.align_bytes) for r in layout.rings)
    return {
        "measured": int(slab.nbytes) // num_state_slots,  # exact: the slab is whole slots
        "formula": formula,
        "stored": layout.stored_bytes,
    }


def engine_bytes(engine: Any, longest: tuple[int, int]) -> dict[str, int]:
    """`bytes_per_sequence` of an engine. With a paged pool it is those of the longest sequence of a
    run, given as its tokens and the blocks that it was seen to hold, and the formula is
    `kv_bytes(cfg, context).real_bytes`."""
    cfg, tools = engine.cfg, engine.tools
    found = bytes_per_sequence(cfg.slot_layout, tools.slab, engine.sizes.num_state_slots)
    context, blocks = longest
    if tools.paged is None or context == 0:
        return found
    block_bytes = int(tools.paged.pool.nbytes) // cfg.engine.num_blocks  # exact: whole blocks
    return {
        **found,
        "measured": found["measured"] + blocks * block_bytes,
        "formula": kv_bytes(cfg, context).real_bytes,
        "context": context,
        "num_blocks": blocks,
        "block_bytes": block_bytes,
    }


def attention_kernels(cfg: Config, backend: str) -> dict[str, int]:
    """How many layers each family of attention kernels serves: `attention_variant`'s, and "paged"
    for global layers on a GPU."""
    counts: dict[str, int] = {}
    for layer in cfg.layers:
        if layer.kind == "global":
            variant = "paged" if backend == "cuda" else backend
        else:
            variant = attention_variant(
                backend,
                cfg.slot_layout,
                layer.id,
                cfg.num_q_heads,
                softmax_scale=layer.softmax_scale,
                rope_out=layer.rope if layer.inverse_rope_out else None,
            )
        counts[variant] = counts.get(variant, 0) + 1
    return counts


def report_head(cfg: Config, backend: str, layout: SlotLayout) -> dict:
    """The keys that are known before a run starts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": cfg.name,
        "config": cfg.path,
        "backend": backend,
        "attention_kernels": attention_kernels(cfg, backend),
        "activations": cfg.run.activations,
        "seed": cfg.run.seed,
        "slot_bytes": layout.slot_bytes,
        "stored_bytes": layout.stored_bytes,
    }


def write_report(report: dict, path: str | Path) -> None:
    """Writes a report so that `path` always holds a whole one: the old or the new.

    Raises OSError where it cannot be written, ValueError for a NaN or infinity (JSON has none; a
    report says null).
    """
    write_whole(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
