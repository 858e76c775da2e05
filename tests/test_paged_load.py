"""paged_load on every backend: the keys and values that were stored, decoded, in order."""

import shutil

import numpy as np
import pytest
from helpers import Guarded, from_bf16, i32, operations, to_backend
from kernels_on_host import launchers
from paged_cases import CASES, LAYER, make_pages

import ringslab as rs

SPARE_ROWS = 3


def load(run, backend, pages, pool, cu_seqlens):
    """k and v, host bits, of a load into poison between sentinels, with rows to spare."""
    fmt = pages.fmt
    shape = (int(cu_seqlens[-1]) + SPARE_ROWS, fmt.num_kv_heads, fmt.head_dim)
    dtype = np.float16 if fmt.type == "fp16" else np.uint16
    k, v = Guarded(shape, dtype, backend), Guarded(shape, dtype, backend)
    places = [to_backend(x, backend) for x in (pages.tables, cu_seqlens)]
    run(to_backend(pool, backend), pages.layout, LAYER, *places, k.array, v.array)
    return k.host().view(np.uint16), v.host().view(np.uint16)


def expected_rows(kv, fmt):
    """Bits of K and V as records hold them, by the public codec."""
    found = []
    for part in kv:
        if fmt.type == "mxfp8":
            flat = part.reshape(-1, fmt.head_dim)
            exact = rs.dequantize_mxfp8(*rs.quantize_mxfp8(flat))
            bits = exact.view(np.uint32) >> 16
            np.testing.assert_array_equal((bits << 16).view(np.float32), exact)  # exact in bf16
            part = bits.astype(np.uint16).reshape(part.shape)
        found.append(part.view(np.uint16))
    return found


def check(run, backend, case):
    pages = make_pages(case)
    found = load(run, backend, pages, pages.stored(), pages.cu_seqlens)
    tokens = len(pages.seq_ids)
    for rows, wanted in zip(found, expected_rows(pages.kv, pages.fmt), strict=True):
        np.testing.assert_array_equal(rows[:tokens], wanted)
        assert (rows[tokens:] == 0xFFFF).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_was_stored(backend, case):
    """Sequences of permuted blocks, empty ones among them: k and v are the codec's numbers, rows
    past the end keep their poison."""
    check(operations(backend).paged_load, backend, case)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_the_host(tmp_path, monkeypatch, case):
    """The CUDA kernel by its launcher, played on the CPU. Blocks that are not in the pool give
    zeros."""
    run = launchers(monkeypatch, tmp_path)["paged_load"]
    check(run, "cpu", case)
    pages = make_pages(case)
    if not len(pages.seq_ids):
        return
    pages.tables[0, 0], pages.tables[-1, :] = -1, pages.num_blocks
    found = load(run, "cpu", pages, pages.pool(), pages.cu_seqlens)
    first = min(case.lengths[0], case.block_size)
    for rows in found:
        assert not rows[:first].any()
        assert not rows[len(pages.seq_ids) - case.lengths[-1] : len(pages.seq_ids)].any()


@pytest.mark.parametrize("record_type", ["mxfp8", "fp16"])
def test_special_numbers(backend, record_type):
    """NaN, infinities and zeros of either sign among the keys: a NaN stays one, the rest is what
    the codec says (in MXFP8 a NaN takes its block, an infinity the largest number)."""
    pages = make_pages(next(case for case in CASES if case.record_type == record_type))
    k = pages.kv[0]
    numbers = np.float32([np.nan, np.inf, -np.inf, -0.0])
    if record_type == "fp16":
        k[:4, 0, 1] = numbers
        wanted = k.astype(np.float32)
    else:
        k[:4, 0, 1] = numbers.view(np.uint32) >> 16
        flat = k.reshape(-1, pages.fmt.head_dim)
        wanted = rs.dequantize_mxfp8(*rs.quantize_mxfp8(flat)).reshape(k.shape)
    run = operations(backend).paged_load
    found, _ = load(run, backend, pages, pages.stored(), pages.cu_seqlens)
    found = found[: len(k)]
    if record_type == "fp16":
        found = found.view(np.float16).astype(np.float32)
    else:
        found = from_bf16(found)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_kernel_of_nan_on_the_host(tmp_path, monkeypatch):
    """A NaN block, and a block of +-infinity, in the CUDA kernel played on the CPU: the reference's
    bits, 7fc0 for each NaN."""
    run = launchers(monkeypatch, tmp_path)["paged_load"]
    pages = make_pages(next(case for case in CASES if case.name == "odd_bytes"))
    pages.kv[0][:3, 0, 1] = 0x7FC0, 0x7F80, 0xFF80
    pool = pages.stored()
    found, _ = load(run, "cpu", pages, pool, pages.cu_seqlens)
    reference = operations("reference").paged_load
    wanted, _ = load(reference, "cpu", pages, pool, pages.cu_seqlens)
    np.testing.assert_array_equal(found, wanted)
    assert (found[0] == 0x7FC0).all()


def test_some_of_the_table(backend):
    """Ends of the first two of five sequences, the second cut short: 37 and 1 rows become 20 and 1
    of each sequence's beginning."""
    pages = make_pages(CASES[0])
    found, _ = load(
        operations(backend).paged_load, backend, pages, pages.stored(), i32([0, 20, 21])
    )
    wanted, _ = expected_rows(pages.kv, pages.fmt)
    np.testing.assert_array_equal(found[:21], np.concatenate([wanted[:20], wanted[37:38]]))


def test_refuses_wrong_input():
    """More sequences than rows of the table, ends that fall or leave k, another dtype."""
    pages = make_pages(CASES[0])
    pool, k = pages.stored(), np.zeros((20, 2, 64), np.uint16)

    def refused(pattern, cu, k=k, v=k):
        with pytest.raises(rs.errors.ArgumentError, match=pattern):
            rs.paged_load(pool, pages.layout, LAYER, pages.tables, i32(cu), k, v)

    refused(r"cu_seqlens_k\.shape\[0\]=7 .*has 5", [0, 1, 1, 1, 1, 1, 1])
    refused(r"runs 0 \.\. 21 .*k\.shape\[0\]=20", [0, 21])
    refused("never fall", [0, 9, 3])
    refused(r"must start at 0", [1, 3])
    refused(r"positions\[16\]=16 but must be 0 \.\. 111|block of token", [0, 0, 20])
    refused("float16 but must be bfloat16", [0, 1], k.view(np.float16), k.view(np.float16))
    refused(r"v\.shape\[0\]=19 but k\.shape\[0\]=20", [0, 1], k, k[:19])
    k, v = rs.paged_load(pool, pages.layout, LAYER, pages.tables, i32([0, 3]), k, k.copy())
    assert k.any()
    assert v.any()
