"""Shapes of window_attention that its tests share, and how they are run and judged."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from helpers import Guarded, i32, to_backend

from ringslab.layouts.tiles import count_scores, count_tiles
from ringslab.rawkernels.cuda import window_attention as launcher
from ringslab.rawkernels.operations import operation
from ringslab.rawkernels.reference.bound import assert_within_bound, expected_attention

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
SPARE_ROWS = 3  # of k and v behind the last sequence, all NaN


@dataclass(frozen=True)
class Case:
    """`sequences`: (seqlen_q, seqlen_k) of each sequence, in batch order."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    softcap: float = 0.0
    sink: bool = False
    sink_tokens: int = 0
    dtype: np.dtype = BF16
    spread: float = 1.0  # standard deviation of q

    def __str__(self):
        return self.name

    @property
    def options(self):
        """Scalar options of the operation."""
        names = ("window", "softcap", "sink_tokens")
        return {"softmax_scale": self.head_dim**-0.5} | {n: getattr(self, n) for n in names}


RAGGED = ((70, 70), (0, 5), (1, 130), (33, 64), (0, 0), (5, 3), (3, 0), (64, 65))
CASES = (
    Case("causal", ((130, 130),)),
    Case("one_token", ((1, 1),), heads=1),
    Case("nothing", ((0, 4), (0, 0)), window=3),
    Case("window_1", ((70, 70),), window=1, sink=True),
    Case("window_2", ((70, 70),), window=2),
    Case("window_63", ((200, 200),), window=63),
    Case("window_64", ((200, 200),), window=64),
    Case("window_100_of_500", ((500, 500),), window=100),
    Case("window_128_of_500", ((500, 500),), window=128),
    Case("window_10000_of_500", ((500, 500),), window=10_000),
    Case("chunk_of_600", ((96, 600),), window=128, heads=4, kv_heads=2),
    Case("decode_of_600", ((1, 600),), window=128, heads=4, kv_heads=2),
    Case("decode_of_600_causal", ((1, 600),), heads=8, kv_heads=2, sink=True),
    Case("ragged", RAGGED, window=40, heads=6, kv_heads=2, sink=True, sink_tokens=5),
    Case("ragged_causal", RAGGED, heads=3, kv_heads=3, softcap=3.0, sink_tokens=5),
    Case("more_queries_than_keys", ((20, 5), (70, 3), (9, 1)), heads=2),
    Case("more_queries_windowed", ((20, 5), (70, 3)), window=2, sink=True, sink_tokens=1),
    Case("ragged_fp16", RAGGED, window=40, heads=6, kv_heads=2, sink=True, dtype=FP16),
    Case("sink_tokens_4", ((300, 300),), window=100, sink_tokens=4),
    Case("sink_tokens_past_a_tile", ((260, 260), (7, 200)), window=33, sink_tokens=70),
    Case("sink_tokens_past_the_window", ((150, 150),), window=20, sink_tokens=149, sink=True),
    Case("sink_tokens_all", ((90, 90),), window=7, sink_tokens=1000),
    Case("softcap_50", ((130, 130),), window=65, softcap=50.0, spread=40.0),
    Case("softcap_fp16", ((70, 130),), softcap=5.0, dtype=FP16, spread=10.0),
    Case("large_scores", ((130, 130),), window=100, spread=60.0, sink=True),
    Case("group_3", ((40, 90),), window=50, heads=6, kv_heads=2, head_dim=64),
    Case("group_5", ((30, 90),), window=50, heads=5, head_dim=96),
    Case("group_8_sinks", ((70, 200),), window=128, heads=16, kv_heads=2, sink=True),
    Case("group_16", ((9, 70),), window=50, heads=16, head_dim=64),
    Case("group_24", ((5, 70),), window=50, heads=24, head_dim=64, sink=True),
    Case("head_dim_96", ((90, 90), (1, 40)), window=33, head_dim=96, heads=4, kv_heads=4),
    Case("head_dim_128", ((70, 140),), window=100, head_dim=128, heads=4),
    Case("head_dim_128_fp16", ((70, 140),), window=100, head_dim=128, heads=4, dtype=FP16),
    Case("head_dim_256", ((70, 80),), window=40, head_dim=256, heads=2, sink_tokens=3),
    Case("head_dim_256_capped", ((40, 80),), head_dim=256, softcap=50.0, dtype=FP16),
)

