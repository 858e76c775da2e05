// encode_records: vectors of new tokens to whole records in a buffer.
// grid (div_ceil(num_tokens * PARTS, WARPS)); block 256 threads, one warp a part of a record
// in   k, v bf16 or fp16 [num_tokens, KV_HEADS, HEAD_DIM]; positions int32 [num_tokens]; table
//      float64 [rows, pairs, 2]
// out  out uint8 [num_tokens, PARTS * part_bytes]: each part its values, then its scales
// needs k and v at multiples of 16 bytes where HEAD_DIM % 8 == 0; latent records take k alone
// bound by memory: 1024 B in and 528 B out a token at HEAD_DIM 512; the rotation's tables (512 B a
//       token for its fine digit) come from L2, its float64 products cost a third of the time
#include "encode.cuh"
#include "encode_records_params.cuh"

static_assert(sizeof(EncodeParams) == PARAMS_BYTES, "the launcher's dtype");

extern "C" __global__ void __launch_bounds__(32 * WARPS)
encode_records(const __grid_constant__ EncodeParams p) {
  __shared__ float2 rotation[WARPS][TABLE_PAIRS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t item = (int64_t)blockIdx.x * WARPS + warp;
  int64_t token = item / PARTS;
  if (token >= p.num_tokens) return;
  int64_t later = (item + ITEMS_AHEAD) / PARTS;
  if (ROPE_DIMS > 0 && threadIdx.x == 0 && later < p.num_tokens) prefetch_line(p.positions + later);
  bool is_key = item % PARTS == 0;
  int32_t position = ROPE_DIMS > 0 && is_key ? __ldg(p.positions + token) : 0;
  uint8_t* part = p.out + item * p.part_bytes;
  encode_part((is_key ? p.k : p.v) + token * PART_DIMS, (const double2*)p.table, position, is_key,
              p.amax_floor, rotation[warp], RecordPlace{part, part + p.value_bytes}, lane);
}
