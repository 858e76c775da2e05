"""What kernels take of a GPU beside their arguments, and how much that is before they do.

Only those that serve records of K and V apart take any: rawkernels/cuda/window_prefill_gqa.py and
gqa_workspace.py. The engine takes what prefills need, a launcher what decode steps do.
"""

from dataclasses import dataclass

from ..layouts.config import Config
from ..rawkernels.cuda.gqa_shapes import parts_of
from ..rawkernels.cuda.gqa_workspace import SPLIT_SCRATCH_BYTES
from ..rawkernels.cuda.window_prefill_gqa import scratch_bytes
from .paged_pool import PagedSizes


@dataclass(frozen=True)
class ScratchSizes:
    """Bytes at most; all 0 on a host, and where every layer is latent.

    prefill_bytes   keys and values of a prefill layer, decoded, and the bounds of its sequences;
                    one buffer for all layers
    partial_bytes   partial sums of decode steps whose long key lists are shared by thread blocks;
                    taken at the first such step and kept; captured steps share them
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
