"""Record formats: what the bytes of one token in one ring mean.

A format is data. Its fields are stated (in YAML) and derived (here); the two must agree.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import LayoutError
from .sizes import div_exact, is_count, is_flag, is_real, is_word

E4M3_MAX = 448.0  # largest finite E4M3 magnitude, byte 0x7E
E4M3_NAN_BYTE = 0x7F
E8M0_BIAS = 127  # scale byte c means 2^(c - 127)
E8M0_NAN_BYTE = 0xFF
E8M0_MAX_CODE = 254  # scale byte of a block that holds an infinity
MX_BLOCK = 32  # values that share one scale byte
RECORD_ALIGN = 16  # bytes; kernels move records in pieces of 16
MAX_EXTENT = 1 << 20  # of head_dim and num_kv_heads; far above any model, so a slip is told

FieldType = Literal["e4m3", "e8m0", "bf16", "fp16"]
FIELD_TYPE_BYTES = {"e4m3": 1, "e8m0": 1, "bf16": 2, "fp16": 2}
RecordType = Literal["mxfp8", "bf16", "fp16"]
PlaneOrder = Literal["interleaved", "planar"]
ScaleRounding = Literal["ceil", "floor"]


@dataclass(frozen=True)
class Field:
    """One run of equal elements inside a record; `offset` in bytes from the record's start."""

    id: str
    type: FieldType
    shape: tuple[int, ...]
    offset: int
    doc: str

    @property
    def bytes(self) -> int:
        size = FIELD_TYPE_BYTES[self.type]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class RecordFormat:
    """The bytes of one token in one ring.

    `latent`: K = V, one vector of `head_dim` a token serves all query heads (num_kv_heads is 1).
    Otherwise K and V lie one after the other, `num_kv_heads * head_dim` elements each.
    `plane_order` says how a *ring* holds the records: `interleaved` keeps each record whole;
    `planar` puts the value bytes of all records first (K's, then V's, of each) and their scale
    bytes behind. A record on its own (in a buffer) is always whole: its parts one after the other,
    each its values, then its scales.
    `scale_rounding` and `amax_floor` are None but for mxfp8.
    """

    id: str
    type: RecordType
    plane_order: PlaneOrder
    latent: bool
    num_kv_heads: int
    head_dim: int
    scale_rounding: ScaleRounding | None
    amax_floor: float | None
    record_bytes: int
    fields: tuple[Field, ...]

    @property
    def num_vectors(self) -> int:
        """Vectors of `head_dim` in a record: 1 latent, or K and V of each KV head."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def value_bytes(self) -> int:
        """Bytes of a record that are values (all of it, where it has no scales)."""
        return self.num_vectors * self.head_dim * (1 if self.type == "mxfp8" else 2)

    @property
    def scale_bytes(self) -> int:
        return self.record_bytes - self.value_bytes

    @property
    def num_parts(self) -> int:
        """Parts of a record, each with its values and then its scales: 1 latent, or K and V."""
        return 1 if self.latent else 2

    @property
    def part_bytes(self) -> int:
        return div_exact(self.record_bytes, self.num_parts)

    @property
    def part_value_bytes(self) -> int:
        return div_exact(self.value_bytes, self.num_parts)

    @property
    def part_scale_bytes(self) -> int:
        return div_exact(self.scale_bytes, self.num_parts)


def derive_fields(
    record_type: RecordType, *, latent: bool, num_kv_heads: int, head_dim: int
) -> tuple[Field, ...]:
    """The fields of a record in their order, with offsets; docs are left empty.

    Raises LayoutError for an unknown type, for sizes that are no integers in 1 .. 2^20, for a
    latent record of several KV heads, and where mxfp8 is asked for a head_dim that is no multiple
    of 32.
    """
    if not is_word(record_type, get_args(RecordType)):
        known = ", ".join(get_args(RecordType))
        raise LayoutError(f"record type {record_type!r} is unknown; use one of {known}")
    if not all(is_count(n) and 1 <= n <= MAX_EXTENT for n in (head_dim, num_kv_heads)):
        raise LayoutError(
            f"record type {record_type}: head_dim={head_dim!r} num_kv_heads={num_kv_heads!r} but "
            f"both must be integers, at least 1 and at most {MAX_EXTENT}"
        )
    if not is_flag(latent):
        raise LayoutError(f"record type {record_type}: latent={latent!r} but must be True or False")
    if latent and num_kv_heads != 1:
        raise LayoutError(
            f"record type {record_type}: num_kv_heads={num_kv_heads} but a latent record is one "
            "vector, so it must be 1"
        )
    if record_type == "mxfp8" and head_dim % MX_BLOCK != 0:
        raise LayoutError(
            f"record type mxfp8: head_dim={head_dim} leaves {head_dim % MX_BLOCK} values after "
            f"blocks of {MX_BLOCK}; use a multiple of {MX_BLOCK}"
        )
    element = "e4m3" if record_type == "mxfp8" else record_type
    rows = () if latent else (num_kv_heads,)
    runs: list[tuple[str, str, tuple[int, ...]]] = []
    for name in ("kv",) if latent else ("k", "v"):
        runs.append((f"{name}_values", element, (*rows, head_dim)))
        if record_type == "mxfp8":
            runs.append((f"{name}_scales", "e8m0", (*rows, div_exact(head_dim, MX_BLOCK))))
    fields, offset = [], 0
    for name, element_type, shape in runs:
        fields.append(Field(name, element_type, shape, offset, ""))
        offset += fields[-1].bytes
    return tuple(fields)


def make_record_format(
    record_type: RecordType,
    head_dim: int,
    *,
    id: str = "",
    plane_order: PlaneOrder = "interleaved",
    latent: bool = True,
    num_kv_heads: int = 1,
    scale_rounding: ScaleRounding = "ceil",
    amax_floor: float = 1e-4,
) -> RecordFormat:
    """A record format with derived fields. `make_record_format("mxfp8", 512)` is V4.1's window
    record: 512 E4M3 bytes, 16 E8M0 bytes, 528 in all. Raises LayoutError as `derive_fields` does,
    and for a planar record without scales and an unknown order or scale rule."""
    fields = derive_fields(record_type, latent=latent, num_kv_heads=num_kv_heads, head_dim=head_dim)
    mx = record_type == "mxfp8"
    for name, value, words in (
        ("plane_order", plane_order, get_args(PlaneOrder)),
        ("scale_rounding", scale_rounding, get_args(ScaleRounding)),
    ):
        if not is_word(value, words):
            raise LayoutError(f"{name}={value!r} but must be one of {', '.join(words)}")
    if not is_real(amax_floor) or not 0.0 <= amax_floor <= E4M3_MAX:
        raise LayoutError(f"amax_floor={amax_floor!r} but must be a number in 0 .. {E4M3_MAX}")
    if not isinstance(id, str):
        raise LayoutError(f"id={id!r} but must be text")
    if plane_order == "planar" and not mx:
        raise LayoutError(
            f"record type {record_type} has no scales; plane_order='planar' needs them"
        )
    return RecordFormat(
        id=id or record_type,
        type=record_type,
        plane_order=plane_order,
        latent=latent,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale_rounding=scale_rounding if mx else None,
        amax_floor=float(amax_floor) if mx else None,
        record_bytes=fields[-1].offset + fields[-1].bytes,
        fields=fields,
    )
