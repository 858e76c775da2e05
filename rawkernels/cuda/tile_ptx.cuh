// Instructions of sm_80 and later that attention over plain arrays needs beside mma.cuh:
// asynchronous copies to shared memory, products of float16, a fast reciprocal.
#pragma once
#include "mma.cuh"

// Starts a copy of 16 bytes to shared memory, both aligned to 16; writes 16 zeros, and reads
// nothing, where `exists` is false. It belongs to the group that the thread commits next.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, bool exists) {
  const int size = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size)
               : "memory");
}

// Closes the group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's newest groups are under way; a barrier must follow
// before other threads' copies are read.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// d += a b, float16 operands, float32 sums; fragments as in mma.cuh.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float16 in one word, `low` in the lower half, to nearest even.
__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 1 / x, about 1 ulp; infinity gives 0, NaN stays.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
