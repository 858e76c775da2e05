"""Launcher of encode_records.cu, and what it shares with ring_store's."""

from typing import Any

from ...layouts.formats import RecordFormat, make_record_format
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ..checks import check_encode_records
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from .rope_tables import device_rope_table
from .widths import MAX_PIECE_BYTES, piece_bytes

CHUNK = 8  # elements that a lane loads at once, where head_dim allows
WARPS = 8  # records of a thread block
THREADS = 32 * WARPS


def encode_macros(
    record_format: RecordFormat, rope: Rope | None, store_bytes: int = MAX_PIECE_BYTES
) -> MacroItems:
    """Macros of encode.cuh for a record format and a rotation."""
    return macro_set(
        HEAD_DIM=record_format.head_dim,
        RECORD_MXFP8=int(record_format.type == "mxfp8"),
        SCALE_CEIL=int(record_format.scale_rounding == "ceil"),
        ROPE_DIMS=rope.dims if rope is not None else 0,
        ROPE_ADJACENT=int(rope is not None and rope.pairing == "adjacent"),
        STORE_BYTES=store_bytes,
    )


def _build(
    head_dim: int,
    store_bytes: int,
    rope: tuple[int, str] | None = None,
    record_type: str = "mxfp8",
    scale_rounding: str = "ceil",
) -> MacroItems:
    record_format = make_record_format(record_type, head_dim, scale_rounding=scale_rounding)
    return encode_macros(record_format, rope and Rope(10_000.0, *rope), store_bytes)


ENCODE_BUILDS = (
    _build(512, 16, (64, "adjacent")),  # DeepSeek V4.1
    _build(512, 16),
    _build(512, 16, (64, "half"), scale_rounding="floor"),
    _build(512, 16, (64, "adjacent"), record_type="bf16"),
    _build(64, 2, (16, "adjacent")),  # records of 66 bytes
    _build(96, 1, (24, "half")),  # pairs that do not fit whole lanes
    _build(20, 8, (6, "adjacent"), record_type="bf16"),  # one lane an element
)

PARAMS = ParamsStruct(
    "EncodeParams",
    (
        ("kv", "const uint16_t*"),
        ("positions", "const int32_t*"),
        ("table", "const double*"),
        ("out", "uint8_t*"),
        ("num_tokens", "int64_t"),
        ("record_bytes", "int64_t"),
        ("value_bytes", "int64_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        ("kv", "bf16 [num_tokens, HEAD_DIM]"),
        ("positions", "[num_tokens]; null where ROPE_DIMS is 0"),
        ("table", "[ROPE_TABLE_ROWS, ROPE_DIMS / 2, 2]; null where ROPE_DIMS is 0"),
        ("out", "[num_tokens, record_bytes]"),
    ),
)
ENCODE = KernelSource("encode_records", PARAMS, macro_sets=ENCODE_BUILDS)
KERNELS = (ENCODE,)


def encode_records(
    kv: Any,
    positions: Any,
    out: Any,
    *,
    record_format: RecordFormat,
    rope: Rope | None = None,
    stream: Any = None,
) -> None:
    """kv bf16 [T, D], positions int32 [T] (None without rope) -> out uint8 [T, record_bytes]."""
    check_encode_records(kv, positions, out, record_format, rope)
    check_current_device("encode_records", kv)
    check_kv_alignment("encode_records", kv)

    num_tokens = kv.shape[0]
    grid = (div_ceil(num_tokens, WARPS),)

    store = piece_bytes(record_format.record_bytes, device_pointer(out))
    table = None if rope is None else device_rope_table(rope)
    params = PARAMS.pack(
        kv=device_pointer(kv),
        positions=device_pointer(positions),
        table=device_pointer(table),
        out=device_pointer(out),
        num_tokens=num_tokens,
        record_bytes=record_format.record_bytes,
        value_bytes=record_format.value_bytes,
        amax_floor=record_format.amax_floor or 0.0,
    )

    kernel = get_kernel(ENCODE, encode_macros(record_format, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)


def check_kv_alignment(operation: str, kv: Any) -> None:
    """Where rows are whole 16-byte vectors, they must start at one."""
    if kv.shape[1] % CHUNK == 0:
        check_alignment(operation, "kv", kv, MAX_PIECE_BYTES)
