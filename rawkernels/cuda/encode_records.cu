// encode_records: vectors of new tokens to whole records in a buffer.
// grid (div_ceil(num_tokens, WARPS)); block 256 threads, one warp a record
// in   kv bf16 [num_tokens, HEAD_DIM]; positions int32 [num_tokens]; table float64 [rows, pairs, 2]
// out  out uint8 [num_tokens, record_bytes]: values, then scales
// needs kv at a multiple of 16 bytes where HEAD_DIM % 8 == 0
// bound by memory: 1024 B in and 528 B out a token at HEAD_DIM 512; the rotation's tables (512 B a
//       token for its fine digit) come from L2, its float64 products cost a third of the time
#include "encode.cuh"
#include "encode_records_params.cuh"

static_assert(sizeof(EncodeParams) == PARAMS_BYTES, "the launcher's dtype");

extern "C" __global__ void __launch_bounds__(32 * WARPS)
encode_records(const __grid_constant__ EncodeParams p) {
  __shared__ float2 rotation[WARPS][TABLE_PAIRS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t token = (int64_t)blockIdx.x * WARPS + warp;
  if (token >= p.num_tokens) return;
  int32_t position = ROPE_DIMS > 0 ? __ldg(p.positions + token) : 0;
  uint8_t* record = p.out + token * p.record_bytes;
  encode_record(p.kv + token * HEAD_DIM, (const double2*)p.table, position, p.amax_floor,
                rotation[warp], RecordPlace{record, record + p.value_bytes}, lane);
}
