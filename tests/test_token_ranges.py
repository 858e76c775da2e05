"""How a prefill batch is cut between thread blocks: `token_ranges.cuh`, built for the CPU."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from host_build import build_library

CUDA_FOLDER = Path(__file__).resolve().parents[1] / "rawkernels" / "cuda"

SHIM = """
#include <algorithm>
#define __device__
#define __forceinline__ inline
template <class T> T __ldg(const T* at) { return *at; }
using std::max;
using std::min;
#include "token_ranges.cuh"
extern "C" int enter_tokens() { return ENTER_TOKENS; }
extern "C" void ranges(const int32_t* cu, int num_seqs, int num_tokens, int num_blocks, int* out) {
  for (int block = 0; block < num_blocks; block++) {
    const TokenRange range = range_of_block(cu, num_seqs, num_tokens, block, num_blocks);
    out[2 * block] = range.first;
    out[2 * block + 1] = range.num;
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    place = tmp_path_factory.mktemp("token_ranges")
    (place / "shim.cpp").write_text(SHIM)
    return build_library(place, "shim.cpp", (), "-O1", f"-I{CUDA_FOLDER}")


def cut(library, lengths, num_blocks, padding=0):
    """(first, num) of each block, and the bounds of the sequences."""
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.empty((num_blocks, 2), np.int32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (cu, out)]
    tokens = int(cu[-1]) + padding
    library.ranges(pointers[0], len(lengths), tokens, num_blocks, pointers[1])
    return out, cu


def test_one_sequence_is_cut_evenly(library):
    """Parts of one sequence differ by a token at most."""
    for tokens, blocks in ((8192, 132), (132, 132), (133, 132), (5, 5), (1000, 7)):
        out, _ = cut(library, [tokens], blocks)
        assert out[:, 1].sum() == tokens
        assert np.ptp(out[:, 1]) <= 1


def test_ranges_hold_every_token_once(library):
    """Whatever the lengths (many sequences are empty) and the padding: the ranges follow one
    another from 0 to the last token, and none costs more than its part, where entering a sequence
    inside a range counts as ENTER_TOKENS, and less where there are few tokens a block."""
    rng = np.random.default_rng(5)
    for _ in range(2000):
        num_seqs = int(rng.integers(1, 40))
        lengths = rng.integers(0, int(rng.choice([2, 9, 300])), num_seqs)
        padding = int(rng.integers(0, 5)) * int(rng.integers(0, 2))
        tokens = int(lengths.sum()) + padding
        if tokens == 0:
            continue
        blocks = int(rng.integers(1, min(tokens, 132) + 1))
        out, cu = cut(library, lengths, blocks, padding)
        first, end = out[:, 0], out.sum(axis=1)
        assert first[0] == 0
        assert end[-1] == tokens
        assert np.array_equal(first[1:], end[:-1])
        assert np.all(out[:, 1] >= 0)
        enter = min(library.enter_tokens(), tokens // blocks // 2)
        inside = (first[:, None] < cu[1:-1]) & (cu[1:-1] < end[:, None])
        cost = out[:, 1] + enter * inside.sum(axis=1)
        assert cost.max() <= -(-(tokens + enter * (num_seqs - 1)) // blocks)  # rounded up


def test_an_edge_within_an_entry_moves_to_the_sequence(library):
    """Two sequences of 100 tokens and two blocks: the second block begins with the second sequence,
    and so enters nothing."""
    out, _ = cut(library, [100, 100], 2)
    assert out.tolist() == [[0, 100], [100, 100]]
    out, _ = cut(library, [98, 102], 2)
    assert out.tolist() == [[0, 98], [98, 102]]
