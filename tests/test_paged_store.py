"""paged_store on every backend: the bytes of encode_records in the blocks of the table."""

import shutil

import numpy as np
import pytest
from helpers import Guarded, encoded, i32, operations, random_values, to_backend
from kernels_on_host import launchers
from paged_cases import CASES, LAYER, make_pages

import ringslab as rs

ROPES = {"none": None, "half": rs.Rope(10_000.0, 32, "half"), "pair": rs.Rope(1e4, 6, "adjacent")}


def store(run, backend, pages, seq_ids, rope=None):
    """The pool, host, after one store into poison between sentinels."""
    pool = Guarded((pages.num_blocks * pages.layout.block_bytes,), np.uint8, backend)
    kv = tuple(to_backend(part, backend) for part in pages.kv)
    places = [to_backend(x, backend) for x in (pages.tables, seq_ids, pages.positions)]
    run(pool.array, pages.layout, LAYER, kv, *places, rope=rope)
    return pool.host()


def expected_pool(pages, seq_ids, rope=None):
    """Independent model: token by token, through the layout's view."""
    pool = pages.pool()
    view = pages.layout.view(pool, LAYER)
    records = encoded(pages.kv, pages.fmt, pages.positions, rope)
    size = pages.layout.block_size
    for record, seq, position in zip(records, seq_ids, pages.positions, strict=True):
        if 0 <= seq < len(pages.tables):
            view[pages.tables[seq, position // size], position % size, 0] = record
    return pool


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_in_its_block(backend, case, rope):
    """Permuted blocks, every fifth token padding: the model's pool, other layers, blocks and bytes
    untouched."""
    if ROPES[rope] is not None and ROPES[rope].dims > case.head_dim:
        pytest.skip("the heads are narrower than the rotation")
    pages = make_pages(case)
    seq_ids = pages.seq_ids.copy()
    seq_ids[::5] = -1
    found = store(operations(backend).paged_store, backend, pages, seq_ids, ROPES[rope])
    np.testing.assert_array_equal(found, expected_pool(pages, seq_ids, ROPES[rope]))


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_kernel_on_the_host(tmp_path, monkeypatch, case):
    """The CUDA kernel by its launcher, played on the CPU: the model's pool. Tokens of sequences
    that are not in the table, of blocks that are not in the pool and of positions past the table
    or below 0 are skipped."""
    run = launchers(monkeypatch, tmp_path)["paged_store"]
    pages = make_pages(case)
    seq_ids = pages.seq_ids.copy()
    seq_ids[::5], seq_ids[1::5] = -1, 2**31 - 1
    rope = ROPES["pair"]
    np.testing.assert_array_equal(
        store(run, "cpu", pages, seq_ids, rope), expected_pool(pages, seq_ids, rope)
    )
    pages.tables[...] = [-1, 2**31 - 1][len(case.lengths) % 2]
    assert (store(run, "cpu", pages, pages.seq_ids) == 0xFF).all()
    for far in (2**31 - 2, pages.tables.shape[1] * case.block_size, -1):
        pages = make_pages(case)
        pages.positions[...] = far
        assert (store(run, "cpu", pages, pages.seq_ids) == 0xFF).all()


def test_golden_bytes(backend):
    """Blocks of 2 tokens, one bf16 head of 2: token 3 of the sequence with table [4, 1] is record 1
    of block 1: K, then V, at byte 1 * 32 + 8 of a pool of 32-byte blocks."""
    fmt = rs.make_record_format("bf16", 2, latent=False)
    layout = rs.build_paged_layout([(0, fmt)], 2, 32)
    assert layout.block_bytes == 32
    pool = Guarded((5 * 32,), np.uint8, backend)
    k, v = np.uint16([[[0x1234, 0x5678]]]), np.uint16([[[0x9ABC, 0xDEF0]]])
    arrays = [to_backend(x, backend) for x in (i32([[4, 1]]), i32([0]), i32([3]))]
    kv = (to_backend(k, backend), to_backend(v, backend))
    operations(backend).paged_store(pool.array, layout, 0, kv, *arrays)
    wanted = np.full(160, 0xFF, np.uint8)
    wanted[40:48] = [0x34, 0x12, 0x78, 0x56, 0xBC, 0x9A, 0xF0, 0xDE]
    np.testing.assert_array_equal(pool.host(), wanted)


def test_public_entry_and_its_errors(fast_backend):
    """The public call stores; ids, positions, blocks and shapes out of range are named."""
    pages = make_pages(CASES[0])
    pool = to_backend(pages.pool(), fast_backend)
    kv = tuple(to_backend(part, fast_backend) for part in pages.kv)
    places = [to_backend(x, fast_backend) for x in (pages.tables, pages.seq_ids, pages.positions)]
    rs.paged_store(pool, pages.layout, LAYER, kv, *places)
    host = pool if isinstance(pool, np.ndarray) else pool.get()
    np.testing.assert_array_equal(host, pages.stored())


def test_refuses_wrong_input():
    """Numbers of both sides in the message, before anything is written."""
    pages = make_pages(CASES[0])
    pool = pages.pool()
    good = {
        "kv": pages.kv,
        "block_tables": pages.tables,
        "seq_ids": pages.seq_ids,
        "positions": pages.positions,
    }

    def refused(pattern, pool=pool, layer=LAYER, error=rs.errors.ArgumentError, **other):
        with pytest.raises(error, match=pattern):
            rs.paged_store(pool, pages.layout, layer, *{**good, **other}.values())

    def changed(array, at, value):
        copy = array.copy()
        copy[at] = value
        return copy

    refused(r"seq_ids\[2\]=5 but must be -1", seq_ids=changed(pages.seq_ids, 2, 5))
    refused(r"positions\[1\]=-4 but must be 0 \.\. 111", positions=changed(pages.positions, 1, -4))
    refused(r"positions\[1\]=112", positions=changed(pages.positions, 1, 112))
    refused(r"block of token\[0\]=-1", block_tables=changed(pages.tables, (0, 0), -1))
    blocks = pages.num_blocks
    refused(rf"\[16\]={blocks} .*{blocks - 1}", block_tables=changed(pages.tables, (0, 1), blocks))
    refused("block_bytes", pool=pool[:-1])
    refused("layer=0 has no records", layer=0, error=rs.errors.LayoutError)
    refused("one array", kv=pages.kv[0])
    refused(r"seq_ids\.shape\[0\]=1", seq_ids=pages.seq_ids[:1])
    refused(r"block_tables\.dtype=int64", block_tables=pages.tables.astype(np.int64))
    assert (pool == 0xFF).all()
    latent = rs.build_paged_layout([(0, rs.make_record_format("bf16", 8))], 4, 32)
    kv = random_values(np.random.default_rng(0), (1, 8))
    with pytest.raises(rs.errors.ArgumentError, match="is latent"):
        rs.paged_store(np.zeros(64, np.uint8), latent, 0, kv, i32([[0]]), i32([0]), i32([0]))


def test_addresses_are_64_bit():
    """Block 5,000,000 of 2,112 x 16 bytes begins at 168,960,000,000: the host's addresses, without
    a pool of that size."""
    from ringslab.rawkernels.paged_checks import PagedAccess, record_starts

    fmt = rs.make_record_format("mxfp8", 128, latent=False, num_kv_heads=8)
    access = PagedAccess(fmt, 16, 16 * 2112, 0, 6_000_000)
    tables = i32([[5_000_000]])
    starts = record_starts("test", access, tables, i32([0, -1]), i32([3, 0]))
    assert starts.tolist() == [168_960_000_000 + 3 * 2112, -1]
