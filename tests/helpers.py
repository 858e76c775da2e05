"""Helpers of the operation tests: arrays to a backend and back, sentinels, layouts, random data."""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from ringslab.layouts.formats import make_record_format
from ringslab.layouts.slots import Ring, build_slot_layout
from ringslab.rawkernels.arrays import kv_parts
from ringslab.rawkernels.operations import load_operations
from ringslab.rawkernels.reference.bound import (
    assert_within_bound,
    expected_decode,
    expected_prefill,
)

POISON = 0xFF
SENTINEL = 0xA5
MASK64 = 2**64 - 1
GUARD_BYTES = 256  # on both sides; keeps the alignment of what is guarded


@functools.cache
def gpu_problem():
    """Why no GPU test can run here, or "" where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"needs CuPy: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "needs an NVIDIA GPU: none found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"


def i32(values):
    return np.asarray(values, np.int32)


def bf16(values):
    """uint16 bits of numbers, rounded to nearest even."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(bits):
    return np.asarray(bits).view(ml_dtypes.bfloat16).astype(np.float32)


def random_bf16(rng, shape, scale=1.0):
    return bf16(rng.standard_normal(shape, np.float32) * np.float32(scale))


def constant_keys(numbers, dims):
    """kv bf16 [n, dims]: number i in every dim."""
    return bf16(np.repeat(np.float32(numbers)[:, None], dims, axis=1))


def to_backend(x, backend):
    """An array, or a plan's arrays, where the backend works: NumPy, or CuPy (bf16 as uint16)."""
    if x is None or backend != "cuda":
        return x
    if dataclasses.is_dataclass(x):
        arrays = {
            field.name: to_backend(getattr(x, field.name), backend)
            for field in dataclasses.fields(x)
            if isinstance(getattr(x, field.name), np.ndarray)
        }
        return dataclasses.replace(x, **arrays)
    import cupy

    return cupy.asarray(x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x)


def to_host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def poisoned(shape, dtype, backend):
    """An array of 0xFF bytes, so that what a kernel leaves out is seen."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return to_backend(np.full(size, POISON, np.uint8).view(dtype).reshape(shape), backend)


class Guarded:
    """A poisoned array between two runs of sentinel bytes; `host` checks them and copies it."""

    def __init__(self, shape, dtype, backend):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        flat = np.full(size + 2 * GUARD_BYTES, SENTINEL, np.uint8)
        flat[GUARD_BYTES : GUARD_BYTES + size] = POISON
        self.flat = to_backend(flat, backend)
        inner = self.flat[GUARD_BYTES : GUARD_BYTES + size]
        self.array = inner.view(dtype).reshape(shape)

    def host(self):
        flat = to_host(self.flat)
        assert (flat[:GUARD_BYTES] == SENTINEL).all(), "bytes before the array were written"
        assert (flat[-GUARD_BYTES:] == SENTINEL).all(), "bytes behind the array were written"
        return to_host(self.array)


def operations(backend):
    return load_operations(backend)


def make_layout(fmt, ring_len, num_layers=2, sink_tokens=0):
    """A slot of equal rings, one a layer; even layers are stored, odd ones not."""
    rings = [
        Ring(
            f"ring_{i}",
            i,
            "swa",
            ring_len,
            fmt.record_bytes,
            i % 2 == 0,
            fmt,
            sink_tokens=sink_tokens,
        )
        for i in range(num_layers)
    ]
    return build_slot_layout(rings, 32)


def record_format(head_dim, record_type="mxfp8", plane_order="interleaved", kv_heads=0):
    """A latent format, or with `kv_heads` one of K and V apart."""
    return make_record_format(
        record_type,
        head_dim,
        plane_order=plane_order,
        latent=kv_heads == 0,
        num_kv_heads=kv_heads or 1,
    )


def random_values(rng, shape, record_type="mxfp8", scale=1.0):
    """Random numbers as vectors of records of this type hold them: float16, or bf16 bits."""
    if record_type != "fp16":
        return random_bf16(rng, shape, scale)
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float16)


def random_kv(rng, count, fmt):
    """New vectors of `count` tokens: bf16 [count, D], or the pair (k, v) of [count, heads, D]."""
    if fmt.latent:
        return random_bf16(rng, (count, fmt.head_dim))
    shape = (count, fmt.num_kv_heads, fmt.head_dim)
    return tuple(random_values(rng, shape, fmt.type) for _ in range(2))


def poisoned_slab(layout, num_slots):
    return np.full(num_slots * layout.slot_bytes, POISON, np.uint8)


def encoded(kv, fmt, positions=None, rope=None):
    """Records of kv by the reference; host arrays."""
    out = np.empty((len(kv_parts(kv)[0]), fmt.record_bytes), np.uint8)
    load_operations("reference").encode_records(kv, positions, out, record_format=fmt, rope=rope)
    return out


def store(slab, layout, layer, kv, state_id, positions):
    """Store kv, as in ring_store, of one sequence by the reference, in place."""
    state_ids = np.full(len(positions), state_id, np.int32)
    load_operations("reference").ring_store(slab, layout, layer, kv, state_ids, i32(positions))


def guarded_outputs(q, backend):
    """Guarded out, bf16 bits or float16 as q is, and lse."""
    dtype = np.float16 if q.dtype == np.float16 else np.uint16
    return Guarded(q.shape, dtype, backend), Guarded(q.shape[:2], np.float32, backend)


def run_decode(backend, q, slab, layout, layer, plan, *, sink=None, **options):
    """window_decode on a backend with guarded outputs; host arrays in and out."""
    out, lse = guarded_outputs(q, backend)
    operations(backend).window_decode(
        to_backend(q, backend),
        to_backend(slab, backend),
        layout,
        layer,
        to_backend(plan, backend),
        out.array,
        lse.array,
        sink=to_backend(sink, backend),
        **options,
    )
    return out.host(), lse.host()


def run_prefill(backend, q, records, plan, fmt, *, sink=None, **options):
    """window_prefill on a backend with guarded outputs; host arrays in and out."""
    out, lse = guarded_outputs(q, backend)
    operations(backend).window_prefill(
        to_backend(q, backend),
        to_backend(records, backend),
        to_backend(plan, backend),
        fmt,
        out.array,
        lse.array,
        sink=to_backend(sink, backend),
        **options,
    )
    return out.host(), lse.host()


def check_decode(backend, q, slab, layout, layer, plan, **options):
    """Run window_decode and hold it to the bound; returns (out, lse). The kernel runs first, so
    that reused memory cannot hold the answer."""
    out, lse = run_decode(backend, q, slab, layout, layer, plan, **options)
    expected = expected_decode(q, slab, layout, layer, plan, **options)
    assert_within_bound(out, lse, expected, f"window_decode on {backend}")
    return out, lse


def check_prefill(backend, q, records, plan, fmt, **options):
    """Run window_prefill and hold it to the bound; returns (out, lse)."""
    out, lse = run_prefill(backend, q, records, plan, fmt, **options)
    expected = expected_prefill(q, records, plan, fmt, **options)
    assert_within_bound(out, lse, expected, f"window_prefill on {backend}")
    return out, lse


def splitmix64(z):
    """The mixer in Python integers: what the backends' copies of it are compared with."""
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)
