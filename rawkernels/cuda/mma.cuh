// The warp-wide tensor-core instructions of sm_80 and later, and the packed arithmetic that feeds
// them. The inline PTX of the portable attention kernels is here, and their copies' in tile_ptx.cuh
// and async_copy.cuh.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   A 16 x 16  a[0] row g, k 2t, 2t+1;  a[1] row g+8, the same k;  a[2] row g, k 8+2t, 8+2t+1;
//              a[3] row g+8, the same k
//   B 16 x 8   b[0] column g, k 2t, 2t+1;  b[1] column g, k 8+2t, 8+2t+1
//   D 16 x 8   d[0], d[1] row g, columns 2t, 2t+1;  d[2], d[3] row g+8, the same columns
// The element with the smaller index is in the lower half of a register.
#pragma once
#include "common.cuh"

// Address of a shared object as the 32-bit number that ldmatrix takes.
__device__ __forceinline__ uint32_t shared_address(const void* object) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(object));
}

// d += a b, bf16 operands, float32 sums.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with fp16 operands.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8
// (16 bytes, aligned to 16); r[i] is then row g, elements 2t and 2t+1 of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same with each matrix transposed: r[i] is rows 2t and 2t+1 of column g of matrix i.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Barrier of `threads` threads of the block (whole warps) under an id of 1..15; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Product of two pairs of bf16, one rounding, subnormals kept. sm_80 has no bf16 multiply, and a
// sum with -0 changes no product, not even the sign of a zero.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// Two fp16 in one word, `low` in the lower half, to nearest even.
__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Bytes 0, 1 (HALF 0) or 2, 3 (HALF 1) of a word, each sign-extended to 16 bits.
template <int HALF>
__device__ __forceinline__ uint32_t sign_extend_bytes(uint32_t word) {
  uint32_t halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(word), "n"(HALF ? 0xB3A2 : 0x9180));
  return halves;
}

// 2^x, about 2 ulp; -inf gives 0, NaN stays.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, about 1 ulp; 0 gives infinity, infinity 0, NaN stays.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
