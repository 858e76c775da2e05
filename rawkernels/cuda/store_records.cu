// store_records: records from a buffer to their rings, byte for byte.
// grid (div_ceil(num_tokens, BLOCK_TOKENS)); block 128 threads over the pieces of BLOCK_TOKENS
//       records
// in   records uint8 [num_tokens, RECORD_UNITS * UNIT_BYTES]; state_ids, positions int32
//      [num_tokens]; places int32 [num_tokens], null without a stage
// out  slab uint8 [num_state_slots * slot_bytes]: one record a token, whole or in two planes;
//      stage uint8 [num_places * slot_bytes], likewise by places
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

// Bytes of a slab where the values and the scales of a block's records go; -1 for none.
struct Targets {
  int64_t value[BLOCK_TOKENS], scale[BLOCK_TOKENS];
};

__device__ __forceinline__ void find_targets(Targets& at, const StoreRecordsParams& p,
                                             const int32_t* state_ids, int32_t num_slots,
                                             int64_t first, int tokens) {
#pragma unroll 1
  for (int t = threadIdx.x; t < tokens; t += THREADS) {
    int64_t token = first + t;
    bool stored = is_stored(state_ids, p.positions, token, p.num_tokens, p.ring_len, p.sink_tokens,
                            num_slots);
    int64_t slot = __ldg(state_ids + token) * p.slot_bytes;
    int64_t index = ring_index(__ldg(p.positions + token), p.ring_len, p.sink_tokens);
    at.value[t] = stored ? slot + p.value_offset + index * p.value_stride : -1;
    at.scale[t] = slot + p.scale_offset + index * p.scale_stride;
  }
}

__device__ __forceinline__ void put(Unit raw, uint8_t* slab, const Targets& at, int t, int u) {
  if (at.value[t] < 0) return;
  int part = u / PART_UNITS, w = u % PART_UNITS;
  int value = part * VALUE_UNITS + w, scale = part * SCALE_UNITS + w - VALUE_UNITS;
  int64_t byte = w < VALUE_UNITS ? at.value[t] + value * UNIT_BYTES
                                 : at.scale[t] + scale * UNIT_BYTES;
  *(Unit*)(slab + byte) = raw;
}

extern "C" __global__ void __launch_bounds__(THREADS)
store_records(const __grid_constant__ StoreRecordsParams p) {
  __shared__ Targets at[2];  // in the slab, and in the stage
  int64_t first = (int64_t)blockIdx.x * BLOCK_TOKENS;
  int tokens = (int)min((int64_t)BLOCK_TOKENS, p.num_tokens - first);
  const Unit* from = (const Unit*)p.records + first * RECORD_UNITS;

  Unit raw[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    if (unit < tokens * RECORD_UNITS) raw[r] = load_early(from + unit);
  }

  int sides = p.places ? 2 : 1;
#pragma unroll 1
  for (int side = 0; side < sides; side++)
    find_targets(at[side], p, side ? p.places : p.state_ids,
                 side ? p.num_places : p.num_state_slots, first, tokens);
  __syncthreads();

#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    if (unit >= tokens * RECORD_UNITS) break;
    int t = unit / RECORD_UNITS, u = unit % RECORD_UNITS;
    put(raw[r], p.slab, at[0], t, u);
    if (p.places) put(raw[r], p.stage, at[1], t, u);
  }
}
