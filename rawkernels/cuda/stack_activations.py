"""Launcher of stack_activations.cu."""

from typing import Any

from ...layouts.sizes import div_ceil
from ..checks import check_stack_activations
from ..device.kernel_source import KernelSource, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from .widths import is_vector_aligned

PARAMS = ParamsStruct(
    "StackParams",
    (
        ("previous", "const uint16_t*"),
        ("token_ids", "const int32_t*"),
        ("positions", "const int32_t*"),
        ("q", "uint16_t*"),
        ("kv", "uint16_t*"),
        ("seed", "uint64_t"),
        ("layer", "uint64_t"),
        ("num_heads", "int32_t"),
        ("head_dim", "int32_t"),
        ("head_parts", "int32_t"),
        ("part_heads", "int32_t"),
    ),
    docs=(
        ("previous", "bf16 [num_tokens, num_heads, head_dim]"),
        ("token_ids", "[num_tokens]"),
        ("positions", "[num_tokens]"),
        ("q", "bf16 [num_tokens, num_heads, head_dim]"),
        ("kv", "bf16 [num_tokens, head_dim]"),
        ("seed", "the run's; q hashes with 2 seed + 1, kv with 2 seed"),
        ("head_parts", "thread blocks of a token, part_heads heads each"),
    ),
)
STACK = KernelSource(
    "stack_activations", PARAMS, macro_sets=(macro_set(VECTOR=1), macro_set(VECTOR=0))
)
KERNELS = (STACK,)

THREADS = 512
CHUNK = 8  # elements of a vector
PART_WIDTH = 4 * THREADS * CHUNK  # elements of a thread block, about: four vectors a thread
SEED_MASK = 2**64 - 1


def stack_activations(
    previous: Any,
    seed: int,
    layer: int,
    token_ids: Any,
    positions: Any,
    q: Any,
    kv: Any,
    *,
    stream: Any = None,
) -> None:
    """previous bf16 [T, H, D] (output of layer - 1) -> q bf16 [T, H, D], kv bf16 [T, D]."""
    check_stack_activations(previous, token_ids, positions, q, kv)
    check_current_device("stack_activations", q)

    num_tokens, num_heads, head_dim = previous.shape
    part_heads = min(max(PART_WIDTH // max(head_dim, 1), 1), max(num_heads, 1))
    head_parts = div_ceil(num_heads, part_heads)
    grid = (num_tokens * head_parts,)

    vector = head_dim % CHUNK == 0 and is_vector_aligned(previous, q, kv)
    params = PARAMS.pack(
        previous=device_pointer(previous),
        token_ids=device_pointer(token_ids),
        positions=device_pointer(positions),
        q=device_pointer(q),
        kv=device_pointer(kv),
        seed=seed & SEED_MASK,
        layer=layer,
        num_heads=num_heads,
        head_dim=head_dim,
        head_parts=head_parts,
        part_heads=part_heads,
    )

    get_kernel(STACK, macro_set(VECTOR=int(vector))).launch(grid, (THREADS,), params, stream)
