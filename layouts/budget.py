"""What the caches of one sequence weigh, against the length of its context.

The formula: a layer without a window keeps every record, a layer with one the last `window`:
    hybrid     = sum over layers of record_bytes * (context, or min(context, window))
    all global = sum over layers of record_bytes * context
Beside it stands what is really taken: rings are a little longer than the window (tokens of one
decode step) and padded, pages come in whole blocks.
"""

from dataclasses import dataclass

from .config_types import Config
from .errors import ArgumentError, LayoutError
from .formats import MX_BLOCK, RecordFormat, RecordType, make_record_format
from .paged import max_window_blocks
from .rings import required_ring_len
from .sizes import align_up, div_ceil, is_count

DEFAULT_ALIGN = 32  # bytes; what the packaged layouts pad rings and pages to
DEFAULT_BLOCK = 16  # tokens


@dataclass(frozen=True)
class CacheLayer:
    """A layer's cache; `window` and `ring_len` are None for a global layer."""

    window: int | None
    ring_len: int | None
    record_format: RecordFormat
    sink_tokens: int = 0  # first keys that stay visible beside the window


@dataclass(frozen=True)
class CacheShape:
    """The caches of a model. `state_bytes` is compression state, which does not grow; without
    global layers `block_size` only says how windows would be paged."""

    name: str
    layers: tuple[CacheLayer, ...]
    state_bytes: int
    align_bytes: int
    block_size: int

    @property
    def num_local(self) -> int:
        return sum(layer.window is not None for layer in self.layers)

    @property
    def num_global(self) -> int:
        return len(self.layers) - self.num_local


@dataclass(frozen=True)
class KvBytes:
    """Bytes of one sequence with `context` tokens.

    hybrid_bytes      by the formula, windows as the model has them
    all_global_bytes  by the formula, had no layer a window
    mxfp8_bytes       hybrid_bytes, were all records MXFP8; None where head_dim forbids it
    slot_bytes        the state slot: every ring, padding and compression state
    step_bytes        of these, ring records beyond the window: the tokens of a decode step
    padding_bytes     of these, padding
    num_blocks        blocks of the paged pool, block_bytes each; paged_bytes are all of them
    real_bytes        slot_bytes + paged_bytes: what an engine takes for the sequence
    window_blocks     blocks a local layer would hold if it were paged and freed what falls out of
                      its window (the largest window counts); 0 without local layers
    paged_local_bytes what the local layers would take then, in place of their rings
    """

    context: int
    hybrid_bytes: int
    all_global_bytes: int
    mxfp8_bytes: int | None
    slot_bytes: int
    step_bytes: int
    padding_bytes: int
    num_blocks: int
    block_bytes: int
    paged_bytes: int
    window_blocks: int
    paged_local_bytes: int

    @property
    def real_bytes(self) -> int:
        return self.slot_bytes + self.paged_bytes

    @property
    def saving(self) -> float:
        """How many times less the hybrid takes."""
        return self.all_global_bytes / self.hybrid_bytes


def kv_bytes(cfg: Config, context: int) -> KvBytes:
    """Bytes that one sequence of `context` tokens takes under a configuration; draft layers count.

    `kv_bytes(cfg, n).hybrid_bytes` is the sum over layers of record_bytes * min(n, window), or
    record_bytes * n without a window, and `.all_global_bytes` the sum of record_bytes * n. Raises
    ArgumentError for a context below 1 or what is no integer, and for what is no Config.
    """
    if not isinstance(cfg, Config):
        raise ArgumentError(
            f"kv_bytes: cfg is {type(cfg).__name__}, not a Config; pass what load_config returns"
        )
    return shape_bytes(cache_shape(cfg), context)


def cache_shape(cfg: Config) -> CacheShape:
    """The caches that a configuration describes."""
    layers = tuple(
        CacheLayer(layer.window, layer.ring_len, layer.record_format, layer.sink_tokens)
        for layer in cfg.layers
    )
    slot, paged = cfg.slot_layout, cfg.paged_layout
    state_bytes = sum(ring.bytes for ring in slot.rings if ring.kind == "compression")
    block_size = DEFAULT_BLOCK if paged is None else paged.block_size
    return CacheShape(cfg.name, layers, state_bytes, slot.align_bytes, block_size)


