// Where the record of a position lies in a paged pool.
#pragma once
#include "common.cuh"

// Bytes from a layer's records in block 0 to the record of `position` of the sequence in row
// `seq_id` of block_tables, int32 [num_seqs, max_blocks]; -1 where the position is negative, past
// the table, or in a block that is not in the pool.
__device__ __forceinline__ int64_t page_record(const int32_t* block_tables, int64_t seq_id,
                                               int32_t position, int32_t max_blocks,
                                               int32_t block_size, int32_t num_blocks,
                                               int64_t block_bytes, int64_t record_bytes) {
  if (position < 0) return -1;
  int32_t column = position / block_size;
  if (column >= max_blocks) return -1;
  int32_t block = __ldg(block_tables + seq_id * max_blocks + column);
  if (block < 0 || block >= num_blocks) return -1;
  return block * block_bytes + (position - column * block_size) * record_bytes;
}

// The sequence that row `row` belongs to: the largest i with cu_seqlens[i] <= row, where sequences
// without rows are passed over; -1 for a row past the end. cu_seqlens int32 [num_seqs + 1].
__device__ __forceinline__ int32_t sequence_of(const int32_t* cu_seqlens, int32_t num_seqs,
                                               int64_t row) {
  if (num_seqs == 0 || row >= __ldg(cu_seqlens + num_seqs)) return -1;
  int32_t low = 0, high = num_seqs;  // cu_seqlens[low] <= row < cu_seqlens[high]
  while (high - low > 1) {
    int32_t middle = (low + high) / 2;
    if (__ldg(cu_seqlens + middle) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}
