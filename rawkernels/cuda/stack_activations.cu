// stack_activations: inputs of a layer from the attention output of the layer before, mixed with
// the counter hash: q[t,h,d] = 0.5 hash + previous[t, (h+1) % H, d], kv[t,d] = 0.5 hash +
// previous[t, d % H, d].
// grid (num_tokens * token_parts); block 256 threads over the lane steps of a token's q, then its
//       kv
// in   previous bf16 [num_tokens, num_heads, head_dim]; token_ids, positions int32 [num_tokens]
// out  q bf16 [num_tokens, num_heads, head_dim]; kv bf16 [num_tokens, head_dim]
// needs all three at multiples of 16 bytes and head_dim % 8 == 0, unless VECTOR is 0
// bound by memory: 4 B an element of q
#include "hash.cuh"
#include "memory.cuh"
#include "stack_activations_params.cuh"

static_assert(VECTOR == 0 || VECTOR == 1, "VECTOR is a switch");
static_assert(sizeof(StackParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 256;
constexpr int STEP = VECTOR ? 8 : 1;  // elements of a lane step; they lie in one head

// Hash value of element e of a row, from the pair it belongs to.
__device__ __forceinline__ float hash_value(uint64_t key, int e) {
  float even, odd;
  pair_values(pair_hash(key, (uint32_t)(e / 2)), even, odd);
  return e % 2 == 0 ? even : odd;
}

__device__ __forceinline__ uint16_t mixed(float hashed, uint16_t before) {
  return float_bf16(0.5f * hashed + bf16_float(before));  // the product is exact, one rounding
}

// q: eight elements of one head, all from the same head of `previous`.
__device__ __forceinline__ uint4 mixed_vector(uint64_t key, int e, uint4 before) {
  const uint32_t from[4] = {before.x, before.y, before.z, before.w};
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float even, odd;
    pair_values(pair_hash(key, (uint32_t)(e / 2) + i), even, odd);
    words[i] = (uint32_t)mixed(even, (uint16_t)from[i]) |
               ((uint32_t)mixed(odd, (uint16_t)(from[i] >> 16)) << 16);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
stack_activations(const __grid_constant__ StackParams p) {
  __shared__ uint64_t keys[2];  // of kv, of q
  int64_t token = blockIdx.x / p.token_parts;
  int begin = (int)(blockIdx.x % p.token_parts) * p.part_width;
  int q_width = p.num_heads * p.head_dim;
  int end = min(begin + p.part_width, q_width + p.head_dim);
  if (threadIdx.x < 2)
    keys[threadIdx.x] = row_key(2 * p.seed + threadIdx.x, p.layer, __ldg(p.token_ids + token),
                                __ldg(p.positions + token));
  __syncthreads();

  const uint16_t* before = p.previous + token * q_width;
  uint16_t* q = p.q + token * q_width;
  uint16_t* kv = p.kv + token * p.head_dim;
  for (int e = begin + threadIdx.x * STEP; e < end; e += THREADS * STEP) {
    if (e < q_width) {
      int head = e / p.head_dim, d = e % p.head_dim;
      int from = (head + 1 == p.num_heads ? 0 : head + 1) * p.head_dim + d;
      if constexpr (VECTOR) {
        *(uint4*)(q + e) = mixed_vector(keys[1], e, __ldg((const uint4*)(before + from)));
      } else {
        q[e] = mixed(hash_value(keys[1], e), __ldg(before + from));
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      int d = e - q_width + i;
      int from = d % p.num_heads * p.head_dim + d;
      kv[d] = mixed(hash_value(keys[0], d), __ldg(before + from));
    }
  }
}
