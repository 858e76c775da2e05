// How the tokens of a prefill batch are cut between thread blocks that each keep a window of keys.
#pragma once
#include "common.cuh"

// Inside a range, entering another sequence takes as long as this many tokens: all tokens before it
// are waited for, then the whole window is replaced. At the start of a range it costs nothing more,
// because every range begins with a whole window.
constexpr int ENTER_TOKENS = 8;

struct TokenRange {
  int first, num;
};

// First token of the range of a block: tokens and entries, counted along the batch, are dealt out
// in equal parts, and an edge that falls within an entry moves to the sequence behind it.
__device__ __forceinline__ int first_token_of(const int32_t* cu_seqlens, int num_seqs,
                                              int num_tokens, int block, int num_blocks) {
  const int64_t enter = min(ENTER_TOKENS, num_tokens / num_blocks / 2);  // few tokens: rather even
  const int64_t cost = num_tokens + enter * max(num_seqs - 1, 0);
  const int64_t edge = cost * block / num_blocks;
  int seq = 0, high = num_seqs;  // the last sequence that begins at or before the edge
  while (high - seq > 1) {
    const int middle = (seq + high) / 2;
    if (__ldg(cu_seqlens + middle) + enter * middle <= edge) seq = middle;
    else high = middle;
  }
  const int64_t token = edge - enter * seq;
  const int end = seq + 1 < num_seqs ? __ldg(cu_seqlens + seq + 1) : num_tokens;
  return static_cast<int>(token < end ? token : int64_t(end));
}

// The ranges of all blocks follow one another and hold every token once. One may be empty.
__device__ __forceinline__ TokenRange range_of_block(const int32_t* cu_seqlens, int num_seqs,
                                                     int num_tokens, int block, int num_blocks) {
  const int first = first_token_of(cu_seqlens, num_seqs, num_tokens, block, num_blocks);
  const int end = first_token_of(cu_seqlens, num_seqs, num_tokens, block + 1, num_blocks);
  return {first, end - first};
}
