"""What kernels take of a GPU beside their arguments, and how much that is before they do.

Only those that serve records of K and V apart take any: rawkernels/cuda/prefill_scratch.py and
gqa_workspace.py. An engine takes it when it is made; what it gives no scratch takes its own.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.cuda.gqa_shapes import MAX_SPLIT_BYTES, MAX_UNITS, parts_of
from ..rawkernels.cuda.gqa_workspace import SPLIT_SCRATCH_BYTES
from ..rawkernels.cuda.prefill_scratch import scratch_bytes
from ..rawkernels.memory import Memory
from .paged_pool import PagedSizes


@dataclass(frozen=True)
class ScratchSizes:
    """Bytes at most; all 0 on a host, and where every layer is latent.

    prefill_bytes   keys and values of a prefill layer, decoded, and the bounds of its sequences;
                    one buffer for all layers
    partial_bytes   partial sums of decode steps whose long key lists are shared by thread blocks;
                    captured steps share them
    """

    prefill_bytes: int = 0
    partial_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.prefill_bytes + self.partial_bytes


def scratch_sizes(
    cfg: Config, paged: PagedSizes, prefill_seqs: int, prefill_tokens: int
) -> ScratchSizes:
    """Scratch of an engine on a GPU, for its largest prefill batch."""
    if cfg.latent:
        return ScratchSizes()
    local = [layer for layer in cfg.layers if layer.kind == "swa"]
    prefill = 0
    for layer in local:  # `PrefillPlan.most_keys` of the largest batch
        keys = prefill_seqs * (layer.window - 1 + layer.sink_tokens) + prefill_tokens
        prefill = max(prefill, scratch_bytes(prefill_seqs, keys, layer.record_format))

    longest = max(layer.ring_len for layer in local)
    if cfg.paged_layout is not None:
        longest = max(longest, paged.table_width * cfg.paged_layout.block_size)
    partial = SPLIT_SCRATCH_BYTES if parts_of(longest) > 1 else 0
    return ScratchSizes(prefill, partial)


@dataclass(frozen=True)
class Scratch:
    """Scratch of an engine, and the options that hand it to operations: only the launchers of a GPU
    take it. The steps of an engine follow one another, captured or not, since they share the slab;
    so they can share it.

    prefill  uint8 [prefill_bytes], of window_prefill; None where no kernel takes it
    decode   partial sums, float32, and counters, uint32, of window_decode and paged_decode:
             partial_bytes; or None
    """

    prefill: Any = None
    decode: tuple[Any, Any] | None = None

    @property
    def prefill_options(self) -> dict[str, Any]:
        return {} if self.prefill is None else {"scratch": self.prefill}

    @property
    def decode_options(self) -> dict[str, Any]:
        return {} if self.decode is None else {"scratch": self.decode}


def take_scratch(sizes: ScratchSizes, memory: Memory) -> Scratch:
    """The scratch of an engine; raises DeviceMemoryError where it does not fit."""
    prefill = decode = None
    if sizes.prefill_bytes:
        prefill = memory.empty((sizes.prefill_bytes,), np.uint8)
    if sizes.partial_bytes:
        partials = memory.empty((MAX_SPLIT_BYTES // 4,), np.float32)  # exact: whole MiB
        decode = partials, memory.empty((MAX_UNITS,), np.uint32)
        memory.zero(decode[1])
        memory.wait(memory.record())  # the first step may come on another stream
    return Scratch(prefill, decode)
