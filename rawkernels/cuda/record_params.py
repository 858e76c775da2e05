"""What kernels' parameters have in common where they say how records lie in a slab or a pool."""

from typing import Any

from ..paged_checks import PagedAccess
from ..ring_access import RingAccess

# Named as in RingAccess.
RING_FIELDS = (
    ("slot_bytes", "int64_t"),
    ("value_offset", "int64_t"),
    ("value_stride", "int64_t"),
    ("scale_offset", "int64_t"),
    ("scale_stride", "int64_t"),
)
PARTED_RING_FIELDS = (  # of records of K and V
    *RING_FIELDS,
    ("value_part_stride", "int64_t"),
    ("scale_part_stride", "int64_t"),
)
RING_DOCS = (
    ("value_offset", "bytes from the slot's start to the ring's first values"),
    ("value_part_stride", "bytes from a ring's values of K to those of V"),
)

POOL_FIELDS = (
    ("block_bytes", "int64_t"),
    ("layer_offset", "int64_t"),
    ("record_bytes", "int64_t"),
    ("part_bytes", "int64_t"),
    ("value_bytes", "int64_t"),
    ("num_seqs", "int32_t"),
    ("max_blocks", "int32_t"),
    ("block_size", "int32_t"),
    ("num_blocks", "int32_t"),
)
POOL_DOCS = (
    ("layer_offset", "bytes from a block's start to the layer's first record"),
    ("value_bytes", "of one part"),
)


def ring_values(ring: RingAccess, fields: tuple[tuple[str, str], ...] = RING_FIELDS) -> dict:
    """Values of RING_FIELDS, or of PARTED_RING_FIELDS."""
    return {name: getattr(ring, name) for name, _ in fields}


def pool_values(access: PagedAccess, block_tables: Any, num_seqs: int) -> dict[str, int]:
    """Values of POOL_FIELDS; block_tables int32 [>= num_seqs, max_blocks]."""
    fmt = access.format
    return {
        "block_bytes": access.block_bytes,
        "layer_offset": access.offset,
        "record_bytes": fmt.record_bytes,
        "part_bytes": fmt.part_bytes,
        "value_bytes": fmt.part_value_bytes,
        "num_seqs": num_seqs,
        "max_blocks": block_tables.shape[1],
        "block_size": access.block_size,
        "num_blocks": access.num_blocks,
    }
