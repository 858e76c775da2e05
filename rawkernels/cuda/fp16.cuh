// fp16 as its 16 bits.
#pragma once
#include "common.cuh"

constexpr uint16_t FP16_NAN = 0x7E00;
constexpr uint32_t FP16_INF = 0x7C00;

HD float fp16_float(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  uint32_t magnitude = bits & 0x7FFFu, sign = (uint32_t)(bits & 0x8000u) << 16;
  if (magnitude >= FP16_INF) return bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  // Read as a float32, exponent and mantissa are 2^(15 - 127) too small; the product is exact.
  return bits_float(float_bits(bits_float(magnitude << 13) * bits_float(239u << 23)) | sign);
#endif
}

// Rounds to nearest, ties to even; from 65,520 on it is an infinity. Every NaN becomes 0x7E00, as
// in the other backends, so that stored bytes agree.
HD uint16_t float_fp16(float x) {
  if (x != x) return FP16_NAN;
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#else
  uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x477FF000u) return (uint16_t)(sign | FP16_INF);
  if (magnitude < 0x38800000u) {  // below 2^-14 values are multiples of 2^-24
    float shifted = bits_float(magnitude) * 16777216.0f + 8388608.0f;
    return (uint16_t)(sign | (float_bits(shifted) & 0x7FFu));
  }
  uint32_t rounded = (magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
  return (uint16_t)(sign | (rounded - (112u << 10)));
#endif
}
