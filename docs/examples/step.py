"""What the examples beside this file share: inputs, and one decode step of one layer.

`decode_step` is the same for every array library. What differs, and what each example shows, is
where the arrays live and in which order of things (stream) they are filled and read.
"""

import base64
import hashlib
import json
from typing import Any

import numpy as np

import ringslab as rs

STATE_ID, NUM_STATE_SLOTS, LAYER = 3, 4, 0
NUM_KNOWN, NUM_NEW = 30, 2  # tokens of the sequence: stored before, and of this step


def make_inputs(cfg: Any) -> dict[str, np.ndarray]:
    """Random bf16 bits (below 2.0 in magnitude) and the ids that go with them, on the host."""
    rng = np.random.default_rng(7)

    def bits(*shape: int) -> np.ndarray:
        values = rng.uniform(-2, 2, shape).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    known = np.arange(NUM_KNOWN, dtype=np.int32)
    new = np.arange(NUM_KNOWN, NUM_KNOWN + NUM_NEW, dtype=np.int32)
    return {
        "known_kv": bits(NUM_KNOWN, cfg.head_dim),
        "known_positions": known,
        "known_states": np.full_like(known, STATE_ID),
        "q": bits(NUM_NEW, cfg.num_q_heads, cfg.head_dim),
        "kv": bits(NUM_NEW, cfg.head_dim),
        "positions": new,
        "states": np.full_like(new, STATE_ID),
    }


def decode_step(
    cfg: Any, slab: Any, arrays: dict[str, Any], out: Any, lse: Any, stream: Any = None
) -> None:
    """Stores the sequence's tokens, then lets the new ones attend to their window.

    slab: flat uint8. arrays: those of `make_inputs`, of any library, all in the slab's memory.
    out: bf16 bits like arrays["q"]; lse: float32 [tokens, heads]. Both are filled, nothing is
    copied; on a GPU everything is queued on `stream`, and nothing waits for it.
    """
    layer, layout = cfg.layers[LAYER], cfg.slot_layout
    for name, kv in (("known_", "known_kv"), ("", "kv")):
        ids = arrays[f"{name}states"], arrays[f"{name}positions"]
        rs.ring_store(slab, layout, LAYER, arrays[kv], *ids, rope=layer.rope, stream=stream)
    plan = rs.plan_decode(
        arrays["states"],
        arrays["positions"],
        window=layer.window,
        ring_len=layer.ring_len,
        max_seqlen_q=1,
        stream=stream,
    )
    q = rs.apply_rope(arrays["q"], arrays["positions"], layer.rope, stream=stream)
    scale = layer.softmax_scale
    rs.window_decode(
        q, slab, layout, LAYER, plan, softmax_scale=scale, out=out, lse=lse, stream=stream
    )


def report(library: str, slab: np.ndarray, out: np.ndarray, same_memory: dict[str, bool]) -> None:
    """One line of JSON: which memory was shared, and what was computed, from host copies."""
    assert all(same_memory.values()), f"{library}: copied: {same_memory}"
    found = {
        "library": library,
        "same_memory": same_memory,
        "slab_sha256": hashlib.sha256(slab.tobytes()).hexdigest(),
        "out_bf16": base64.b64encode(out.view(np.uint16).tobytes()).decode(),
    }
    print(json.dumps(found))
