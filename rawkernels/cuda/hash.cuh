// The counter hash of seeded activations; its definition is
// rawkernels/reference/activation_hash.py. Also built by g++ for the tests.
#pragma once
#include "common.cuh"

constexpr uint64_t GOLDEN64 = 0x9E3779B97F4A7C15ull;
constexpr uint32_t GOLDEN32 = 0x9E3779B9u;

HD uint64_t splitmix64(uint64_t z) {
  z += GOLDEN64;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Token ids and positions as they are, sign-extended where negative.
HD uint64_t row_key(uint64_t seed, uint64_t layer, int32_t token_id, int32_t position) {
  uint64_t key = splitmix64(seed ^ (layer * GOLDEN64));
  key = splitmix64(key ^ ((uint64_t)(int64_t)token_id * GOLDEN64));
  return splitmix64(key ^ ((uint64_t)(int64_t)position * GOLDEN64));
}

// A key as its pairs use it: x ^= upper; x ^= x >> 16 is x ^ (x >> 16) ^ (upper ^ upper >> 16).
struct PairKey {
  uint32_t lower, folded_upper;
};
HD PairKey pair_key(uint64_t key) {
  uint32_t upper = (uint32_t)(key >> 32);
  return {(uint32_t)key, upper ^ (upper >> 16)};
}

// 32 hashed bits of elements 2 * pair and 2 * pair + 1 of a row.
HD uint32_t pair_hash(PairKey key, uint32_t pair) {
  uint32_t x = key.lower + pair * GOLDEN32;
  x ^= (x >> 16) ^ key.folded_upper;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The two values of a pair, each (byte + byte - 255) / 128, exact in float32 and in bf16. Within
// [2^16, 2^17) a float32's mantissa counts in steps of 1/128, so the sum of two bytes placed there
// is 65536 + sum / 128.
constexpr uint32_t STEP_128TH = 0x47800000u;  // 65536.0f
constexpr float CENTRE = 65536.0f + 255.0f / 128.0f;
HD void pair_values(uint32_t x, float& even, float& odd) {
#if defined(__CUDA_ARCH__)
  even = bits_float(__dp4a(x, 0x00000101u, STEP_128TH)) - CENTRE;  // adds the two lower bytes
  odd = bits_float(__dp4a(x, 0x01010000u, STEP_128TH)) - CENTRE;
#else
  even = bits_float(STEP_128TH + (x & 0xFFu) + (x >> 8 & 0xFFu)) - CENTRE;
  odd = bits_float(STEP_128TH + (x >> 16 & 0xFFu) + (x >> 24)) - CENTRE;
#endif
}
