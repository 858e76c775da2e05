// store_records: records from a buffer to their rings, byte for byte.
// grid (div_ceil(num_tokens, BLOCK_TOKENS)); block 128 threads over the pieces of BLOCK_TOKENS
//       records
// in   records uint8 [num_tokens, RECORD_UNITS * UNIT_BYTES]; state_ids, positions int32
//      [num_tokens]
// out  slab uint8 [num_state_slots * slot_bytes]: one record a token, whole or in two planes
// needs every address and stride a multiple of UNIT_BYTES. A token is skipped where its state_id is
//       no slot, its position negative, or a later token of the call takes the same row.
// bound by memory: 528 B in and out a token, in pieces of 16; all of a block's loads are in flight
//       while its rows are looked up
#include "memory.cuh"
#include "ring_rows.cuh"
#include "store_records_params.cuh"

static_assert(RECORD_UNITS % PARTS == 0, "parts are equal");
static_assert(sizeof(StoreRecordsParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 128;
constexpr int TARGET_UNITS = 4 * THREADS;  // pieces of a block: four a thread
constexpr int BLOCK_TOKENS = RECORD_UNITS < TARGET_UNITS ? TARGET_UNITS / RECORD_UNITS : 1;
constexpr int BLOCK_UNITS = BLOCK_TOKENS * RECORD_UNITS;
constexpr int ROUNDS = (BLOCK_UNITS + THREADS - 1) / THREADS;
static_assert(BLOCK_TOKENS == LAUNCH_BLOCK_TOKENS, "the launcher's grid");
constexpr int PART_UNITS = RECORD_UNITS / PARTS;
constexpr int SCALE_UNITS = PART_UNITS - VALUE_UNITS;
static_assert(VALUE_UNITS > 0 && SCALE_UNITS >= 0, "values come first in a part");
typedef UnitOf<UNIT_BYTES>::type Unit;

extern "C" __global__ void __launch_bounds__(THREADS)
store_records(const __grid_constant__ StoreRecordsParams p) {
  __shared__ int64_t value_at[BLOCK_TOKENS];  // byte of the slab where a record's values go, or -1
  __shared__ int64_t scale_at[BLOCK_TOKENS];
  int64_t first = (int64_t)blockIdx.x * BLOCK_TOKENS;
  int tokens = (int)min((int64_t)BLOCK_TOKENS, p.num_tokens - first);
  const Unit* from = (const Unit*)p.records + first * RECORD_UNITS;

  Unit raw[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    if (unit < tokens * RECORD_UNITS) raw[r] = load_early(from + unit);
  }

#pragma unroll 1
  for (int t = threadIdx.x; t < tokens; t += THREADS) {
    int64_t token = first + t;
    bool stored = is_stored(p.state_ids, p.positions, token, p.num_tokens, p.ring_len,
                            p.sink_tokens, p.num_state_slots);
    int64_t slot = __ldg(p.state_ids + token) * p.slot_bytes;
    int64_t index = ring_index(__ldg(p.positions + token), p.ring_len, p.sink_tokens);
    value_at[t] = stored ? slot + p.value_offset + index * p.value_stride : -1;
    scale_at[t] = slot + p.scale_offset + index * p.scale_stride;
  }
  __syncthreads();

#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    if (unit >= tokens * RECORD_UNITS) break;
    int t = unit / RECORD_UNITS, u = unit % RECORD_UNITS;
    if (value_at[t] < 0) continue;
    int part = u / PART_UNITS, w = u % PART_UNITS;
    int value = part * VALUE_UNITS + w, scale = part * SCALE_UNITS + w - VALUE_UNITS;
    int64_t at = w < VALUE_UNITS ? value_at[t] + value * UNIT_BYTES
                                 : scale_at[t] + scale * UNIT_BYTES;
    *(Unit*)(p.slab + at) = raw[r];
  }
}