# What the debug build of the portable kernel counts the tiles of.
COUNTED = (
    Case("causal", ((200, 200),), heads=4, kv_heads=1, head_dim=128),
    Case("window_100", ((330, 330),), window=100, heads=1),
    Case("window_1", ((130, 130),), window=1, heads=2, kv_heads=2),
    Case("sinks", ((200, 330),), window=70, heads=2, sink_tokens=4),
    Case("many_sinks", ((100, 200),), window=40, heads=5, sink_tokens=100),
    Case("decode", ((1, 600), (1, 130)), window=128, heads=8),
    Case("ragged", RAGGED, window=40, heads=3, sink_tokens=5),
    Case("wide_head", ((70, 100),), window=33, head_dim=256),
    # Query 62 misses one key of tile 0, and query 189 the other one.
    Case("off_by_one", ((130, 192),), window=189, heads=1),
)


def assert_counts(counts, case):
    """counts [5] of the debug build are those of count_tiles for the kernel's tile, once a KV head
    and part of a group; the pairs are the visible ones, so no unmasked tile had a hidden one."""
    group = case.heads // case.kv_heads
    pack = launcher.pack_of(group)
    shape = {"window": case.window, "sink_tokens": case.sink_tokens}
    tile = {"block_m": launcher.BLOCK_ROWS // pack, "block_n": launcher.key_tile(case.head_dim)}
    found = [count_tiles(q, k, **shape, **tile) for q, k in case.sequences]
    blocks = case.kv_heads * -(-group // pack)
    wanted = [sum(getattr(x, kind) for x in found) for kind in ("full", "partial", "empty")]
    full, partial, empty, unmasked, pairs = (int(number) for number in counts)
    assert [full, partial, empty] == [blocks * number for number in wanted]
    assert empty == 0
    # A FULL tile is masked all the same where the keys end inside it.
    assert 0 <= full - unmasked <= blocks * len(case.sequences)
    assert pairs == case.heads * sum(count_scores(q, k, **shape) for q, k in case.sequences)


@dataclass(frozen=True)
class Inputs:
    """Host arrays of a case."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    sink: np.ndarray | None

    @property
    def arrays(self):
        return self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k


def ends_of(lengths):
    return i32(np.concatenate([[0], np.cumsum(i32(lengths))]))


def case_inputs(case, seed=0):
    rng = np.random.default_rng(seed)
    seqlens_q, seqlens_k = zip(*case.sequences, strict=True)
    rows, keys = sum(seqlens_q), sum(seqlens_k)
    q = rng.standard_normal((rows, case.heads, case.head_dim), np.float32) * case.spread
    kv = rng.standard_normal((2, keys + SPARE_ROWS, case.kv_heads, case.head_dim), np.float32)
    kv[:, keys:] = np.nan
    sink = rng.standard_normal(case.heads).astype(np.float32) * 2 if case.sink else None
    k, v = kv.astype(case.dtype)
    ends = ends_of(seqlens_q), ends_of(seqlens_k)
    return Inputs(q.astype(case.dtype), k, v, *ends, sink)


def bits_dtype(x):
    """Of an output for such a q: bf16 is handed over as its bits."""
    return np.uint16 if x.dtype == BF16 else x.dtype


def run_attention(backend, arrays, *, sink=None, function=None, **options):
    """window_attention of a backend (or `function`) with guarded, poisoned outputs; host arrays in
    and out."""
    q = arrays[0]
    out = Guarded(q.shape, bits_dtype(q), backend)
    lse = Guarded(q.shape[:2], np.float32, backend)
    function = function or operation(backend, "window_attention")
    arrays = (to_backend(x, backend) for x in arrays)
    function(*arrays, out.array, lse.array, sink=to_backend(sink, backend), **options)
    return out.host(), lse.host()


def check_attention(backend, arrays, *, sink=None, function=None, **options):
    """Run and hold to the bound; returns (out, lse). The kernel runs before the reference."""
    out, lse = run_attention(backend, arrays, sink=sink, function=function, **options)
    expected = expected_attention(*arrays, sink=sink, **options)
    assert_within_bound(out, lse, expected, f"window_attention on {backend}")
    return out, lse
