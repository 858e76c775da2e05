"""Launcher of seeded_activations.cu."""

from typing import Any

from ...layouts.sizes import div_ceil
from ..checks import check_seeded_activations
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from .widths import is_vector_aligned

PARAMS = ParamsStruct(
    "SeededParams",
    (
        ("token_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("out", "uint16_t*"),
        ("seed", "uint64_t"),
        ("layer", "uint64_t"),
        ("num_rows", "int64_t"),
        ("width", "int32_t"),
        ("group_rows", "int32_t"),
        ("row_parts", "int32_t"),
    ),
    docs=(
        ("token_ids", "[num_rows]"),
        ("positions", "[num_rows]"),
        ("out", "bf16 [num_rows, width]"),
        ("group_rows", "rows of a warp, at most 32"),
        ("row_parts", "warps that share a row"),
    ),
)
THREADS = 256
WARPS = 8
CHUNK = 8  # elements that a lane makes at once, where rows are whole vectors; else a pair
ROUNDS = 4  # chunks or pairs of a lane in a row
ENOUGH_WARPS = 8192  # more warps than a large GPU holds at once
MAX_GROUP_ROWS = 32  # one key a lane
SEED_MASK = 2**64 - 1


def _macros(vector: bool) -> MacroItems:
    part_width = ROUNDS * 32 * (CHUNK if vector else 2)  # elements of a row that one warp makes
    return macro_set(VECTOR=int(vector), LAUNCH_PART_WIDTH=part_width)


SEEDED = KernelSource(
    "seeded_activations", PARAMS, macro_sets=tuple(_macros(vector) for vector in (True, False))
)
KERNELS = (SEEDED,)


def seeded_activations(
    seed: int, layer: int, token_ids: Any, positions: Any, out: Any, *, stream: Any = None
) -> None:
    """token_ids, positions int32 [T] -> out bf16 [T, width]. `seed` modulo 2^64."""
    check_seeded_activations(token_ids, positions, out)
    check_current_device("seeded_activations", out)

    rows, width = out.shape
    macros = _macros(width % CHUNK == 0 and is_vector_aligned(out))
    row_parts = div_ceil(width, dict(macros)["LAUNCH_PART_WIDTH"])
    most = rows * row_parts // ENOUGH_WARPS  # rounded down: rows a warp can take
    group_rows = min(max(most, 1), MAX_GROUP_ROWS)
    grid = (div_ceil(div_ceil(rows, group_rows) * row_parts, WARPS),)

    params = PARAMS.pack(
        token_ids=device_pointer(token_ids),
        positions=device_pointer(positions),
        out=device_pointer(out),
        seed=seed & SEED_MASK,
        layer=layer,
        num_rows=rows,
        width=width,
        group_rows=group_rows,
        row_parts=row_parts,
    )

    get_kernel(SEEDED, macros).launch(grid, (THREADS,), params, stream)
