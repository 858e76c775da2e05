// stack_activations: inputs of a layer from the attention output of the layer before, mixed with
// the counter hash: q[t,h,d] = 0.5 hash + previous[t, (h+1) % H, d], kv[t,d] = 0.5 hash +
// previous[t, d % H, d].
// grid (num_tokens * head_parts); block 512 threads over part_heads heads of a token's `previous`
// in   previous bf16 [num_tokens, num_heads, head_dim]; token_ids, positions int32 [num_tokens]
// out  q bf16 [num_tokens, num_heads, head_dim]; kv bf16 [num_tokens, head_dim]
// needs all three at multiples of 16 bytes and head_dim % 8 == 0, unless VECTOR is 0
// bound by memory: 4 B an element of q. A block reads each of its heads once, for q and for the
//       elements of kv that come from them: those two bytes at a time, a twentieth of the time.
#include "hash.cuh"
#include "memory.cuh"
#include "stack_activations_params.cuh"

static_assert(VECTOR == 0 || VECTOR == 1, "VECTOR is a switch");
static_assert(sizeof(StackParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 512;
constexpr int STEP = VECTOR ? 8 : 1;  // elements of a thread at once; they lie in one head
constexpr int ROUNDS = 4;             // steps of a thread whose loads are in flight together

// Hash value of element e of a row, from the pair it belongs to.
__device__ __forceinline__ float hash_value(PairKey key, int e) {
  float even, odd;
  pair_values(pair_hash(key, (uint32_t)(e / 2)), even, odd);
  return e % 2 == 0 ? even : odd;
}

__device__ __forceinline__ uint16_t mixed(float hashed, uint16_t before) {
  return float_bf16(0.5f * hashed + bf16_float(before));  // the product is exact, one rounding
}

typedef UnitOf<2 * STEP>::type Unit;  // the elements of one step

// Elements from e on of q's row, from the same elements of another head.
__device__ __forceinline__ void mix_elements(PairKey key, int e, uint4 before, uint16_t* q) {
  const uint32_t from[4] = {before.x, before.y, before.z, before.w};
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float even, odd;
    pair_values(pair_hash(key, (uint32_t)(e / 2) + i), even, odd);
    words[i] = (uint32_t)mixed(even, (uint16_t)from[i]) |
               ((uint32_t)mixed(odd, (uint16_t)(from[i] >> 16)) << 16);
  }
  *(uint4*)(q + e) = make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void mix_elements(PairKey key, int e, uint16_t before, uint16_t* q) {
  q[e] = mixed(hash_value(key, e), before);
}

extern "C" __global__ void __launch_bounds__(THREADS)
stack_activations(const __grid_constant__ StackParams p) {
  __shared__ uint64_t keys[2];  // of kv, of q
  int64_t token = blockIdx.x / p.head_parts;
  int head = (int)(blockIdx.x % p.head_parts) * p.part_heads;  // the first of the block
  int heads = min(p.part_heads, p.num_heads - head);
  int width = p.num_heads * p.head_dim;
  int begin = head * p.head_dim, end = (head + heads) * p.head_dim;
  const uint16_t* before = p.previous + token * width;
  if (threadIdx.x < 2)
    keys[threadIdx.x] = row_key(2 * p.seed + threadIdx.x, p.layer, __ldg(p.token_ids + token),
                                __ldg(p.positions + token));

  for (int first = begin; first < end; first += ROUNDS * THREADS * STEP) {
    Unit raw[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int e = first + (r * THREADS + threadIdx.x) * STEP;
      raw[r] = Unit{};
      if (e < end) raw[r] = load_early((const Unit*)(before + e));
    }
    if (first == begin) __syncthreads();  // the keys are made while the first loads are in flight
    PairKey key = pair_key(keys[1]);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int e = first + (r * THREADS + threadIdx.x) * STEP;
      int to = e < p.head_dim ? e + width - p.head_dim : e - p.head_dim;  // of the head before
      if (e < end) mix_elements(key, to, raw[r], p.q + token * width);
    }
  }

  // kv: element d comes from head d % num_heads.
  PairKey key = pair_key(keys[0]);
  int turns = div_ceil(p.head_dim, p.num_heads);
  for (int i = threadIdx.x; i < heads * turns; i += THREADS) {
    int from = head + i % heads, d = from + i / heads * p.num_heads;
    if (d >= p.head_dim) continue;
    uint16_t element = __ldg(before + from * p.head_dim + d);
    p.kv[token * p.head_dim + d] = mixed(hash_value(key, d), element);
  }
}
