"""Launcher of digest_outputs.cu."""

from functools import cache
from typing import Any

from ...layouts.sizes import div_ceil
from ..checks import check_digest_outputs
from ..device.kernel_source import KernelSource, ParamsStruct, macro_set
from ..device.module import check_current_device, device_pointer, get_kernel
from .widths import is_vector_aligned

PARAMS = ParamsStruct(
    "DigestParams",
    (
        ("out", "const uint16_t*"),
        ("digests", "uint64_t*"),
        ("layer_key", "uint64_t"),
        ("width", "int32_t"),
        ("token_parts", "int32_t"),
    ),
    docs=(
        ("out", "bf16 [num_tokens, width]"),
        ("digests", "[num_tokens]"),
        ("layer_key", "splitmix64(layer)"),
        ("token_parts", "thread blocks of a token"),
    ),
)
THREADS = 256
CHUNK = 8  # elements of a vector
PART_WIDTH = 4 * THREADS * CHUNK  # elements of a thread block: four vectors a thread
DIGEST = KernelSource(
    "digest_outputs",
    PARAMS,
    macro_sets=tuple(macro_set(VECTOR=v, LAUNCH_PART_WIDTH=PART_WIDTH) for v in (1, 0)),
)
KERNELS = (DIGEST,)
MASK64 = 2**64 - 1


@cache
def _layer_key(layer: int) -> int:
    """splitmix64(layer), made here: the compiler would make it again for every term."""
    z = (layer + 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def digest_outputs(out: Any, layer: int, digests: Any, *, stream: Any = None) -> None:
    """out bf16 [T, width]; adds each token's digest to digests uint64 [T], modulo 2^64."""
    check_digest_outputs(out, digests)
    check_current_device("digest_outputs", out)

    num_tokens, width = out.shape
    token_parts = div_ceil(width, PART_WIDTH)
    grid = (num_tokens * token_parts,)

    vector = width % CHUNK == 0 and is_vector_aligned(out)
    params = PARAMS.pack(
        out=device_pointer(out),
        digests=device_pointer(digests),
        layer_key=_layer_key(layer),
        width=width,
        token_parts=token_parts,
    )

    macros = macro_set(VECTOR=int(vector), LAUNCH_PART_WIDTH=PART_WIDTH)
    get_kernel(DIGEST, macros).launch(grid, (THREADS,), params, stream)
