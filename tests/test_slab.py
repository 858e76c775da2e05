"""The slab and the engine's memory: sizes stated before, alignment, and what does not fit."""

import io

import numpy as np
import pytest
from engine_runs import Story, activations, tiny
from helpers import to_host

import ringslab as rs
from ringslab.engine.backends import why_not_cuda
from ringslab.engine.progress import open_progress
from ringslab.engine.slab import slab_bytes
from ringslab.engine.workspace import engine_sizes
from ringslab.errors import ArgumentError, BackendError, DeviceMemoryError
from ringslab.rawkernels.memory import host_bytes, load_memory


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def test_a_slab_is_flat_aligned_and_of_the_stated_size(backend):
    """3 slots of 9,984 B: 29,952 bytes of uint8 at a multiple of 256, views for each layer."""
    layout = tiny().slot_layout
    slab = rs.empty_slab(layout, 3, backend)
    assert slab.shape == (slab_bytes(layout, 3),) == (29952,)
    assert slab.dtype == np.uint8
    assert address(slab) % 256 == 0
    slab[...] = 7
    view = layout.view(slab, layer=2)
    assert view.shape == (3, 11, 1, 132)
    assert view.strides[0] == 9984
    assert (to_host(view) == 7).all()


def test_wrong_sizes_and_backends_are_refused():
    layout = tiny().slot_layout
    for count in (0, -1, 2.0, True, "4"):
        with pytest.raises(ArgumentError, match="num_state_slots="):
            rs.empty_slab(layout, count)
    with pytest.raises(ArgumentError, match="backend='gpu'"):
        rs.empty_slab(layout, 1, "gpu")
    if why_not_cuda() is not None:
        with pytest.raises(BackendError, match="cannot run"):
            rs.empty_slab(layout, 1, "cuda")


def test_a_slab_larger_than_the_memory_names_both_numbers(fast_backend):
    """Ten times what is there: refused before anything is taken, with needed and free bytes."""
    layout = tiny().slot_layout
    total = load_memory(fast_backend).free_bytes()[1]
    count = 10 * total // layout.slot_bytes
    needed = f"needs {count * layout.slot_bytes:,} bytes but"
    with pytest.raises(DeviceMemoryError, match=needed):
        rs.empty_slab(layout, count, fast_backend)


def test_host_memory_is_counted():
    free, total = host_bytes()
    assert 0 < free <= total


def test_an_engine_takes_what_it_said(backend):
    """The arrays of an engine have the bytes that `engine_sizes` states for them."""
    cfg = tiny()
    sizes = engine_sizes(cfg)
    with rs.Engine(cfg, backend) as engine:
        workspace, buffers = engine.tools.workspace, engine.run_buffers()
        assert engine.slab.nbytes == sizes.slab_bytes
        assert workspace.joint.nbytes == sizes.joint_bytes
        assert workspace.lse.nbytes == sizes.lse_bytes
        assert sum(part.nbytes for part in workspace.staging.device) == sizes.staging_bytes
        run_arrays = (buffers.q, buffers.kv, buffers.out, buffers.digests)
        assert sum(part.nbytes for part in run_arrays) == sizes.run_bytes
        inputs = engine.decode_inputs()
        taken = inputs.ints.nbytes + inputs.digests.nbytes
        assert 0 <= sizes.decode_bytes - taken < 256  # stated in whole pieces of 256
    assert f"{sizes.total_bytes:,} B" in sizes.describe()


def test_whole_prompts_need_room_for_the_longest():
    """Without chunking a prompt of max_seq_len = 512 runs alone, so the buffers hold 512 tokens."""
    assert engine_sizes(tiny()).prefill_tokens == 32
    assert engine_sizes(tiny("engine.chunked_prefill=false")).prefill_tokens == 512


@pytest.mark.gpu
def test_arrays_of_another_device_are_refused():
    """CuPy arrays on a host engine, a host `out` on a GPU engine, one of q and kv on each."""
    import cupy

    cfg, story = tiny(), Story()
    for backend in ("cpu", "cuda"):
        with rs.Engine(cfg, backend) as engine:
            engine.submit(rs.Request("a", story.prompt("a", 6), 3))
            batch = engine.next_batch()
            q, kv = activations(cfg, 0, batch.token_ids, batch.positions)
            with pytest.raises(ArgumentError, match="one of q and kv"):
                engine.attend(0, batch, q, cupy.asarray(kv))
            if backend == "cpu":
                with pytest.raises(ArgumentError, match="q is on a GPU but the engine runs on"):
                    engine.attend(0, batch, cupy.asarray(q), cupy.asarray(kv))
            else:
                with pytest.raises(ArgumentError, match="out is a host array"):
                    engine.attend(0, batch, q, kv, out=np.empty_like(q))


@pytest.mark.gpu
def test_an_engine_works_on_its_own_stream():
    """A stream of the caller's: the outputs that the current stream gives."""
    import cupy

    outputs = []
    for stream in (None, cupy.cuda.Stream(non_blocking=True)):
        with rs.Engine(tiny(), "cuda", stream=stream) as engine:
            outputs.append(engine.run(verify=True))
    assert outputs[0]["digest"] == outputs[1]["digest"]
    assert outputs[1]["verify"]["passed"] is True


def test_progress_is_quiet_where_nobody_looks():
    """Not a terminal: what is said comes out as a line, updates within 15 s do not."""
    stream = io.StringIO()
    progress = open_progress(10, stream)
    progress.say("building window_decode [1/3]")
    for done in range(10):
        progress.update(done, 100 * done)
    progress.stop()
    assert stream.getvalue() == "building window_decode [1/3]\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    pytest.importorskip("rich")
    stream = Terminal()
    progress = open_progress(10, stream)
    progress.say("building window_decode [1/3]")
    progress.stop()
    assert "building window_decode [1/3]" in stream.getvalue()
