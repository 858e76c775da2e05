"""What a causal window makes a tiled kernel do: keys that are seen, tiles that are visited.

Pure integers. Queries are aligned at the end of their keys: query i of a sequence sits at position
seqlen_k - seqlen_q + i and sees keys max(0, p - window + 1) .. p, and the first `sink_tokens` keys
up to p. A window of None is all keys up to p.

Query tiles start at the sequence's first query, key tiles at key 0. A pair of tiles is FULL where
each of its queries sees each of its keys (those that exist: the last tiles may be short), EMPTY
where none sees any, else PARTIAL. A query tile visits one range of key tiles for its windows and,
before it, one for the first keys.
"""

from dataclasses import dataclass

from .errors import ArgumentError
from .rings import MAX_POSITION
from .sizes import div_ceil, is_count

MAX_QUERY_TILES = 1 << 20  # they are counted one by one: some seconds


@dataclass(frozen=True)
class TileRange:
    """The key tiles that one query tile visits: 0 .. sink_end - 1, then start .. end - 1, where
    sink_end <= start."""

    sink_end: int
    start: int
    end: int

    @property
    def visited(self) -> int:
        return self.sink_end + self.end - self.start


@dataclass(frozen=True)
class TileCounts:
    """Tiles of one sequence and head. `total` is the whole rectangle's number of tiles."""

    full: int
    partial: int
    empty: int
    total: int

    @property
    def visited(self) -> int:
        """Tiles inside the loop bounds; `empty` of them would be loaded to be masked whole."""
        return self.full + self.partial + self.empty

    @property
    def sparsity(self) -> float:
        """Share of the rectangle that is not visited, in percent; 0 where there are no tiles."""
        return 100.0 * (1.0 - self.visited / self.total) if self.total else 0.0


def count_tiles(
    seqlen_q: int,
    seqlen_k: int,
    *,
    window: int | None,
    block_m: int,
    block_n: int,
    sink_tokens: int = 0,
) -> TileCounts:
    """Tiles of `block_m` queries x `block_n` keys that attention visits, by kind.

    `count_tiles(1000, 1000, window=128, block_m=64, block_n=64)` is 15 full and 30 partial. EMPTY
    is 0 for every shape: the loop bounds leave out what is masked whole. Raises ArgumentError for
    a window or a tile size below 1, a negative length, a number past 2^31 - 1, more than 2^20 query
    tiles, or what is no integer.
    """
    _check_shape(seqlen_q, seqlen_k, window, sink_tokens)
    _check_count("block_m", block_m, 1)
    _check_count("block_n", block_n, 1)
    if div_ceil(seqlen_q, block_m) > MAX_QUERY_TILES:
        raise ArgumentError(
            f"count_tiles: seqlen_q={seqlen_q} in tiles of block_m={block_m} are more than "
            f"{MAX_QUERY_TILES} query tiles"
        )
    full = visited = seen = 0
    for first in range(0, seqlen_q, block_m):
        last = min(first + block_m, seqlen_q) - 1
        first_position = seqlen_k - seqlen_q + first
        last_position = seqlen_k - seqlen_q + last
        keys = key_tiles(first_position, last_position, window, block_n, sink_tokens)
        visited += keys.visited
        seen += _seen_tiles(first_position, last_position, window, block_n, sink_tokens)
        full += _full_tiles(
            keys, first_position, last_position, seqlen_k, window, block_n, sink_tokens
        )
    total = div_ceil(seqlen_q, block_m) * div_ceil(seqlen_k, block_n)
    return TileCounts(full, seen - full, visited - seen, total)


def key_tiles(
    first_position: int,
    last_position: int,
    window: int | None,
    block_n: int,
    sink_tokens: int = 0,
) -> TileRange:
    """The loop bounds of a query tile whose queries sit at first_position .. last_position: what
    the kernels compute on the device."""
    if last_position < 0:
        return TileRange(0, 0, 0)
    start = _oldest(first_position, window) // block_n  # the tile that holds that key
    end = last_position // block_n + 1  # past the tile that holds the last key
    return TileRange(min(div_ceil(sink_tokens, block_n), start), start, end)


def visible_keys(position: int, *, window: int | None, sink_tokens: int = 0) -> int:
    """Number of keys that a query at `position` sees: min(position + 1, window), and the first
    keys that lie before them. 0 for a negative position, which stands before all keys."""
    _check_shape(0, 0, window, sink_tokens)
    if position < 0:
        return 0
    oldest = _oldest(position, window)
    return position + 1 - oldest + min(sink_tokens, oldest)


