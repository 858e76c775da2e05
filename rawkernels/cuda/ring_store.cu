// ring_store: vectors of new tokens to records in their rings, encoded on the way.
// grid (div_ceil(num_tokens * PARTS, WARPS)); block 256 threads, one warp a part of a record
// in   k, v bf16 or fp16 [num_tokens, KV_HEADS, HEAD_DIM]; state_ids, positions int32 [num_tokens];
//      table float64 [rows, pairs, 2]
// out  slab uint8 [num_state_slots * slot_bytes]: one record a token, whole or in two planes
// needs k and v at multiples of 16 bytes where HEAD_DIM % 8 == 0; latent records take k alone. A
//       token is skipped where its state_id is no slot, its position negative, or a later token of
//       the call takes the same row.
// bound by memory: 1024 B in and 528 B out a token at HEAD_DIM 512; a decode step of a few tokens
//       is bound by latency: two dependent loads, then the rotation
#include "encode.cuh"
#include "ring_rows.cuh"
#include "ring_store_params.cuh"

static_assert(sizeof(RingStoreParams) == PARAMS_BYTES, "the launcher's dtype");

extern "C" __global__ void __launch_bounds__(32 * WARPS)
ring_store(const __grid_constant__ RingStoreParams p) {
  __shared__ float2 rotation[WARPS][TABLE_PAIRS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t item = (int64_t)blockIdx.x * WARPS + warp;
  int64_t token = item / PARTS;
  if (token >= p.num_tokens) return;
  int64_t later = (item + ITEMS_AHEAD) / PARTS;
  if (threadIdx.x == 0 && later < p.num_tokens) {
    prefetch_line(p.positions + later);
    prefetch_line(p.state_ids + later);
  }
  int32_t state_id = __ldg(p.state_ids + token), position = __ldg(p.positions + token);
  if (!is_stored(p.state_ids, p.positions, token, p.num_tokens, p.ring_len, p.sink_tokens,
                 p.num_state_slots))
    return;
  int64_t index = ring_index(position, p.ring_len, p.sink_tokens);
  uint8_t* slot = p.slab + state_id * p.slot_bytes;
  int64_t part = item % PARTS;
  RecordPlace to = {slot + p.value_offset + index * p.value_stride + part * p.value_part_stride,
                    slot + p.scale_offset + index * p.scale_stride + part * p.scale_part_stride};
  encode_part((part == 0 ? p.k : p.v) + token * PART_DIMS, (const double2*)p.table, position,
              part == 0, p.amax_floor, rotation[warp], to, lane);
}
