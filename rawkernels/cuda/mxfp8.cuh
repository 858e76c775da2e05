// MXFP8 codec: E4M3 elements and one E8M0 scale a block (OCP MX v1.0). Integer and bit operations
// on float32, so that the host build of this file, which the tests check over all inputs, gives the
// device's bits. Needs denormals (the compiler's default) and exact products by powers of two.
#pragma once
#include "common.cuh"

static_assert(E4M3_MAX >= 256.0f && E4M3_MAX < 512.0f, "E4M3_MAX lies in the binade of 2^8");
static_assert(E4M3_NAN_BYTE == 0x7F, "E4M3: all bits below the sign set is NaN");
static_assert(E8M0_BIAS == 127, "E8M0 codes are float32 exponent fields");
static_assert(E8M0_NAN_BYTE == 255 && E8M0_MAX_CODE == 254, "E8M0: 255 is NaN");

constexpr int E4M3_MAX_EXPONENT = 8;  // 448 = 1.75 * 2^8
constexpr int E4M3_BIAS = 7;
constexpr uint32_t E4M3_MAX_BYTE = E4M3_NAN_BYTE - 1;
constexpr uint32_t ABS_MASK = 0x7FFFFFFFu;
constexpr uint32_t FLOAT_INF = 0x7F800000u;
constexpr int FLOAT_MANTISSA_BITS = 23;
constexpr int E4M3_MANTISSA_BITS = 3;
constexpr int DROPPED_BITS = FLOAT_MANTISSA_BITS - E4M3_MANTISSA_BITS;
// Mantissa field of 448: an amax beyond it in its binade needs the next scale under `ceil`.
constexpr uint32_t E4M3_MAX_MANTISSA = (uint32_t)((E4M3_MAX / 256.0f - 1.0f) * 8388608.0f);

// Scale code of a block from the bits of its largest magnitude (sign cleared, amax_floor applied).
// NaN (bits beyond infinity) gives E8M0_NAN_BYTE, infinity E8M0_MAX_CODE.
template <bool Ceil>
HD uint32_t scale_code(uint32_t amax_bits) {
  if (amax_bits > FLOAT_INF) return E8M0_NAN_BYTE;
  if (amax_bits == FLOAT_INF) return E8M0_MAX_CODE;
  int code = (int)(amax_bits >> FLOAT_MANTISSA_BITS) - E4M3_MAX_EXPONENT;
  if (Ceil) code += (amax_bits & 0x007FFFFFu) > E4M3_MAX_MANTISSA ? 1 : 0;
  return code < 0 ? 0u : (uint32_t)code;
}

// 2^(code - 127); code 0 is a denormal, code 255 NaN.
HD float scale_value(uint32_t code) {
  if (code == E8M0_NAN_BYTE) return bits_float(0x7FC00000u);
  return bits_float(code == 0 ? 0x00400000u : code << FLOAT_MANTISSA_BITS);
}

// 2^(127 - code) for codes 0..254, exact; code 254 gives a denormal.
HD float inverse_scale(uint32_t code) {
  uint32_t field = 2 * E8M0_BIAS - code;
  return bits_float(field == 0 ? 0x00400000u : field << FLOAT_MANTISSA_BITS);
}

// Round to nearest even, saturate at +-448 (infinities too); NaN gives 0x7F.
HD uint8_t e4m3_encode(float x) {
  uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & ABS_MASK;
  if (magnitude > FLOAT_INF) return E4M3_NAN_BYTE;
  if (magnitude >= float_bits(E4M3_MAX)) return (uint8_t)(sign | E4M3_MAX_BYTE);
  if (magnitude < (uint32_t)(127 - E4M3_BIAS + 1) << FLOAT_MANTISSA_BITS) {
    // Below 2^-6 elements are multiples of 2^-9. Adding 2^23 to x * 2^9 rounds it to an integer in
    // the low mantissa bits; the product is exact, so contraction changes nothing.
    float shifted = bits_float(magnitude) * 512.0f + 8388608.0f;
    return (uint8_t)(sign | (float_bits(shifted) & 0xFFu));
  }
  uint32_t even = (magnitude >> DROPPED_BITS) & 1u;
  uint32_t rounded = (magnitude + ((1u << (DROPPED_BITS - 1)) - 1u) + even) >> DROPPED_BITS;
  uint32_t byte = rounded - ((uint32_t)(127 - E4M3_BIAS) << E4M3_MANTISSA_BITS);
  return (uint8_t)(sign | (byte > E4M3_MAX_BYTE ? E4M3_MAX_BYTE : byte));
}

