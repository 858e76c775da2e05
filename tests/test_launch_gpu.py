"""What only a GPU can show of the launchers: graph capture, streams, the E4M3 instruction,
addresses past 4 GiB, and clear errors."""

import ml_dtypes
import numpy as np
import pytest
from helpers import i32, make_layout, operations, random_bf16, record_format, to_backend

import ringslab as rs
from ringslab.rawkernels.device.kernel_source import KernelSource, ParamsStruct

pytestmark = pytest.mark.gpu
ROPE = rs.Rope(10_000.0, 64, "adjacent")


def gpu(x):
    return to_backend(np.ascontiguousarray(x), "cuda")


def make_calls(cupy):
    """(call, outputs) of every launcher on V4.1 records; `call` fills the outputs."""
    ops, fmt = operations("cuda"), record_format(512)
    layout, rng = make_layout(fmt, 134), np.random.default_rng(1)
    tokens, state_ids = 40, np.repeat([2, 0, 1, -1], 10)
    ids, positions = gpu(i32(state_ids)), gpu(i32(np.tile(np.arange(300, 310), 4)))
    kv, q = gpu(random_bf16(rng, (tokens, 512))), gpu(random_bf16(rng, (tokens, 8, 512)))
    plan = to_backend(
        rs.plan_prefill(i32([2, 0]), i32([10, 10]), i32([310, 310]), window=128, ring_len=134),
        "cuda",
    )

    def zeros(shape, dtype=np.uint8):
        return cupy.zeros(shape, dtype)

    values, scales, numbers = zeros((tokens, 512)), zeros((tokens, 16)), zeros((40, 512), "f4")
    records, history, slab = (
        zeros((tokens, 528)),
        zeros((256, 528)),
        [zeros(3 * layout.slot_bytes) for _ in range(2)],
    )
    turned, seeded, stacked = (zeros((tokens, 8, 512), np.uint16) for _ in range(3))
    stacked_kv, digests = zeros((tokens, 512), np.uint16), zeros(tokens, np.uint64)
    rule = {"scale_rounding": "ceil", "amax_floor": 1e-4}
    return [
        (lambda **s: ops.quantize_mxfp8(kv, values, scales, **rule, **s), (values, scales)),
        (lambda **s: ops.dequantize_mxfp8(values, scales, numbers, **s), (numbers,)),
        (lambda **s: ops.apply_rope(q, positions, turned, rope=ROPE, **s), (turned,)),
        (
            lambda **s: ops.encode_records(
                kv, positions, records, record_format=fmt, rope=ROPE, **s
            ),
            (records,),
        ),
        (
            lambda **s: ops.store_records(slab[0], layout, 1, records, ids, positions, **s),
            (slab[0],),
        ),
        (
            lambda **s: ops.ring_store(slab[1], layout, 1, kv, ids, positions, rope=ROPE, **s),
            (slab[1],),
        ),
        (lambda **s: ops.load_history(slab[0], layout, 1, plan, history, **s), (history,)),
        (
            lambda **s: ops.seeded_activations(
                7, 3, positions, positions, seeded.reshape(tokens, -1), **s
            ),
            (seeded,),
        ),
        (
            lambda **s: ops.stack_activations(
                seeded, 7, 3, positions, positions, stacked, stacked_kv, **s
            ),
            (stacked, stacked_kv),
        ),
        (
            lambda **s: ops.digest_outputs(stacked.reshape(tokens, -1), 3, digests, **s),
            (digests,),
        ),
    ]