def make_cache_shape(
    name: str,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    local_layers: int,
    window: int,
    record_type: RecordType = "bf16",
    tokens_per_step: int = 1,
    align_bytes: int = DEFAULT_ALIGN,
    block_size: int = DEFAULT_BLOCK,
) -> CacheShape:
    """The caches of `num_layers` layers of grouped-query attention, `local_layers` of them with a
    window. Raises LayoutError for numbers that describe no model."""
    for what, value in (("num_layers", num_layers), ("block_size", block_size)):
        if not is_count(value) or value < 1:
            raise LayoutError(f"cache shape: {what}={value!r} but must be an integer of at least 1")
    if not is_count(local_layers) or not 0 <= local_layers <= num_layers:
        raise LayoutError(
            f"cache shape: local_layers={local_layers!r} but must be 0 .. {num_layers}"
        )
    record = make_record_format(record_type, head_dim, latent=False, num_kv_heads=num_kv_heads)
    local = CacheLayer(window, required_ring_len(window, tokens_per_step), record)
    layers = (local,) * local_layers + (CacheLayer(None, None, record),) * (
        num_layers - local_layers
    )
    return CacheShape(name, layers, 0, align_bytes, block_size)


def shape_bytes(shape: CacheShape, context: int) -> KvBytes:
    """Bytes of one sequence of `context` tokens; see `KvBytes`. Raises as `kv_bytes` does."""
    if not is_count(context) or context < 1:
        raise ArgumentError(f"kv_bytes: context={context!r} but must be an integer of at least 1")
    hybrid = whole = slot = step = padding = paged = window_blocks = paged_local = 0
    mxfp8: int | None = 0
    block_bytes = 0
    for layer in shape.layers:
        record_bytes = layer.record_format.record_bytes
        kept = context if layer.window is None else layer.window + layer.sink_tokens
        seen = min(context, kept)
        hybrid += record_bytes * seen
        whole += record_bytes * context
        small = mxfp8_record_bytes(layer.record_format)
        mxfp8 = None if small is None or mxfp8 is None else mxfp8 + small * seen
        page = align_up(shape.block_size * record_bytes, shape.align_bytes)
        if layer.window is None:
            block_bytes += page
            continue
        used = layer.ring_len * record_bytes
        slot += align_up(used, shape.align_bytes)
        padding += align_up(used, shape.align_bytes) - used
        step += (layer.ring_len - kept) * record_bytes
        blocks = min(
            max_window_blocks(layer.window, shape.block_size), div_ceil(context, shape.block_size)
        )
        window_blocks = max(window_blocks, blocks)
        paged_local += blocks * page
    num_blocks = div_ceil(context, shape.block_size) if block_bytes else 0
    paged = num_blocks * block_bytes
    return KvBytes(
        context=int(context),
        hybrid_bytes=hybrid,
        all_global_bytes=whole,
        mxfp8_bytes=mxfp8,
        slot_bytes=slot + shape.state_bytes,
        step_bytes=step,
        padding_bytes=padding,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        paged_bytes=paged,
        window_blocks=window_blocks,
        paged_local_bytes=paged_local,
    )


def mxfp8_record_bytes(record_format: RecordFormat) -> int | None:
    """Bytes of the same record in MXFP8: a byte a value and one for 32; None where head_dim is no
    multiple of 32."""
    if record_format.head_dim % MX_BLOCK != 0:
        return None
    values = record_format.num_vectors * record_format.head_dim
    return values + values // MX_BLOCK  # exact: checked above


@dataclass(frozen=True)
class Ratio:
    """A split of a model's layers, and the bytes of one sequence by the formula."""

    local_layers: int
    global_layers: int
    hybrid_bytes: int


def smallest_ratio(
    shape: CacheShape, context: int, limit_bytes: int, window: int | None = None
) -> Ratio | None:
    """The split with the fewest local layers that keeps one sequence under `limit_bytes`, for
    layers of the first one's record; None where local layers alone take as much.

    window: of the local layers; None takes the shape's own. Raises LayoutError where it has none.
    """
    windows = [layer.window for layer in shape.layers if layer.window is not None]
    if window is None and not windows:
        raise LayoutError(f"smallest_ratio: {shape.name} has no window; say which one")
    if window is None and len(set(windows)) > 1:
        raise LayoutError(
            f"smallest_ratio: {shape.name} has windows {sorted(set(windows))}; say which one"
        )
    window = windows[0] if window is None else window
    if not is_count(window) or window < 1:
        raise LayoutError(f"smallest_ratio: window={window!r} but must be an integer >= 1")
    shape_bytes(shape, context)  # refuses a context that is none
    record_bytes, total = shape.layers[0].record_format.record_bytes, len(shape.layers)
    for local in range(total + 1):
        used = record_bytes * ((total - local) * context + local * min(context, window))
        if used < limit_bytes:
            return Ratio(local, total - local, used)
    return None
