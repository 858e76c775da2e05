// Types and small helpers that every kernel shares. No headers from outside: NVRTC is given ours in
// memory and nothing else.
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#include <cstring>
#endif

// HD functions are compiled a second time by g++ in the tests, which check them on the host.
#if defined(__CUDACC__)
#define HD __host__ __device__ __forceinline__
#else
#define HD inline
#endif

static_assert(sizeof(uint8_t) == 1 && sizeof(uint16_t) == 2, "fixed-width types");
static_assert(sizeof(int32_t) == 4 && sizeof(uint32_t) == 4, "fixed-width types");
static_assert(sizeof(int64_t) == 8 && sizeof(uint64_t) == 8, "fixed-width types");

HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// bf16 is handled as its 16 bits; they are the upper half of the float32.
HD float bf16_float(uint16_t bits) { return bits_float((uint32_t)bits << 16); }

// Rounds to nearest, ties to even. Every NaN becomes 0x7FC0, as in the other backends, so that
// stored bytes agree.
constexpr uint16_t BF16_NAN = 0x7FC0;
HD uint16_t float_bf16(float x) {
  if (x != x) return BF16_NAN;
#if defined(__CUDA_ARCH__)
  uint32_t bits;  // the packed form: the single one runs at a quarter of its rate
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(0.0f), "f"(x));
  return (uint16_t)bits;
#else
  uint32_t bits = float_bits(x);
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
}

#if defined(__CUDACC__)
// Two bf16 in one word, `low` (the element with the smaller index) in the lower half. A NaN becomes
// the instruction's own, 0x7FFF; where bytes are stored in a record, use two float_bf16.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000u);
}
#endif

template <typename T>
HD T div_ceil(T size, T step) {
  return (size + step - 1) / step;
}
