"""Launcher of apply_rope.cu."""

from typing import Any

from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ..checks import check_apply_rope
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from .rope_tables import device_rope_table
from .widths import MAX_PIECE_BYTES, is_vector_aligned

THREADS = 128
TARGET_VECTORS = 2 * THREADS  # vectors of a thread block: two a thread

PARAMS = ParamsStruct(
    "ApplyRopeParams",
    (
        ("x", "const uint8_t*"),
        ("out", "uint8_t*"),
        ("positions", "const int32_t*"),
        ("table", "const double*"),
        ("num_heads", "int32_t"),
        ("head_groups", "int32_t"),
        ("inverse", "int32_t"),
    ),
    docs=(
        ("x", "bf16 or float32 [num_tokens, num_heads, HEAD_DIM]"),
        ("out", "like x; may be x"),
        ("positions", "[num_tokens]"),
        ("table", "[ROPE_TABLE_ROWS, ROPE_DIMS / 2, 2]"),
        ("head_groups", "thread blocks of one token"),
    ),
)


def rope_macros(head_dim: int, rope: Rope, item_bytes: int, aligned: bool = True) -> MacroItems:
    """Macros of apply_rope.cu: 16-byte vectors where they hold whole pairs, else one element."""
    vector = MAX_PIECE_BYTES // item_bytes  # exact: 2 or 4 bytes
    adjacent = rope.pairing == "adjacent"
    sides = (head_dim, head_dim - rope.dims, rope.dims if adjacent else rope.num_pairs)
    whole = aligned and all(side % vector == 0 for side in sides)
    lane_dims = vector if whole else 1
    return macro_set(
        LAUNCH_GROUP_HEADS=max(TARGET_VECTORS * lane_dims // head_dim, 1),  # rounded down
        HEAD_DIM=head_dim,
        ROPE_DIMS=rope.dims,
        ROPE_ADJACENT=int(adjacent),
        X_BF16=int(item_bytes == 2),
        LANE_DIMS=lane_dims,
    )


APPLY_ROPE = KernelSource(
    "apply_rope",
    PARAMS,
    macro_sets=tuple(
        rope_macros(512, Rope(10_000.0, dims, pairing), item_bytes)
        for dims in (64, 12)  # 12: pairs that do not fit whole vectors
        for pairing in ("adjacent", "half")
        for item_bytes in (2, 4)
    )
    + (rope_macros(64, Rope(10_000.0, 64, "half"), 2),),  # no dims to copy
)
KERNELS = (APPLY_ROPE,)


def apply_rope(
    x: Any, positions: Any, out: Any, *, rope: Rope, inverse: bool = False, stream: Any = None
) -> None:
    """x bf16 or float32 [T, H, D], positions int32 [T] -> out like x (may be x itself)."""
    check_apply_rope(x, positions, out, rope)
    check_current_device("apply_rope", x)

    num_tokens, num_heads, head_dim = x.shape
    macros = rope_macros(head_dim, rope, x.dtype.itemsize, is_vector_aligned(x, out))
    head_groups = div_ceil(num_heads, dict(macros)["LAUNCH_GROUP_HEADS"])
    grid = (num_tokens * head_groups,)

    params = PARAMS.pack(
        x=device_pointer(x),
        out=device_pointer(out),
        positions=device_pointer(positions),
        table=device_pointer(device_rope_table(rope)),
        num_heads=num_heads,
        head_groups=head_groups,
        inverse=int(inverse),
    )

    get_kernel(APPLY_ROPE, macros).launch(grid, (THREADS,), params, stream)
