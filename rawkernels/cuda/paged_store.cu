// paged_store: vectors of new tokens to records in the blocks of a paged pool, encoded on the way.
// grid (div_ceil(num_tokens * PARTS, WARPS)); block 256 threads, one warp a part of a record
// in   k, v bf16 or fp16 [num_tokens, KV_HEADS, HEAD_DIM]; block_tables int32 [num_seqs,
//      max_blocks]; seq_ids, positions int32 [num_tokens]; table float64 [rows, pairs, 2]
// out  pool uint8 [num_blocks * block_bytes]: one whole record a token
// needs k and v at multiples of 16 bytes where HEAD_DIM % 8 == 0. A token is skipped where its seq
//       id is no row of the table, or its position or its block is out of range.
// bound by memory: 4096 B in and 2112 B out a token at 8 heads of 128; a decode step of a few
//       tokens is bound by latency: three dependent loads, then the rotation
#include "encode.cuh"
#include "pages.cuh"
#include "paged_store_params.cuh"

static_assert(sizeof(PagedStoreParams) == PARAMS_BYTES, "the launcher's dtype");

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
paged_store(const __grid_constant__ PagedStoreParams p) {
  __shared__ float2 rotation[WARPS][TABLE_PAIRS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t item = (int64_t)blockIdx.x * WARPS + warp;
  int64_t token = item / PARTS;
  if (token >= p.num_tokens) return;
  int64_t later = (item + ITEMS_AHEAD) / PARTS;
  if (threadIdx.x == 0 && later < p.num_tokens) {
    prefetch_line(p.positions + later);
    prefetch_line(p.seq_ids + later);
  }
  int32_t seq_id = __ldg(p.seq_ids + token), position = __ldg(p.positions + token);
  if (seq_id < 0 || seq_id >= p.num_seqs) return;
  int64_t start = page_record(p.block_tables, seq_id, position, p.max_blocks, p.block_size,
                              p.num_blocks, p.block_bytes, p.record_bytes);
  if (start < 0) return;
  int64_t index = item % PARTS;
  uint8_t* part = p.pool + p.layer_offset + start + index * p.part_bytes;
  encode_part((index == 0 ? p.k : p.v) + token * PART_DIMS, (const double2*)p.table, position,
              index == 0, p.amax_floor, rotation[warp], RecordPlace{part, part + p.value_bytes},
              lane);
}
