// load_history: the history section of a joint buffer, gathered from rings by a plan's segments.
// grid (capacity of segments * num_chunks); block 128 threads over the pieces of CHUNK_ROWS rows
// in   slab uint8 [num_state_slots * slot_bytes]; segments int32 [capacity, 3] = source row or -1,
//      destination row, rows; num_segments int32 [1], read here so that no host waits for it
// out  out uint8 [>= num_rows, RECORD_UNITS * UNIT_BYTES]: records whole; rows of no segment are
//      left
// needs every address and stride a multiple of UNIT_BYTES; a segment within one ring. Rows outside
//       the slab become zeros, rows outside the history section are dropped.
// bound by memory: 528 B in and out a row; a few sequences make too few bytes to hide the latency
//       of two dependent loads
#include "load_history_params.cuh"
#include "memory.cuh"

static_assert(RECORD_UNITS % PARTS == 0, "parts are equal");
static_assert(sizeof(LoadHistoryParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 128;
constexpr int TARGET_UNITS = 4 * THREADS;  // pieces of a block: four a thread
constexpr int CHUNK_ROWS = RECORD_UNITS < TARGET_UNITS ? TARGET_UNITS / RECORD_UNITS : 1;
constexpr int CHUNK_UNITS = CHUNK_ROWS * RECORD_UNITS;
constexpr int ROUNDS = (CHUNK_UNITS + THREADS - 1) / THREADS;
static_assert(CHUNK_ROWS == LAUNCH_BLOCK_TOKENS, "the launcher's grid");
constexpr int PART_UNITS = RECORD_UNITS / PARTS;
constexpr int SCALE_UNITS = PART_UNITS - VALUE_UNITS;
static_assert(VALUE_UNITS > 0 && SCALE_UNITS >= 0, "values come first in a part");
typedef UnitOf<UNIT_BYTES>::type Unit;

extern "C" __global__ void __launch_bounds__(THREADS)
load_history(const __grid_constant__ LoadHistoryParams p) {
  int segment = (int)(blockIdx.x / p.num_chunks);
  int first = (int)(blockIdx.x % p.num_chunks) * CHUNK_ROWS;
  int num_segments = __ldg(p.num_segments);  // one wait for all four
  int source = __ldg(p.segments + 3 * (int64_t)segment);
  int target = __ldg(p.segments + 3 * (int64_t)segment + 1);
  int rows = __ldg(p.segments + 3 * (int64_t)segment + 2);
  if (segment >= num_segments || target < 0) return;
  int64_t fits = p.num_rows - target;  // rows that lie inside the history section
  rows = (int)min((int64_t)rows, fits) - first;
  rows = min(rows, CHUNK_ROWS);
  if (rows <= 0) return;

  int state_id = source / p.ring_len, index = source % p.ring_len + first;
  bool is_zero = source < 0 || state_id >= p.num_state_slots || index + rows > p.ring_len;
  const uint8_t* slot = p.slab + state_id * p.slot_bytes;
  const uint8_t* values = slot + p.value_offset + index * p.value_stride;
  const uint8_t* scales = slot + p.scale_offset + index * p.scale_stride;
  Unit* to = (Unit*)p.out + ((int64_t)target + first) * RECORD_UNITS;

  Unit raw[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    raw[r] = Unit{};
    if (unit >= rows * RECORD_UNITS || is_zero) continue;
    int row = unit / RECORD_UNITS, u = unit % RECORD_UNITS;
    int part = u / PART_UNITS, w = u % PART_UNITS;
    const Unit* value = (const Unit*)(values + row * p.value_stride) + part * VALUE_UNITS + w;
    const Unit* scale = (const Unit*)(scales + row * p.scale_stride) + part * SCALE_UNITS;
    raw[r] = load_early(w < VALUE_UNITS ? value : scale + (w - VALUE_UNITS));
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int unit = r * THREADS + threadIdx.x;
    if (unit < rows * RECORD_UNITS) to[unit] = raw[r];
  }
}
