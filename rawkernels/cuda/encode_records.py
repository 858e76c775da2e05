"""Launcher of encode_records.cu, and what it shares with ring_store's and paged_store's."""

from typing import Any

from ...layouts.formats import RecordFormat, make_record_format
from ...layouts.rope import Rope
from ...layouts.sizes import div_ceil
from ..device.kernel_source import KernelSource, MacroItems, ParamsStruct, macro_set
from ..device.module import check_alignment, check_current_device, device_pointer, get_kernel
from ..record_checks import check_encode_records, kv_places
from .rope_tables import device_rope_table
from .widths import MAX_PIECE_BYTES, piece_bytes

CHUNK = 8  # elements that a lane loads at once, where head_dim allows
WARPS = 8  # parts of records of a thread block
THREADS = 32 * WARPS


def encode_macros(
    record_format: RecordFormat, rope: Rope | None, store_bytes: int = MAX_PIECE_BYTES
) -> MacroItems:
    """Macros of encode.cuh for a record format and a rotation."""
    return macro_set(
        HEAD_DIM=record_format.head_dim,
        KV_HEADS=record_format.num_kv_heads,
        PARTS=record_format.num_parts,
        RECORD_MXFP8=int(record_format.type == "mxfp8"),
        VALUES_FP16=int(record_format.type == "fp16"),
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
    kv_heads: int = 0,
) -> MacroItems:
    record_format = make_record_format(
        record_type,
        head_dim,
        scale_rounding=scale_rounding,
        latent=kv_heads == 0,
        num_kv_heads=kv_heads or 1,
    )
    return encode_macros(record_format, rope and Rope(10_000.0, *rope), store_bytes)


GQA_BUILDS = (
    _build(128, 16, (128, "half"), kv_heads=8),  # Mistral 7B
    _build(128, 16, (128, "half"), record_type="bf16", kv_heads=16),  # Gemma
    _build(64, 16, (64, "half"), kv_heads=8),  # gpt-oss
    _build(256, 16, (256, "adjacent"), record_type="fp16", kv_heads=16),  # a part in many turns
    _build(80, 16, (20, "half"), record_type="fp16", kv_heads=3),
)
LATENT_BUILDS = (
    _build(512, 16, (64, "adjacent")),  # DeepSeek V4.1
    _build(512, 16),
    _build(512, 16, (64, "half"), scale_rounding="floor"),
    _build(512, 16, (64, "adjacent"), record_type="bf16"),
    _build(64, 2, (16, "adjacent")),  # records of 66 bytes
    _build(96, 1, (24, "half")),  # pairs that do not fit whole lanes
    _build(20, 8, (6, "adjacent"), record_type="bf16"),  # one lane an element
)
ENCODE_BUILDS = (*LATENT_BUILDS, *GQA_BUILDS)

VECTOR_DOCS = (
    ("k", "[num_tokens, KV_HEADS, HEAD_DIM]; the vectors themselves of latent records"),
    ("v", "like k; null for latent records"),
    ("table", "[ROPE_TABLE_ROWS, ROPE_DIMS / 2, 2]; null where ROPE_DIMS is 0"),
)
PARAMS = ParamsStruct(
    "EncodeParams",
    (
        ("k", "const uint16_t*"),
        ("v", "const uint16_t*"),
        ("positions", "const int32_t*"),
        ("table", "const double*"),
        ("out", "uint8_t*"),
        ("num_tokens", "int64_t"),
        ("part_bytes", "int64_t"),
        ("value_bytes", "int64_t"),
        ("amax_floor", "float"),
    ),
    docs=(
        *VECTOR_DOCS,
        ("positions", "[num_tokens]; null where ROPE_DIMS is 0"),
        ("out", "[num_tokens, PARTS * part_bytes]"),
        ("value_bytes", "of one part"),
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
    """kv bf16 [T, D], or (k, v) of bf16 or float16 [T, H, D] each; positions int32 [T] (None
    without rope) -> out uint8 [T, record_bytes]."""
    num_tokens = check_encode_records(kv, positions, out, record_format, rope)
    check_current_device("encode_records", out)
    check_kv_alignment("encode_records", kv)

    grid = encode_grid(record_format, num_tokens)

    store = piece_bytes(record_format.part_bytes, device_pointer(out))
    params = PARAMS.pack(
        **encode_values(record_format, kv, positions, rope, num_tokens),
        out=device_pointer(out),
        part_bytes=record_format.part_bytes,
        value_bytes=record_format.part_value_bytes,
    )

    kernel = get_kernel(ENCODE, encode_macros(record_format, rope, store))
    kernel.launch(grid, (THREADS,), params, stream)


def check_kv_alignment(operation: str, kv: Any) -> None:
    """Where rows are whole 16-byte vectors, they must start at one."""
    for name, part in kv_places(kv).items():
        if part.shape[-1] % CHUNK == 0:
            check_alignment(operation, name, part, MAX_PIECE_BYTES)


def encode_grid(fmt: RecordFormat, num_tokens: int) -> tuple[int]:
    """One warp a part of a record."""
    return (div_ceil(num_tokens * fmt.num_parts, WARPS),)


def encode_values(
    fmt: RecordFormat, kv: Any, positions: Any, rope: Rope | None, num_tokens: int
) -> dict[str, Any]:
    """Values of the fields that say what is encoded, and how."""
    k, v = kv if isinstance(kv, tuple) else (kv, None)
    table = None if rope is None else device_rope_table(rope)
    return {
        "k": device_pointer(k),
        "v": device_pointer(v),
        "positions": device_pointer(positions),
        "table": device_pointer(table),
        "num_tokens": num_tokens,
        "amax_floor": fmt.amax_floor or 0.0,
    }
