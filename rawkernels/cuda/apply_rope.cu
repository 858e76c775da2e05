// apply_rope: rotates the last ROPE_DIMS of every head by the token's position.
// grid (num_tokens * head_groups); block 256 threads: one token, up to GROUP_HEADS heads
// in   x bf16 or float32 (X_BF16) [num_tokens, num_heads, HEAD_DIM]; positions int32 [num_tokens];
//      table float64 [rows, ROPE_DIMS / 2, 2]
// out  out like x; may be x itself, then only the rotated dims are touched
// needs x and out at multiples of 16 bytes and whole vectors on both sides of a pair, unless
//       LANE_DIMS is 1
// bound by memory: 4 B an element of bf16; the (cos, sin) of a token are made once a thread block
#include "apply_rope_params.cuh"
#include "memory.cuh"
#include "rope.cuh"

static_assert(ROPE_DIMS > 0 && ROPE_DIMS % 2 == 0 && ROPE_DIMS <= HEAD_DIM, "dims to rotate");
static_assert(X_BF16 == 0 || X_BF16 == 1, "x is float32 or bf16");
static_assert(LANE_DIMS == 1 || LANE_DIMS == (X_BF16 ? 8 : 4), "16 bytes, or one element");
static_assert(sizeof(ApplyRopeParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 256;
constexpr int NUM_PAIRS = ROPE_DIMS / 2;
constexpr int START = HEAD_DIM - ROPE_DIMS;  // first rotated element of a head
constexpr int COPY_ITEMS = START / LANE_DIMS;
constexpr int COPY_DIVISOR = COPY_ITEMS > 0 ? COPY_ITEMS : 1;  // never used where there are none
// Pairs that a thread rotates at once. Adjacent: those of one vector; half: those of two.
constexpr int ITEM_PAIRS = LANE_DIMS == 1 ? 1 : (ROPE_ADJACENT ? LANE_DIMS / 2 : LANE_DIMS);
constexpr int ROPE_ITEMS = NUM_PAIRS / ITEM_PAIRS;
static_assert(START % LANE_DIMS == 0 && NUM_PAIRS % ITEM_PAIRS == 0, "whole items");

#if X_BF16
typedef uint16_t Element;
__device__ __forceinline__ float value_of(Element bits) { return bf16_float(bits); }
__device__ __forceinline__ Element element_of(float x) { return float_bf16(x); }
#else
typedef float Element;
__device__ __forceinline__ float value_of(Element x) { return x; }
__device__ __forceinline__ Element element_of(float x) { return x; }
#endif

struct alignas(LANE_DIMS * sizeof(Element)) Vector {
  Element e[LANE_DIMS];
};

// Rotates pairs first .. first + ITEM_PAIRS - 1 of one head; all are read before any is written.
__device__ __forceinline__ void rotate_item(const Element* x, Element* out, int first,
                                            const float2* rotation) {
  if constexpr (ROPE_ADJACENT && LANE_DIMS > 1) {
    Vector v = *(const Vector*)(x + START + 2 * first);
#pragma unroll
    for (int i = 0; i < ITEM_PAIRS; i++) {
      float x0 = value_of(v.e[2 * i]), x1 = value_of(v.e[2 * i + 1]);
      v.e[2 * i] = element_of(rotated_first(x0, x1, rotation[first + i]));
      v.e[2 * i + 1] = element_of(rotated_second(x0, x1, rotation[first + i]));
    }
    *(Vector*)(out + START + 2 * first) = v;
  } else {
    int at = START + (ROPE_ADJACENT ? 2 * first : first);
    int other = at + (ROPE_ADJACENT ? 1 : NUM_PAIRS);
    Vector a = *(const Vector*)(x + at), b = *(const Vector*)(x + other);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      float x0 = value_of(a.e[i]), x1 = value_of(b.e[i]);
      a.e[i] = element_of(rotated_first(x0, x1, rotation[first + i]));
      b.e[i] = element_of(rotated_second(x0, x1, rotation[first + i]));
    }
    *(Vector*)(out + at) = a;
    *(Vector*)(out + other) = b;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
apply_rope(const __grid_constant__ ApplyRopeParams p) {
  __shared__ float2 rotation[NUM_PAIRS];
  int64_t token = blockIdx.x / p.head_groups;
  int head = (int)(blockIdx.x % p.head_groups) * p.group_heads;
  int heads = min(p.group_heads, p.num_heads - head);
  int32_t position = __ldg(p.positions + token);
#pragma unroll 1
  for (int pair = threadIdx.x; pair < NUM_PAIRS; pair += THREADS) {
    float2 turned = rope_rotation((const double2*)p.table, NUM_PAIRS, position, pair);
    rotation[pair] = make_float2(turned.x, p.inverse ? -turned.y : turned.y);
  }
  __syncthreads();

  int64_t base = (token * p.num_heads + head) * HEAD_DIM;
  const Element* x = (const Element*)p.x + base;
  Element* out = (Element*)p.out + base;
  int copy_items = p.x == p.out ? 0 : COPY_ITEMS;
#pragma unroll 1
  for (int item = threadIdx.x; item < heads * copy_items; item += THREADS) {
    int64_t at = (int64_t)(item / COPY_DIVISOR) * HEAD_DIM + item % COPY_DIVISOR * LANE_DIMS;
    *(Vector*)(out + at) = *(const Vector*)(x + at);
  }
#pragma unroll 1
  for (int item = threadIdx.x; item < heads * ROPE_ITEMS; item += THREADS) {
    int64_t at = (int64_t)(item / ROPE_ITEMS) * HEAD_DIM;
    rotate_item(x + at, out + at, item % ROPE_ITEMS * ITEM_PAIRS, rotation);
  }
}
