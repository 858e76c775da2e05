"""A decode step between two JAX functions, without copies: python docs/examples/jax_step.py

JAX runs on streams of its own and tells nobody which. DLPack orders them: what takes an array from
JAX names its stream, and JAX makes that stream wait for the array; what gives one to JAX makes
JAX's stream wait for what was queued. No call waits on the host.
"""

import os

# JAX takes three quarters of a GPU's memory when it starts, unless it is told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from step import NUM_STATE_SLOTS, decode_step, make_inputs, report

import ringslab as rs


@jax.jit
def project(bits):
    """Stands for a model. bf16 leaves as its uint16 bits: not every library knows bf16 in DLPack.
    Inside a jitted function the bitcast is no work and no copy."""
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jax.lax.bitcast_convert_type(x * jnp.bfloat16(1), jnp.uint16)


@jax.jit
def mix(bits):
    """What a model does with the output: here its largest magnitude."""
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.abs(x.astype(jnp.float32)).max()


def main() -> None:
    cfg = rs.load_config("quickstart.yaml")
    layout = cfg.slot_layout
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:
        import cupy as xp

        stream = xp.cuda.Stream(non_blocking=True)
    else:
        xp, stream = np, None

    given = {name: jnp.asarray(array) for name, array in make_inputs(cfg).items()}
    given = {name: project(x) if x.dtype == jnp.uint16 else x for name, x in given.items()}
    # JAX's arrays are constants: give them as inputs only. The slab and the outputs, which are
    # written, belong to us; JAX sees the output when it is whole.
    with stream or nullcontext():
        slab = xp.zeros(NUM_STATE_SLOTS * layout.slot_bytes, xp.uint8)
        out = aligned_empty(xp, given["q"].shape, xp.uint16)
        lse = xp.empty(given["q"].shape[:2], xp.float32)
        # An array of JAX may be passed as it is. To take it once and use it often, take it
        # yourself, while the stream that will read it is the current one.
        taken = {name: xp.from_dlpack(x) for name, x in given.items()}
        decode_step(cfg, slab, taken, out, lse, stream)
        result = jax.dlpack.from_dlpack(out)  # JAX's stream now waits for ours
    largest = float(mix(result))  # queued by JAX; float() is what waits

    # `given` must live until the stream has read it: JAX would give its memory to the next array,
    # whose computation knows nothing of our stream. Here everything is done, so it may go.
    if on_gpu:
        stream.synchronize()
    host = {name: np.asarray(x) for name, x in given.items()}
    assert largest > 0
    assert np.array_equal(host["q"], make_inputs(cfg)["q"])
    report(
        "jax",
        xp.asnumpy(slab) if on_gpu else slab,
        np.asarray(result),
        {
            "q to ringslab": pointer(taken["q"]) == given["q"].unsafe_buffer_pointer(),
            "kv to ringslab": pointer(taken["kv"]) == given["kv"].unsafe_buffer_pointer(),
            "out to jax": pointer(out) == result.unsafe_buffer_pointer(),
        },
    )


def pointer(array) -> int:
    """Address of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def aligned_empty(xp, shape, dtype):
    """An array that begins at a multiple of 256 bytes, as CuPy's do. JAX shares host memory that
    begins at a multiple of 64, and copies other memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = xp.empty(size + 256, xp.uint8)
    start = -pointer(raw) % 256
    return raw[start : start + size].view(dtype).reshape(shape)


if __name__ == "__main__":
    main()
