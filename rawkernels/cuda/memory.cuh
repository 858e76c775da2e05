// Global memory in pieces of 1 to 16 bytes.
#pragma once
#include "common.cuh"

// The unsigned type of BYTES bytes.
template <int BYTES> struct UnitOf;
template <> struct UnitOf<1> { typedef uint8_t type; };
template <> struct UnitOf<2> { typedef uint16_t type; };
template <> struct UnitOf<4> { typedef uint32_t type; };
template <> struct UnitOf<8> { typedef uint2 type; };
template <> struct UnitOf<16> { typedef uint4 type; };

// Loads of data that the kernel does not write. They stay where they are written, ahead of what
// uses them, so that all of a thread's are in flight at once; the compiler sinks __ldg to save
// registers.
// No hint: L1::no_allocate, L1::evict_first and .cs each cost 8 % of the memory rate on an H200.
__device__ __forceinline__ uint4 load_early(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_early(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t load_early(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint16_t load_early(const uint16_t* p) { return __ldg(p); }
__device__ __forceinline__ uint8_t load_early(const uint8_t* p) { return __ldg(p); }

// Asks for the line of an address to be brought into L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// Writes WORDS words to `to`, which is a multiple of BYTES, in pieces of BYTES.
template <int BYTES, int WORDS>
__device__ __forceinline__ void store_words(uint8_t* to, const uint32_t (&words)[WORDS]) {
  static_assert(BYTES <= 4 * WORDS, "a piece is no larger than the data");
  if constexpr (BYTES == 16) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
      *(uint4*)(to + 4 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
  } else if constexpr (BYTES == 8) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) *(uint2*)(to + 4 * i) = make_uint2(words[i], words[i + 1]);
  } else {
    typedef typename UnitOf<BYTES>::type Unit;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i += BYTES)
      *(Unit*)(to + i) = (Unit)(words[i / 4] >> (8 * (i % 4)));
  }
}
