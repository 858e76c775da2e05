// paged_load: the records of whole sequences, decoded to rows of k and v.
// grid (div_ceil(num_rows, BLOCK_ROWS)); block 128 threads over 16-byte units of BLOCK_ROWS rows
// in   pool uint8 [num_blocks * block_bytes]; block_tables int32 [>= num_seqs, max_blocks];
//      cu_seqlens_k int32 [num_seqs + 1], read here so that no host waits for it
// out  k, v bf16 or fp16 [num_rows, KV_HEADS, HEAD_DIM]; rows past cu_seqlens_k[num_seqs] are left
// needs k and v at multiples of 16 bytes, and what LOAD_BYTES says of the records. A position past
//       the table or in a block that is not in the pool gives zeros.
// bound by memory: 2112 B in and 4096 B out a row at 8 heads of 128
#include "paged_load_params.cuh"
#include "pages.cuh"
#include "unpack_records.cuh"

static_assert(sizeof(PagedLoadParams) == PARAMS_BYTES, "the launcher's dtype");

extern "C" __global__ void __launch_bounds__(THREADS)
paged_load(const __grid_constant__ PagedLoadParams p) {
  __shared__ RecordSources from;
  int64_t first = (int64_t)blockIdx.x * BLOCK_ROWS;
  int64_t end = p.num_seqs > 0 ? __ldg(p.cu_seqlens_k + p.num_seqs) : 0;
  int rows = (int)min(min(end, p.num_rows) - first, (int64_t)BLOCK_ROWS);
  if (rows <= 0) return;
#pragma unroll 1
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    int32_t seq = sequence_of(p.cu_seqlens_k, p.num_seqs, first + r);
    int32_t position = (int32_t)(first + r - __ldg(p.cu_seqlens_k + seq));
    int64_t start = page_record(p.block_tables, seq, position, p.max_blocks, p.block_size,
                                p.num_blocks, p.block_bytes, p.record_bytes);
    const uint8_t* record = start < 0 ? nullptr : p.pool + p.layer_offset + start;
    set_source(from, r, record, record + p.value_bytes, p.part_bytes, p.part_bytes);
  }
  __syncthreads();
  unpack_rows(from, first, rows, p.k, p.v);
}