def count_scores(seqlen_q: int, seqlen_k: int, *, window: int | None, sink_tokens: int = 0) -> int:
    """Sum of `visible_keys` over a sequence's queries: the scores that a head needs.

    `count_scores(512, 512, window=64)` is 30,752.
    """
    _check_shape(seqlen_q, seqlen_k, window, sink_tokens)
    start, end = max(seqlen_k - seqlen_q, 0), seqlen_k
    if end <= start:
        return 0
    causal = _sum_below(end + 1) - _sum_below(start + 1)  # sum of position + 1
    if window is None:
        return causal
    # The oldest visible key of a position p is max(0, p - window + 1); so many keys are lost.
    lost = _sum_below(max(end - window + 1, 0)) - _sum_below(max(start - window + 1, 0))
    return causal - lost + _kept_sinks(start, end, window, sink_tokens)


def stacked_reach(windows: tuple[int | None, ...], seqlen: int) -> int:
    """Number of newest tokens, itself included, that the last token's output can depend on after
    layers of these windows: each layer adds window - 1, a layer without a window adds all."""
    reach = 1
    for window in windows:
        _check_shape(seqlen, seqlen, window, 0)
        reach = seqlen if window is None else min(seqlen, reach + window - 1)
    return min(reach, seqlen)


def _oldest(position: int, window: int | None) -> int:
    """First key of the window of a query, 0 where there is no window."""
    return 0 if window is None else max(0, position - window + 1)


def _sum_below(n: int) -> int:
    """0 + 1 + .. + (n - 1)."""
    return n * (n - 1) // 2  # exact: one of two neighbours is even


def _kept_sinks(start: int, end: int, window: int, sink_tokens: int) -> int:
    """Sum over positions start .. end - 1 of min(sink_tokens, oldest key of the window)."""
    first, last = max(start - window + 1, 0), max(end - window + 1, 0)  # oldest keys, half open
    turn = min(max(sink_tokens, first), last)  # from here on all first keys lie before the window
    return _sum_below(turn) - _sum_below(first) + (last - turn) * sink_tokens


def _seen_tiles(
    first_position: int, last_position: int, window: int | None, block_n: int, sink_tokens: int
) -> int:
    """Key tiles that hold a key which a query of the tile sees, from the keys themselves: the
    union of the windows is one range, and the first keys another."""
    if last_position < 0:
        return 0
    oldest = _oldest(max(first_position, 0), window)
    in_window = last_position // block_n - oldest // block_n + 1  # both tiles hold such a key
    first_keys = min(sink_tokens, oldest)
    in_sinks = div_ceil(first_keys, block_n)
    shared = in_sinks > 0 and in_sinks > oldest // block_n  # one tile holds both kinds
    return in_window + in_sinks - int(shared)


def _full_tiles(
    keys: TileRange,
    first_position: int,
    last_position: int,
    seqlen_k: int,
    window: int | None,
    block_n: int,
    sink_tokens: int,
) -> int:
    """Visited tiles of which every query sees every key."""
    if first_position < 0:
        return 0  # that query sees nothing
    # Tiles before the first query's own position (or up to the end of the keys): causal.
    past = first_position + 1
    end = keys.end if past >= seqlen_k else min(keys.end, past // block_n)
    oldest = _oldest(last_position, window)  # the last query's window starts last
    sinks = min(sink_tokens // block_n, keys.sink_end)  # tiles of first keys only
    if sink_tokens >= oldest:
        return sinks + max(end - keys.start, 0)
    in_window = max(end - max(keys.start, div_ceil(oldest, block_n)), 0)
    both = max(min(end, sink_tokens // block_n) - keys.start, 0)
    return sinks + in_window + both


def _check_shape(seqlen_q: int, seqlen_k: int, window: int | None, sink_tokens: int) -> None:
    _check_count("seqlen_q", seqlen_q, 0)
    _check_count("seqlen_k", seqlen_k, 0)
    _check_count("sink_tokens", sink_tokens, 0)
    if window is not None:
        _check_count("window", window, 1)


def _check_count(name: str, value: int, least: int) -> None:
    if not is_count(value) or not least <= value <= MAX_POSITION + 1:
        raise ArgumentError(
            f"count_tiles: {name}={value!r} but must be an integer in {least} .. {MAX_POSITION + 1}"
        )
