// seeded_activations: pseudo-random bf16 rows, a pure function of (seed, layer, token, position).
// grid (div_ceil(num_row_groups * row_parts, WARPS)); block 256 threads; a warp makes one part of
//      group_rows rows, at most 32
// in   token_ids, positions int32 [num_rows]
// out  out bf16 [num_rows, width]
// needs out at a multiple of 16 bytes and width % 8 == 0, unless VECTOR is 0
// bound by memory (2 B an element) on sm_90: about 8 instructions an element, half of what the
//       memory time leaves; row keys are made once a warp, one lane a row
#include "hash.cuh"
#include "memory.cuh"
#include "seeded_activations_params.cuh"

static_assert(VECTOR == 0 || VECTOR == 1, "VECTOR is a switch");
static_assert(sizeof(SeededParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int WARPS = 8;
constexpr int STEP = VECTOR ? 8 : 2;  // elements that a lane makes at once, whole pairs
constexpr int ROUNDS = 4;             // steps of a lane in a row
constexpr int PART_WIDTH = ROUNDS * 32 * STEP;
static_assert(PART_WIDTH == LAUNCH_PART_WIDTH, "the launcher's grid");

// Elements e .. e + STEP - 1 of a row; the last pair of an odd width is half used.
__device__ __forceinline__ void make_elements(PairKey key, int e, int width, uint16_t* row) {
  uint32_t words[STEP / 2];
#pragma unroll
  for (int i = 0; i < STEP / 2; i++) {
    float even, odd;
    pair_values(pair_hash(key, (uint32_t)(e / 2) + i), even, odd);
    // Both are exact in bf16, so the upper halves of the float32 are the result.
    words[i] = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x7632);
  }
  if constexpr (VECTOR) {
    *(uint4*)(row + e) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    row[e] = (uint16_t)words[0];
    if (e + 1 < width) row[e + 1] = (uint16_t)(words[0] >> 16);
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
seeded_activations(const __grid_constant__ SeededParams p) {
  int lane = threadIdx.x % 32;
  int64_t warp = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  int64_t first_row = warp / p.row_parts * p.group_rows;
  int rows = (int)min((int64_t)p.group_rows, p.num_rows - first_row);
  if (rows <= 0) return;
  int begin = (int)(warp % p.row_parts) * PART_WIDTH + lane * STEP;

  uint64_t own_key = 0;  // lane l: key of row l
  if (lane < rows) {
    int64_t row = first_row + lane;
    own_key = row_key(p.seed, p.layer, __ldg(p.token_ids + row), __ldg(p.positions + row));
  }
  for (int r = 0; r < rows; r++) {
    PairKey key = pair_key(__shfl_sync(0xFFFFFFFFu, own_key, r));
    uint16_t* row = p.out + (first_row + r) * p.width;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      int e = begin + i * 32 * STEP;
      if (e < p.width) make_elements(key, e, p.width, row);
    }
  }
}
