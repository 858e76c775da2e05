"""The prefix cache in a run: what its snapshots depend on there, and what the report says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..layouts.sizes import div_ceil
from .tokens import HASH_BLOCK_TOKENS


@contextmanager
def prefix_of_run(engine: Any) -> Iterator[None]:
    """Inside, the keys of a run: its activations are functions of seed, layer, token and position.
    Then those of the engine's caller again. No request may be live before or after."""
    if engine.prefix is None:
        yield
        return
    run, words = engine.cfg.run, engine.prefix.words
    engine.prefix.depend_on("run", run.activations, str(run.seed))
    engine.prefix.reset_counters()
    engine.prefix.planner.seen = set()
    try:
        yield
    finally:
        engine.prefix.planner.seen = None
        engine.prefix.depend_on(*words)


def settle_prefix(engine: Any) -> None:
    """Waits until all snapshots are with the store, so that it has counted them."""
    if engine.prefix is not None:
        engine.prefix.flush()


def prefix_report(engine: Any, prompt_lens: list[int]) -> dict[str, Any]:
    """`prompt_blocks` of all requests, partial ones included, and what was had of the cache."""
    cache = engine.prefix
    size = HASH_BLOCK_TOKENS if cache is None else cache.config.block_size
    blocks = sum(div_ceil(length, size) for length in prompt_lens)
    if cache is None:
        return {"prompt_blocks": blocks, "hit_blocks": 0}
    found = cache.as_report()
    best = found["best_blocks"]
    return {
        "prompt_blocks": blocks,
        **found,
        "hit_rate": found["hit_blocks"] / blocks,
        "best_rate": best / blocks,
        "share_of_best": found["hit_blocks"] / best if best else None,
    }
