"""dequantize_mxfp8: E4M3 elements and E8M0 scales to numbers.

Measures `rows` rows of head_dim elements, to float32 or to bf16 (both exact). Bound by bytes: 1 +
1/32 read and 4 (float32) or 2 (bf16) written a number.
"""

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ...layouts.config import Config
from ...layouts.formats import MX_BLOCK, make_record_format
from ...layouts.sizes import div_ceil, div_exact
from ...rawkernels.operations import operation
from .common import Place, Shape, Work, num_sets
from .inputs import host_rows, random_records, sample_rows, upload
from .records import require_equal

AXES = {"rows": (65536, 1048576), "dtype": ("float32",)}
SMOKE = {"rows": 33, "dtype": "float32"}
OUT_DTYPES = {"float32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}
BLOCK_ROWS = 65536  # made on the host and repeated: addresses differ, which is what counts


def prepare(place: Place, cfg: Config, shape: Shape, rng: np.random.Generator) -> Work:
    """Work of a shape {rows, dtype}."""
    num_rows, width, dtype = shape["rows"], cfg.head_dim, OUT_DTYPES[shape["dtype"]]
    blocks = div_ceil(width, MX_BLOCK)
    size = num_rows * (width + blocks + width * dtype.itemsize)
    fmt = make_record_format("mxfp8", width)
    inputs, outputs, calls = [], [], []
    for _ in range(num_sets(size)):
        block_rows = BLOCK_ROWS if num_rows % BLOCK_ROWS == 0 else num_rows
        records = random_records(block_rows, fmt, rng)
        values, scales = _repeated(place, records, num_rows, width)
        out = place.memory.empty((num_rows, width), dtype)
        calls.append(partial(place.ops.dequantize_mxfp8, values, scales, out))
        inputs.append((values, scales))
        outputs.append(out)

    def check() -> dict[str, Any]:
        rows = sample_rows(num_rows, rng)
        wanted = np.empty((len(rows), width), np.float32)
        host = [host_rows(place, part, rows) for part in inputs[0]]
        operation("reference", "dequantize_mxfp8")(*host, wanted)
        found = host_rows(place, outputs[0], rows)
        if dtype == np.uint16:
            found = found.view(ml_dtypes.bfloat16).astype(np.float32)
        return require_equal(found, wanted, "numbers")

    return Work(
        calls=tuple(calls),
        outputs=(outputs[0],),
        bytes=size,
        flops=0,
        check=check,
        parts={"inputs": inputs, "outputs": outputs},
    )


def _repeated(place: Place, records: np.ndarray, num_rows: int, width: int) -> tuple[Any, Any]:
    """values [num_rows, width] and scales [num_rows, blocks] with the same rows again and again."""
    block = upload(place, records)
    copies = div_exact(num_rows, records.shape[0])
    parts = []
    for part in (block[:, :width], block[:, width:]):
        whole = place.memory.empty((num_rows, part.shape[1]), np.uint8)
        whole.reshape(copies, records.shape[0], part.shape[1])[...] = part
        parts.append(whole)
    return parts[0], parts[1]
