"""How CPU kernels are compiled, cached and called."""

import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numba
import numpy as np
import pytest
from helpers import random_bf16, record_format

import ringslab as rs
from ringslab.rawkernels.cpu import kernels
from ringslab.rawkernels.cpu.codec import e4m3_byte
from ringslab.rawkernels.cpu.quantize_mxfp8 import _quantize_rows
from ringslab.rawkernels.reference.quantize_mxfp8 import e4m3_bytes


def test_read_only_input_is_viewed_not_copied():
    """A read-only array would be another type to Numba: it is passed as a writeable view of the
    same memory, and no kernel is compiled for it."""
    x = random_bf16(np.random.default_rng(0), (3, 64))
    rs.quantize_mxfp8(x)
    signatures = len(_quantize_rows.signatures)
    x.flags.writeable = False
    rs.quantize_mxfp8(x)
    assert len(_quantize_rows.signatures) == signatures
    view = kernels._argument(x)
    assert np.shares_memory(view, x)


def test_one_signature_for_both_dtypes():
    """float32 and bf16 input share one compiled kernel."""
    x = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    rs.quantize_mxfp8(x)
    rs.quantize_mxfp8(random_bf16(np.random.default_rng(0), (3, 64)))
    assert len(_quantize_rows.signatures) == 1


def test_threads_are_restored(monkeypatch):
    """Little work runs on one thread, and the caller's number of threads stands again after it,
    also when the kernel raises."""
    seen = []
    before = numba.get_num_threads()
    kernels.launch(lambda: seen.append(numba.get_num_threads()), 1)
    kernels.launch(lambda: seen.append(numba.get_num_threads()), kernels.SERIAL_WORK)
    assert seen == [1, before]

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kernels.launch(fails, 1)
    assert numba.get_num_threads() == before


@pytest.mark.skipif(numba.get_num_threads() == 1, reason="needs two cores")
def test_bits_do_not_depend_on_the_number_of_threads():
    """encode_records of 2,000 vectors and decode of them on one core and on all: equal bits."""
    fmt = record_format(512)
    kv = random_bf16(np.random.default_rng(1), (2000, 512))
    all_threads = numba.get_num_threads()
    found = []
    for threads in (1, all_threads):
        numba.set_num_threads(threads)
        records = rs.encode_records(kv, fmt)
        plan = rs.plan_prefill([0], [1900], [1900], window=100, ring_len=100)
        q = random_bf16(np.random.default_rng(2), (1900, 3, 512))
        found.append((records, *rs.window_prefill(q, records, plan, fmt, softmax_scale=0.05)))
    numba.set_num_threads(all_threads)
    for one, many in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), many.view(np.uint8))


def test_no_folder_for_a_cache(monkeypatch):
    """Where Numba finds no folder to cache in, kernels are compiled without a cache."""

    def no_locator(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available for file")
        return lambda function: ("compiled", function)

    monkeypatch.setattr(kernels, "njit", no_locator)
    assert kernels.kernel(len) == ("compiled", len)


SCRIPT = """
import numpy as np
import ringslab as rs
values = np.full((2, 32), 0x38, np.uint8)
assert (rs.dequantize_mxfp8(values, np.full((2, 1), 128, np.uint8)) == 2).all()
"""


def test_damaged_cache_is_emptied(tmp_path):
    """Index files cut to half: a new process warns, compiles again and gives the right numbers;
    the one after it finds a whole cache."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run():
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    run()
    indices = list(tmp_path.rglob("*.nbi"))
    assert indices
    for path in indices:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "damaged" in run().stderr
    assert "damaged" not in run().stderr


def test_cache_that_cannot_be_written(tmp_path):
    """Index files that are folders cannot be read, emptied or written (also for root, whom a
    read-only folder does not stop): warnings, and the right numbers."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    options = {"env": environment, "capture_output": True, "text": True, "check": True}
    subprocess.run(command, **options)
    for path in list(tmp_path.rglob("*.nbi")):
        path.unlink()
        path.mkdir()
    assert "cannot be written" in subprocess.run(command, **options).stderr


def test_q01_q10_e4m3_bytes_of_the_whole_range():
    """All 65,280 bf16 numbers that are no NaN, the halfway points between neighbouring E4M3 values
    and the floats beside them, and 1000, 465, 464 with scale 1: as clip and ml_dtypes' cast."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    finite = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    half = (finite[1:] + finite[:-1]) / 2
    beside = [half, np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1000))]
    numbers = upper.view(np.float32)[~np.isnan(upper.view(np.float32))]
    beyond = np.float32([1000, 465, 464, -1000])
    x = np.concatenate([numbers, *beside, -half, beyond])
    found = [e4m3_byte(number) for number in x]
    np.testing.assert_array_equal(found, e4m3_bytes(x.astype(np.float64)))