HD float e4m3_decode(uint32_t byte) {
  if ((byte & 0x7Fu) == E4M3_NAN_BYTE) return bits_float(0x7FC00000u);
  // The seven bits below the sign, read as a float32 exponent and mantissa, are 2^(7 - 127) too
  // small; the product is exact for subnormals as well.
  uint32_t bits = ((byte & 0x7Fu) << DROPPED_BITS) | ((byte & 0x80u) << 24);
  return bits_float(bits) * bits_float((uint32_t)(127 + 127 - E4M3_BIAS) << FLOAT_MANTISSA_BITS);
}

#if defined(__CUDACC__)
// Four elements in one word, the first in the lowest byte. From sm_89 on there is an instruction
// for it, with the same rule as e4m3_encode.
__device__ __forceinline__ uint32_t e4m3_encode4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return (uint32_t)low | ((uint32_t)high << 16);
#else
  return (uint32_t)e4m3_encode(a) | ((uint32_t)e4m3_encode(b) << 8) |
         ((uint32_t)e4m3_encode(c) << 16) | ((uint32_t)e4m3_encode(d) << 24);
#endif
}

constexpr int CHUNK = 8;                        // elements that one lane holds
constexpr int BLOCK_LANES = MX_BLOCK / CHUNK;  // neighbouring lanes that share a block

__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a & 0xFFFF0000u, b & 0xFFFF0000u);
#endif
}

// The largest of four neighbouring lanes, which share a block; all lanes of the warp take part.
__device__ __forceinline__ uint32_t block_max(uint32_t amax) {
  static_assert(BLOCK_LANES == 4, "the two shuffles join four lanes");
  amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  return max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
}

// Element bytes of a lane under the scale code of its block.
__device__ __forceinline__ void scale_chunk(const float (&x)[CHUNK], uint32_t code,
                                            uint32_t (&words)[2]) {
  if (code == E8M0_NAN_BYTE) {
    words[0] = words[1] = E4M3_NAN_BYTE * 0x01010101u;
    return;
  }
  float inverse = inverse_scale(code);
  words[0] = e4m3_encode4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
  words[1] = e4m3_encode4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse);
}

// Eight elements of a lane, a fourth of a block: all 32 lanes of the warp take part. Fills `words`
// with the element bytes and returns the block's scale code in each of its lanes.
template <bool Ceil>
__device__ __forceinline__ uint32_t encode_chunk(const float (&x)[CHUNK], uint32_t floor_bits,
                                                 uint32_t (&words)[2]) {
  uint32_t amax = floor_bits;
#pragma unroll
  for (int i = 0; i < CHUNK; i++) amax = max(amax, __float_as_uint(x[i]) & ABS_MASK);
  uint32_t code = scale_code<Ceil>(block_max(amax));
  scale_chunk(x, code, words);
  return code;
}

// The same for four pairs of bf16. The bits of their magnitudes are in order, as float32's are.
template <bool Ceil>
__device__ __forceinline__ uint32_t encode_pairs(const uint32_t (&pairs)[CHUNK / 2],
                                                 uint32_t floor_bits, uint32_t (&words)[2]) {
  constexpr uint32_t PAIR_ABS = 0x7FFF7FFFu;
  uint32_t larger = max_u16x2(max_u16x2(pairs[0] & PAIR_ABS, pairs[1] & PAIR_ABS),
                              max_u16x2(pairs[2] & PAIR_ABS, pairs[3] & PAIR_ABS));
  uint32_t amax = max(larger << 16, larger & 0xFFFF0000u);
  uint32_t code = scale_code<Ceil>(max(block_max(amax), floor_bits));
  float x[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK / 2; i++) {
    x[2 * i] = low_bf16(pairs[i]);
    x[2 * i + 1] = high_bf16(pairs[i]);
  }
  scale_chunk(x, code, words);
  return code;
}
#endif
