"""A decode step between two Numba CUDA kernels: python docs/examples/numba_step.py

Numba's device arrays are seen through `__cuda_array_interface__`, and CuPy's the other way round.
One stream serves both: CuPy makes it, Numba is told its address.
"""

import os

# By default whoever takes an array with a stream in its __cuda_array_interface__ waits for that
# stream on the host. Here everything is queued on one stream, so its order is enough.
os.environ.setdefault("CUPY_CUDA_ARRAY_INTERFACE_SYNC", "0")

import numpy as np

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # numba-cuda 0.30.4 looks for it, NumPy 2.5 no longer has it

import cupy
from numba import cuda
from step import NUM_STATE_SLOTS, decode_step, make_inputs, report

import ringslab as rs

THREADS = 128


@cuda.jit
def project(x, bits):
    """Stands for a model: float32 [n] to bf16 bits [n], which its values fit exactly."""
    i = cuda.grid(1)
    if i < x.size:
        bits[i] = np.uint16(x[i].view(np.uint32) >> np.uint32(16))


@cuda.jit
def widen(bits, x):
    """bf16 bits [n] to float32 [n]."""
    i = cuda.grid(1)
    if i < bits.size:
        # Numba gives the shift 64 bits; only a number of 32 is a float32's bits.
        x[i] = np.uint32(np.uint32(bits[i]) << np.uint32(16)).view(np.float32)


def main() -> None:
    cfg = rs.load_config("quickstart.yaml")
    layout = cfg.slot_layout
    stream = cupy.cuda.Stream(non_blocking=True)
    numba_stream = cuda.external_stream(stream.ptr)  # keep `stream`: this one does not own it
    arrays, kept = {}, []
    for name, host in make_inputs(cfg).items():
        if host.dtype == np.uint16:
            wide = (host.astype(np.uint32) << 16).view(np.float32)
            x = cuda.to_device(wide.reshape(-1), stream=numba_stream)
            bits = cuda.device_array(host.size, np.uint16, stream=numba_stream)
            blocks = -(-host.size // THREADS)  # rounded up
            project[blocks, THREADS, numba_stream](x, bits)
            kept.append(x)
            arrays[name] = bits.reshape(host.shape)
        else:
            arrays[name] = cuda.to_device(host, stream=numba_stream)
    slab = cuda.to_device(np.zeros(NUM_STATE_SLOTS * layout.slot_bytes, np.uint8), numba_stream)
    out = cuda.device_array(arrays["q"].shape, np.uint16, stream=numba_stream)
    lse = cuda.device_array(arrays["q"].shape[:2], np.float32, stream=numba_stream)
    with stream:
        decode_step(cfg, slab, arrays, out, lse, stream)

        # Back to Numba: its own array, filled by ringslab, and one of CuPy's, read by Numba.
        # `sync=False` leaves out the wait that the interface asks for.
        wide = cupy.empty(out.size, cupy.float32)
        seen = cuda.as_cuda_array(wide, sync=False)
        blocks = -(-out.size // THREADS)  # rounded up
        widen[blocks, THREADS, numba_stream](out.reshape(out.size), seen)
        taken = cupy.asarray(out)
    host_out = out.copy_to_host(stream=numba_stream)
    host_slab = slab.copy_to_host(stream=numba_stream)
    # Numba frees a device array when its last reference goes, whatever is still queued: keep all of
    # them, and CuPy's stream, until the stream has passed their last use.
    stream.synchronize()
    kept.clear()
    expected = (host_out.reshape(-1).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(cupy.asnumpy(wide), expected)
    report(
        "numba",
        host_slab,
        host_out,
        {
            "out to cupy": taken.data.ptr == pointer(out),
            "cupy to numba": pointer(seen) == wide.data.ptr,
        },
    )


def pointer(array) -> int:
    """Address of anything with `__cuda_array_interface__`."""
    return array.__cuda_array_interface__["data"][0]


if __name__ == "__main__":
    main()
