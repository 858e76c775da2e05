// apply_rope: rotates the last ROPE_DIMS of every head by the token's position.
// grid (num_tokens * head_groups); block 128 threads: one token, up to GROUP_HEADS heads
// in   x bf16 or float32 (X_BF16) [num_tokens, num_heads, HEAD_DIM]; positions int32 [num_tokens];
//      table float64 [rows, ROPE_DIMS / 2, 2]
// out  out like x; may be x itself, then only the rotated dims are touched
// needs x and out at multiples of 16 bytes and whole vectors on both sides of a pair, unless
//       LANE_DIMS is 1
// bound by memory: 4 B an element of bf16. The (cos, sin) of a token are made once a thread block,
//       while its vectors are in flight; small blocks keep the addresses in flight close together.
#include "apply_rope_params.cuh"
#include "memory.cuh"
#include "rope.cuh"

static_assert(ROPE_DIMS > 0 && ROPE_DIMS % 2 == 0 && ROPE_DIMS <= HEAD_DIM, "dims to rotate");
static_assert(X_BF16 == 0 || X_BF16 == 1, "x is float32 or bf16");
static_assert(LANE_DIMS == 1 || LANE_DIMS == (X_BF16 ? 8 : 4), "16 bytes, or one element");
static_assert(sizeof(ApplyRopeParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 128;
constexpr int TARGET_VECTORS = 2 * THREADS;  // vectors of a block: two a thread
constexpr int NUM_PAIRS = ROPE_DIMS / 2;
constexpr int START = HEAD_DIM - ROPE_DIMS;  // first rotated element of a head
constexpr int HEAD_VECTORS = HEAD_DIM / LANE_DIMS;
constexpr int GROUP_HEADS = HEAD_VECTORS < TARGET_VECTORS ? TARGET_VECTORS / HEAD_VECTORS : 1;
static_assert(GROUP_HEADS == LAUNCH_GROUP_HEADS, "the launcher's grid");
constexpr int ROUNDS = (GROUP_HEADS * HEAD_VECTORS + THREADS - 1) / THREADS;
// Both elements of a pair lie in one vector; else the other one lies this many vectors away.
constexpr bool WHOLE_PAIRS = ROPE_ADJACENT && LANE_DIMS > 1;
constexpr int DISTANCE = ROPE_ADJACENT ? 1 : NUM_PAIRS / LANE_DIMS;
// Blocks wait for a position and then for the table: all 2,048 threads of a multiprocessor hide it.
constexpr int MIN_BLOCKS = WHOLE_PAIRS && ROUNDS <= 2 ? 16 : 1;
static_assert(HEAD_DIM % LANE_DIMS == 0 && START % LANE_DIMS == 0, "whole vectors");
static_assert(LANE_DIMS == 1 || WHOLE_PAIRS || NUM_PAIRS % LANE_DIMS == 0, "whole partners");

typedef UnitOf<LANE_DIMS*(X_BF16 ? 2 : 4)>::type Unit;  // a vector

// A vector as float32, and back. Only what is rotated is taken apart, which keeps registers few.
__device__ __forceinline__ void unpack(uint4 raw, float (&x)[LANE_DIMS]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++)
    x[i] = X_BF16 ? (i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]))
                  : __uint_as_float(words[i % 4]);
}
__device__ __forceinline__ void unpack(uint32_t raw, float (&x)[LANE_DIMS]) {
  x[0] = __uint_as_float(raw);
}
__device__ __forceinline__ void unpack(uint16_t raw, float (&x)[LANE_DIMS]) {
  x[0] = bf16_float(raw);
}
__device__ __forceinline__ void pack(const float (&x)[LANE_DIMS], uint4& raw) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) {
    if (X_BF16) {
      words[i / 2] |= (uint32_t)float_bf16(x[i]) << (16 * (i % 2));
    } else {
      words[i % 4] = __float_as_uint(x[i]);
    }
  }
  raw = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void pack(const float (&x)[LANE_DIMS], uint32_t& raw) {
  raw = __float_as_uint(x[0]);
}
__device__ __forceinline__ void pack(const float (&x)[LANE_DIMS], uint16_t& raw) {
  raw = float_bf16(x[0]);
}

// Whether element START + r of a head is the first of its pair.
__device__ __forceinline__ bool is_first(int r) {
  return ROPE_ADJACENT ? r % 2 == 0 : r < NUM_PAIRS;
}

// The vector whose first element is START + r, rotated; `other` holds the partners of its elements.
__device__ __forceinline__ Unit rotate_vector(Unit own, Unit other, int r, const float2* rotation) {
  float x[LANE_DIMS];
  unpack(own, x);
  if constexpr (WHOLE_PAIRS) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i += 2) {
      float x0 = x[i], x1 = x[i + 1];
      float2 turned = rotation[(r + i) / 2];
      x[i] = rotated_first(x0, x1, turned);
      x[i + 1] = rotated_second(x0, x1, turned);
    }
  } else {
    bool first = is_first(r);
    int pair = ROPE_ADJACENT ? r / 2 : (first ? r : r - NUM_PAIRS);
    float y[LANE_DIMS];
    unpack(other, y);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      float2 turned = rotation[pair + i];
      x[i] = first ? rotated_first(x[i], y[i], turned) : rotated_second(y[i], x[i], turned);
    }
  }
  pack(x, own);
  return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
apply_rope(const __grid_constant__ ApplyRopeParams p) {
  __shared__ float2 rotation[NUM_PAIRS];
  int64_t token = blockIdx.x / p.head_groups;
  int head = (int)(blockIdx.x % p.head_groups) * GROUP_HEADS;
  int vectors = min(GROUP_HEADS, p.num_heads - head) * HEAD_VECTORS;
  int64_t base = (token * p.num_heads + head) * HEAD_VECTORS;
  bool copies = p.x != p.out;  // in place, the elements before START stay as they are

  // All that is read of x is read before the barrier, and written after it: out may be x.
  Unit own[ROUNDS], other[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    int i = round * THREADS + threadIdx.x, r = i % HEAD_VECTORS * LANE_DIMS - START;
    own[round] = other[round] = Unit{};
    if (i >= vectors || (r < 0 && !copies)) continue;
    own[round] = ((const Unit*)p.x + base)[i];
    if (!WHOLE_PAIRS && r >= 0)
      other[round] = ((const Unit*)p.x + base)[is_first(r) ? i + DISTANCE : i - DISTANCE];
  }
#pragma unroll 1
  for (int first = 0; first < NUM_PAIRS; first += THREADS) {
    int pair = first + threadIdx.x;
    if (pair >= NUM_PAIRS) break;
    int32_t position = __ldg(p.positions + token);
    float2 turned = rope_rotation((const double2*)p.table, NUM_PAIRS, position, pair);
    rotation[pair] = make_float2(turned.x, p.inverse ? -turned.y : turned.y);
  }
  __syncthreads();

#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    int i = round * THREADS + threadIdx.x, r = i % HEAD_VECTORS * LANE_DIMS - START;
    if (i >= vectors || (r < 0 && !copies)) continue;
    if (r >= 0) own[round] = rotate_vector(own[round], other[round], r, rotation);
    ((Unit*)p.out + base)[i] = own[round];
  }
}
