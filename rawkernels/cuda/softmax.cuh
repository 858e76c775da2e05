// What every softmax needs: base-2 constants, and the reductions over a quad, the four neighbouring
// lanes that hold one row of a product's accumulators.
#pragma once
#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// The score of a key that is not seen.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}
