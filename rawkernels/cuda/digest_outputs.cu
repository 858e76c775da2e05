// digest_outputs: adds to each token's digest the keyed products of its words, mod 2^64; the
// formula is in rawkernels/reference/digest_outputs.py.
// grid (num_tokens * token_parts); block 256 threads over a part of one token
// in   out bf16 [num_tokens, width]
// out  digests uint64 [num_tokens], added to; sums commute, so the order of blocks does not show
// needs out at a multiple of 16 bytes and width % 8 == 0, unless VECTOR is 0
// bound by memory: 2 B an element; about 6 instructions an element, most of them for the keys
#include "digest_outputs_params.cuh"
#include "hash.cuh"
#include "memory.cuh"

static_assert(VECTOR == 0 || VECTOR == 1, "VECTOR is a switch");
static_assert(sizeof(DigestParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = 4;           // vectors of a thread, all loaded before the first is used
constexpr int VECTOR_ELEMENTS = 8;  // two terms
constexpr int PART_WIDTH = ROUNDS * THREADS * VECTOR_ELEMENTS;
static_assert(PART_WIDTH == LAUNCH_PART_WIDTH, "the launcher's grid");

// Elements e .. e + 7 of a row, zeros behind its end.
__device__ __forceinline__ uint4 load_elements(const uint16_t* row, int e, int width) {
  if constexpr (VECTOR) {
    return e < width ? load_early((const uint4*)(row + e)) : make_uint4(0, 0, 0, 0);
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < VECTOR_ELEMENTS; i++)
      if (e + i < width) words[i / 2] |= (uint32_t)__ldg(row + e + i) << (16 * (i % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Words `word` and `word` + 1, with values a and b; 0 behind the row's end, without a branch.
__device__ __forceinline__ uint64_t term(PairKey key, uint32_t word, uint32_t a, uint32_t b,
                                         bool inside) {
  uint32_t first = inside ? a + pair_hash(key, word) : 0;
  return (uint64_t)first * (b + pair_hash(key, word + 1));
}

extern "C" __global__ void __launch_bounds__(THREADS)
digest_outputs(const __grid_constant__ DigestParams p) {
  __shared__ uint64_t warp_sum[WARPS];
  int64_t token = blockIdx.x / p.token_parts;
  int begin = (int)(blockIdx.x % p.token_parts) * PART_WIDTH + threadIdx.x * VECTOR_ELEMENTS;
  const uint16_t* row = p.out + token * p.width;

  uint4 raw[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++)
    raw[r] = load_elements(row, begin + r * THREADS * VECTOR_ELEMENTS, p.width);

  PairKey key = pair_key(p.layer_key);
  uint64_t sum = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int e = begin + r * THREADS * VECTOR_ELEMENTS;
    uint32_t word = (uint32_t)(e / 2);
    sum += term(key, word, raw[r].x, raw[r].y, e < p.width);
    sum += term(key, word + 2, raw[r].z, raw[r].w, e + VECTOR_ELEMENTS / 2 < p.width);
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
