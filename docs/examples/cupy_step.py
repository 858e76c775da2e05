"""A decode step on CuPy arrays and a stream of one's own: python docs/examples/cupy_step.py

Every call is queued on the stream, after what filled its inputs there, and returns at once.
"""

import cupy
import numpy as np
from step import NUM_STATE_SLOTS, decode_step, make_inputs, report

import ringslab as rs


def main() -> None:
    cfg = rs.load_config("quickstart.yaml")
    layout = cfg.slot_layout
    stream = cupy.cuda.Stream(non_blocking=True)  # does not wait for the null stream
    with stream:
        # CuPy's memory comes from a pool that reuses a freed array for the next one of the same
        # stream. Arrays that are made, used and dropped under one stream need no more care.
        slab = cupy.zeros(NUM_STATE_SLOTS * layout.slot_bytes, cupy.uint8)
        arrays = {name: cupy.asarray(array) for name, array in make_inputs(cfg).items()}
        out = cupy.empty(arrays["q"].shape, cupy.uint16)
        lse = cupy.empty(arrays["q"].shape[:2], cupy.float32)
        pointers = slab.data.ptr, out.data.ptr
        decode_step(cfg, slab, arrays, out, lse, stream)

        # The same memory for whoever comes next, in the same order of things: a view of the
        # records, and CuPy's own work on the output. The bits of bf16 are the high half of a
        # float32.
        records = layout.view(slab, layer=0)
        values = (out.astype(cupy.uint32) << 16).view(cupy.float32)
        largest = cupy.abs(values).max()
        host_slab, host_out = cupy.asnumpy(slab), cupy.asnumpy(out)  # these wait for the stream
    # cupy.asnumpy waited; another reader of the results would wait with this.
    stream.synchronize()
    assert np.isfinite(float(largest))
    report(
        "cupy",
        host_slab,
        host_out,
        {
            "slab": records.data.ptr == slab.data.ptr + layout.ring(0).offset,
            "arrays stayed": (slab.data.ptr, out.data.ptr) == pointers,
        },
    )


if __name__ == "__main__":
    main()
