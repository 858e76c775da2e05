"""The JSON report of a run: keys, percentiles, and an atomic write."""

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..layouts.budget import kv_bytes
from ..layouts.config import Config
from ..layouts.errors import ArgumentError
from ..layouts.sizes import align_up
from ..layouts.slots import SlotLayout
from ..rawkernels.attention_variants import attention_variant

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


def check_report_path(path: str | Path) -> None:
    """Raises OSError where `write_report` could not write to `path`; asked before a run, so that
    none is lost for a folder that is not there."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
        pass  # gone again at once


def check_separate_files(call: str, files: Mapping[str, Any]) -> None:
    """Raises ArgumentError where two of the named files (None: not asked for) are one, so that the
    later would be written over the earlier, and for a name that no file can have."""
    seen: dict[str, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        if "\0" in os.fspath(path):
            raise ArgumentError(
                f"{call}: {name} {os.fspath(path)!r} holds a NUL, as no file's name"
            )
        first = seen.setdefault(os.path.realpath(path), name)
        if first != name:
            raise ArgumentError(
                f"{call}: {first} and {name} are both {os.fspath(path)}; name two files"
            )


def write_report(report: dict, path: str | Path) -> None:
    """Writes a report so that `path` always holds a whole one: the old or the new.

    Raises OSError where the folder cannot be written, ValueError for a NaN or infinity (JSON has
    none; a report says null).
    """
    path = Path(path)
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _umask() -> int:
    """The process's file mode mask; reading it takes setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
