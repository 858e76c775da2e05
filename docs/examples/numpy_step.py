"""A decode step on NumPy arrays, without copies: python docs/examples/numpy_step.py

The slab is the caller's own memory, here an anonymous mapping that a child process could share.
Calls on the host are done when they return: there are no streams and no lifetimes to keep.
"""

import mmap

import ml_dtypes
import numpy as np
from step import LAYER, NUM_STATE_SLOTS, STATE_ID, decode_step, make_inputs, report

import ringslab as rs
from ringslab.layouts.structs import slot_dtype


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def main() -> None:
    cfg = rs.load_config("quickstart.yaml")
    layout = cfg.slot_layout
    # A page begins at a multiple of 4,096 bytes; a slab needs 256.
    memory = mmap.mmap(-1, NUM_STATE_SLOTS * layout.slot_bytes)
    slab = np.frombuffer(memory, np.uint8)
    arrays = make_inputs(cfg)
    # bf16 comes as its uint16 bits or as ml_dtypes.bfloat16: a view, whichever you have.
    arrays["q"] = arrays["q"].view(ml_dtypes.bfloat16)
    out = np.empty(arrays["q"].shape, ml_dtypes.bfloat16)
    lse = np.empty(arrays["q"].shape[:2], np.float32)
    decode_step(cfg, slab, arrays, out, lse)

    # Three views of the same record, that of position 31 in state slot 3, and no copy.
    ring_idx = 31 % cfg.layers[LAYER].ring_len
    record = layout.view(slab, LAYER)[STATE_ID, ring_idx, 0]
    values = slab.view(slot_dtype(layout))["layer0_swa"][STATE_ID, ring_idx]["kv_values"]
    offset = STATE_ID * layout.slot_bytes + layout.ring(LAYER).offset + ring_idx * record.size
    assert values.any()
    report(
        "numpy",
        slab,
        out,
        {
            "view": address(record) == address(slab) + offset,
            "structured view": address(values) == address(record),
            "mapping": bytes(memory[offset : offset + record.size]) == record.tobytes(),
        },
    )


if __name__ == "__main__":
    main()
