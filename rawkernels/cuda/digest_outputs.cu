// digest_outputs: adds to each token's digest the hash of every element's place and bits, mod 2^64.
// grid (num_tokens * token_parts); block 256 threads over a part of one token
// in   out bf16 [num_tokens, width]
// out  digests uint64 [num_tokens], added to; sums commute, so the order of blocks does not show
// needs out at a multiple of 16 bytes and width % 8 == 0, unless VECTOR is 0
// bound by integer issue: about 25 instructions an element (two 64-bit products), twice the memory
//       time
#include "digest_outputs_params.cuh"
#include "hash.cuh"
#include "memory.cuh"

static_assert(VECTOR == 0 || VECTOR == 1, "VECTOR is a switch");
static_assert(sizeof(DigestParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int STEP = VECTOR ? 8 : 1;

__device__ __forceinline__ uint64_t element_hash(uint64_t layer_bits, int e, uint32_t bits) {
  return splitmix64(layer_bits ^ ((uint64_t)e << 16) ^ bits);
}

extern "C" __global__ void __launch_bounds__(THREADS)
digest_outputs(const __grid_constant__ DigestParams p) {
  __shared__ uint64_t warp_sum[WARPS];
  int64_t token = blockIdx.x / p.token_parts;
  int begin = (int)(blockIdx.x % p.token_parts) * p.part_width;
  int end = min(begin + p.part_width, p.width);
  const uint16_t* row = p.out + token * p.width;
  uint64_t layer_bits = p.layer << 48;

  uint64_t sum = 0;
  for (int e = begin + threadIdx.x * STEP; e < end; e += THREADS * STEP) {
    if constexpr (VECTOR) {
      uint4 raw = load_once((const uint4*)(row + e));
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum += element_hash(layer_bits, e + 2 * i, words[i] & 0xFFFFu);
        sum += element_hash(layer_bits, e + 2 * i + 1, words[i] >> 16);
      }
    } else {
      sum += element_hash(layer_bits, e, row[e]);
    }
  }

  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; w++) sum += warp_sum[w];
    atomicAdd(p.digests + token, sum);
  }
}