def test_captured_launches_give_the_same_bytes():
    """All ten operations run once, then are captured into one graph: no allocation and no
    synchronisation, and a replay over cleared outputs gives the bytes of the direct calls."""
    import cupy

    calls = make_calls(cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    for call, _ in calls:
        call()
    outputs = [out for _, outs in calls for out in outs]
    wanted = [out.get() for out in outputs]
    for out in outputs:
        out[...] = 0
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for call, _ in calls:
            call()
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for out, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(out.get(), expected)


def test_stream_argument():
    """Every operation on a stream of its own, given as an argument: the same bytes as on the
    current stream; a thing that is no stream is refused."""
    import cupy

    calls = make_calls(cupy)
    for call, _ in calls:
        call()
    wanted = [out.get() for _, outs in calls for out in outs]
    for _, outs in calls:
        for out in outs:
            out[...] = 0
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    for call, _ in calls:
        call(stream=stream)
    stream.synchronize()
    for out, expected in zip((o for _, outs in calls for o in outs), wanted, strict=True):
        np.testing.assert_array_equal(out.get(), expected)
    with pytest.raises(rs.errors.ArgumentError, match="stream: got str"):
        calls[0][0](stream="default")


def test_element_instruction_rounds_as_the_rule():
    """16 million float32 patterns of all exponents, in blocks whose maximum is 448 (scale 1): the
    instruction of sm_89 and later gives what ml_dtypes gives after a clip."""
    bits = np.arange(0, 2**31, 131, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = x[np.abs(x) <= 448]  # drops NaN and infinity as well
    x = np.concatenate([x, -x])
    x = x[: x.size // 31 * 31].reshape(-1, 31)
    x = np.concatenate([np.full((x.shape[0], 1), 448, np.float32), x], axis=1)
    values, scales = gpu(np.zeros(x.shape, np.uint8)), gpu(np.zeros((x.shape[0], 1), np.uint8))
    operations("cuda").quantize_mxfp8(
        gpu(x), values, scales, scale_rounding="ceil", amax_floor=1e-4
    )
    assert (scales.get() == 127).all()
    expected = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(values.get(), expected)


def need_free(cupy, size):
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < size:
        pytest.skip(f"needs {size} bytes of free GPU memory, {free} are")


def test_slab_past_4_gib():
    """1,500 slots of 3.1 MB (4.7 GB): the record of the last slot and its neighbours' bytes."""
    import cupy

    fmt = record_format(512)
    layout = make_layout(fmt, 134, num_layers=44)
    slots = 1500
    assert slots * layout.slot_bytes > 2**32
    need_free(cupy, 2 * slots * layout.slot_bytes)
    slab = cupy.zeros(slots * layout.slot_bytes, np.uint8)
    kv = gpu(random_bf16(np.random.default_rng(2), (1, 512)))
    ids, positions = gpu(i32([slots - 1])), gpu(i32([267]))
    operations("cuda").ring_store(slab, layout, 43, kv, ids, positions, rope=ROPE)
    record = cupy.zeros((1, 528), np.uint8)
    operations("cuda").encode_records(kv, positions, record, record_format=fmt, rope=ROPE)
    view = layout.view(slab, 43)
    np.testing.assert_array_equal(view[slots - 1, 133, 0].get(), record[0].get())
    view[slots - 1, 133] = 0
    assert int(cupy.count_nonzero(slab)) == 0
    del slab, view
    cupy.get_default_memory_pool().free_all_blocks()


def test_more_than_2_31_elements():
    """4,194,400 rows of 512 (2^31 elements and a little): the last rows are quantized as alone."""
    import cupy

    rows = 4_194_400
    need_free(cupy, 2 * rows * 512 * 4)
    x = cupy.zeros((rows, 512), np.uint16)
    tail = random_bf16(np.random.default_rng(3), (96, 512))
    x[-96:] = gpu(tail)
    values, scales = cupy.empty((rows, 512), np.uint8), cupy.empty((rows, 16), np.uint8)
    rule = {"scale_rounding": "ceil", "amax_floor": 1e-4}
    operations("cuda").quantize_mxfp8(x, values, scales, **rule)
    wanted = np.empty((96, 512), np.uint8), np.empty((96, 16), np.uint8)
    operations("reference").quantize_mxfp8(tail, *wanted, **rule)
    np.testing.assert_array_equal(values[-96:].get(), wanted[0])
    np.testing.assert_array_equal(scales[-96:].get(), wanted[1])
    assert int(values[:-96].max()) == 0
    assert int(scales[:-96].min()) == int(scales[:-96].max()) == 105
    del x, values, scales
    cupy.get_default_memory_pool().free_all_blocks()


def test_too_much_shared_memory():
    """1 GB of shared memory a block: BackendError with what is asked and what is there."""
    from ringslab.rawkernels.cuda.digest_outputs import DIGEST
    from ringslab.rawkernels.device.module import get_kernel

    with pytest.raises(rs.errors.BackendError, match=r"1073741824 bytes .* device 0 has \d+"):
        get_kernel(DIGEST, DIGEST.macro_sets[0], 2**30)


def test_a_kernel_of_another_architecture_is_refused():
    """A kernel for sm_70 only: BackendError names both architectures."""
    from ringslab.rawkernels.device.module import get_kernel

    source = KernelSource("digest_outputs", ParamsStruct("P", (("a", "int32_t"),)), (), ("sm_70",))
    with pytest.raises(rs.errors.BackendError, match=r"runs on sm_70 only, and device 0 is sm_"):
        get_kernel(source)


def test_first_use_inside_a_capture_is_refused():
    """A rotation that was never used is asked for while a graph is captured: BackendError says to
    run it once before; the capture is ended and the next call works."""
    import cupy

    x = gpu(random_bf16(np.random.default_rng(4), (2, 1, 128)))
    positions, out = gpu(i32([5, 6])), cupy.zeros_like(x)
    rope = rs.Rope(123_456.0, 64, "adjacent")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(rs.errors.BackendError, match="before the capture"):
            operations("cuda").apply_rope(x, positions, out, rope=rope)
        stream.end_capture()
        operations("cuda").apply_rope(x, positions, out, rope=rope)
    stream.synchronize()
    assert int(cupy.count_nonzero(out)) > 0


def test_a_capture_shares_its_streams_workspace():
    """Scratch memory that an operation took on the current stream: captures find the same under the
    same name, and are refused what was never taken. Graphs that are launched on two other streams
    take turns with each other and with the first: 1 + 2 * 1000 additions, none lost."""
    import cupy

    from ringslab.rawkernels.device.workspaces import stream_workspace
    from ringslab.rawkernels.memory import load_memory

    memory = load_memory("cuda")
    seen = []

    def use(name="test: a capture's workspace"):
        seen.append(stream_workspace(name, 2**22, lambda: cupy.zeros(2**20, "uint32")))
        seen[-1] += 1

    use()
    launches = [memory.capture(use) for _ in range(2)]
    assert len({array.data.ptr for array in seen}) == 1
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for _ in range(500):
        for stream, launch in zip(streams, launches, strict=True):
            with stream:
                launch()
            launch()
    assert cupy.unique(seen[0]).get().tolist() == [2001]
    with pytest.raises(rs.errors.BackendError, match="scratch of none"):
        memory.capture(lambda: use("scratch of none"))


def test_a_workspace_that_does_not_fit_is_refused():
    """Twice the device's memory: DeviceMemoryError with the bytes asked for and those free; the
    next call of the same name finds what fits."""
    import cupy

    from ringslab.rawkernels.device.probe import current_device, device_bytes
    from ringslab.rawkernels.device.workspaces import stream_workspace

    def take(size):
        return stream_workspace("too much", size, lambda: cupy.empty(size, "uint8"))

    size = 2 * device_bytes(current_device())[1]
    says = rf"too much: needs {size:,} bytes but [\d,]+ are free on cuda:\d"
    with pytest.raises(rs.errors.DeviceMemoryError, match=says):
        take(size)
    assert take(512).size == 512
