"""What window_decode_gqa and paged_decode share of their parameters: fields, docs and values."""

from typing import Any

from ...layouts.formats import RecordFormat
from ...layouts.sizes import div_ceil, div_exact
from ..device.module import device_pointer
from .gqa_shapes import Cut, parts_of, score_numbers
from .gqa_workspace import split_workspace

# A launcher's own fields lie before ARRAY_FIELDS (q and what finds the keys) and NUMBER_FIELDS.
ARRAY_FIELDS = (
    ("sink", "const float*"),
    ("out", "uint16_t*"),
    ("lse", "float*"),
    ("partials", "float*"),
    ("counters", "uint32_t*"),
)
NUMBER_FIELDS = (
    ("num_q_heads", "int32_t"),
    ("group", "int32_t"),
    ("head_groups", "int32_t"),
    ("row_groups", "int32_t"),
    ("splits", "int32_t"),
    ("num_parts", "int32_t"),
    ("score_factor", "float"),
    ("cap", "float"),
)
SHARED_DOCS = (
    ("q", "[num_tokens, num_q_heads, HEAD_DIM]"),
    ("sink", "[num_q_heads], may be null"),
    ("out", "[num_tokens, num_q_heads, HEAD_DIM]"),
    ("lse", "[num_tokens, num_q_heads]"),
    ("partials", "[blocks / splits, HEADS, num_parts, STATE_WORDS, 32]; null with one split"),
    ("counters", "[blocks / splits], 0 before and after; null with one split"),
    ("group", "query heads of a KV head"),
    ("head_groups", "NUM_KV_HEADS / HEADS"),
    ("splits", "blocks that share the parts of a sequence"),
    ("score_factor", "softmax_scale * log2(e); with a softcap 2 / softcap of it"),
    ("cap", "softcap * log2(e)"),
)


def shared_values(
    fmt: RecordFormat,
    cut: Cut,
    q: Any,
    out: Any,
    lse: Any,
    *,
    num_runs: int,
    run_tokens: int,
    max_length: int,
    softmax_scale: float,
    softcap: float,
    sink: Any,
    stream: Any,
    scratch: Any,
) -> tuple[int, dict[str, Any]]:
    """Units of work, each of cut.splits thread blocks, and the values of q and the fields above.

    q, out [T, H, D], lse [T, H]. A unit is some heads and rows of one of `num_runs` runs, of at
    most `run_tokens` tokens of a sequence; `max_length` counts the longest list of keys.
    `stream` and `scratch`: see `split_workspace`.
    """
    num_q_heads = q.shape[1]
    group = div_exact(num_q_heads, fmt.num_kv_heads)
    head_groups = div_exact(fmt.num_kv_heads, cut.heads)
    row_groups = div_ceil(group * run_tokens, 8 * cut.row_tiles)
    units, num_parts = num_runs * row_groups * head_groups, parts_of(max_length)
    partials, counters = split_workspace(fmt, cut, units, num_parts, stream, scratch)
    factor, cap = score_numbers(softmax_scale, softcap)
    return units, {
        "q": device_pointer(q),
        "sink": device_pointer(sink),
        "out": device_pointer(out),
        "lse": device_pointer(lse),
        "partials": device_pointer(partials),
        "counters": device_pointer(counters),
        "num_q_heads": num_q_heads,
        "group": group,
        "head_groups": head_groups,
        "row_groups": row_groups,
        "splits": cut.splits,
        "num_parts": num_parts,
        "score_factor": factor,
        "cap": cap,
    }
