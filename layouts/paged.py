"""The paged pool of global layers: what the bytes of a block are, and how many blocks are needed.

A layer without a window keeps every record of a sequence, so it has no ring and no place in the
state slot. Its records lie in blocks of `block_size` tokens, taken from one pool as a sequence
grows. One block id serves all global layers: a block holds, layer after layer, the records of
its tokens. A sequence's block table lists its blocks: token p lies in block `table[p / block_size]`
at index `p % block_size`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import LayoutError
from .flat_bytes import count_units, records_view
from .formats import RecordFormat
from .sizes import align_up, div_ceil, is_count

NO_BLOCK = -1  # in a block table, beyond the sequence's last block


@dataclass(frozen=True)
class PagedLayer:
    """The records of one global layer in a block; `offset` counts bytes from the block's start."""

    layer: int
    record_format: RecordFormat
    offset: int

    @property
    def record_bytes(self) -> int:
        return self.record_format.record_bytes


@dataclass(frozen=True)
class PagedLayout:
    """One block of the pool; build it with `build_paged_layout`.

    The pool is a flat uint8 array of num_blocks * block_bytes, base aligned to 256 bytes. The
    record of token i of block b in layer l begins at b * block_bytes + offset_l + i * record_bytes,
    in 64-bit arithmetic.
    """

    block_size: int
    align_bytes: int
    layers: tuple[PagedLayer, ...]
    block_bytes: int

    def layer(self, layer: int) -> PagedLayer:
        """The part of a block that holds a layer. Raises LayoutError for a layer without one."""
        for part in self.layers:
            if is_count(layer) and part.layer == layer:
                return part
        known = [part.layer for part in self.layers]
        raise LayoutError(
            f"layer={layer!r} has no records in the paged pool; layers that do: {known}"
        )

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer in a block, padding included."""
        return align_up(self.block_size * self.layer(layer).record_bytes, self.align_bytes)

    def view(self, pool: Any, layer: int) -> Any:
        """uint8 [num_blocks, block_size, 1, record_bytes] view of a layer's records, no copy; the
        stride of the first axis is `block_bytes`. Raises LayoutError as `check_pool` does."""
        part = self.layer(layer)
        self.check_pool(pool)
        return records_view(pool, self.block_bytes, part.offset, self.block_size, part.record_bytes)

    def check_pool(self, pool: Any) -> int:
        """Number of blocks in a pool. Raises LayoutError unless it is flat, contiguous uint8 of a
        whole number of blocks."""
        return count_units("pool", pool, "block_bytes", self.block_bytes)

    def blocks_of(self, seqlen: int) -> int:
        """Blocks that hold the first `seqlen` tokens of a sequence."""
        return div_ceil(seqlen, self.block_size)


def build_paged_layout(
    layers: Iterable[tuple[int, RecordFormat]], block_size: int, align_bytes: int
) -> PagedLayout:
    """Place the records of `layers`, (layer id, record format) each, in a block of `block_size`
    tokens, in the order given.

    The end of each layer's records is padded to `align_bytes`, a multiple of 16. Raises LayoutError
    for a block size below 1, another alignment, no layers or what is no pair, a layer given twice,
    and a planar format: a page is read record by record.
    """
    if not is_count(block_size) or block_size < 1:
        raise LayoutError(f"block_size={block_size!r} but must be an integer of at least 1")
    if not is_count(align_bytes) or align_bytes < 16 or align_bytes % 16 != 0:
        raise LayoutError(f"align_bytes={align_bytes!r} but must be a positive multiple of 16")
    placed: list[PagedLayer] = []
    seen: set[int] = set()
    offset = 0
    for layer, record_format in _pairs(layers):
        if layer in seen:
            raise LayoutError(f"layer={layer} is in the paged pool twice")
        if record_format.plane_order != "interleaved":
            raise LayoutError(
                f"layer={layer}: record format {record_format.id!r} is "
                f"{record_format.plane_order}, but records of the paged pool are interleaved"
            )
        seen.add(layer)
        placed.append(PagedLayer(layer, record_format, offset))
        offset += align_up(block_size * record_format.record_bytes, align_bytes)
    if not placed:
        raise LayoutError("a paged pool needs at least one layer")
    return PagedLayout(block_size, align_bytes, tuple(placed), offset)


def _pairs(layers: Any) -> list[tuple[int, RecordFormat]]:
    try:
        pairs = list(layers)
    except TypeError:
        pairs = [layers]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise LayoutError(f"layers={layers!r:.80} but must be pairs of layer id and record format")
    for layer, record_format in pairs:
        if not is_count(layer) or not isinstance(record_format, RecordFormat):
            raise LayoutError(
                f"layers: ({layer!r:.40}, {type(record_format).__name__}) but must be an integer "
                "and a RecordFormat"
            )
    return pairs


def max_window_blocks(window: int, block_size: int) -> int:
    """Blocks that a *windowed* layer could hold alive at once if it were paged and freed blocks
    that fell out of the window: ceil(window / block_size) + 1, because a window rarely begins where
    a block does. 9 for a window of 128 in blocks of 16: 144 token slots where a ring has 128.

    Raises LayoutError for a window or block size below 1, or what is no integer.
    """
    for name, value in (("window", window), ("block_size", block_size)):
        if not is_count(value) or value < 1:
            raise LayoutError(
                f"max_window_blocks: {name}={value!r} but must be an integer of at least 1"
            )
    return div_ceil(window, block_size) + 1
