// Rotation by position. The rule is in layouts/rope.py; stored bytes depend on each rounding.
#pragma once
#include "common.cuh"

static_assert(ROPE_COARSE_ROWS << (ROPE_MIDDLE_BITS + ROPE_FINE_BITS - 20) == 1 << 11,
              "three digits cover every int32 position");

// Product of two unit complex numbers (cos, sin), without contraction.
__device__ __forceinline__ double2 turn(double2 a, double2 b) {
  return make_double2(__dsub_rn(__dmul_rn(a.x, b.x), __dmul_rn(a.y, b.y)),
                      __dadd_rn(__dmul_rn(a.x, b.y), __dmul_rn(a.y, b.x)));
}

// (cos, sin) of pair `pair` at a position; a negative position (padding) counts as 0.
// table: float64 [ROPE_TABLE_ROWS, num_pairs, 2], from rope_table().
__device__ __forceinline__ float2 rope_rotation(const double2* table, int num_pairs,
                                                int32_t position, int pair) {
  uint32_t p = (uint32_t)max(position, 0);
  uint32_t middle_at = ROPE_COARSE_ROWS, fine_at = ROPE_COARSE_ROWS + (1 << ROPE_MIDDLE_BITS);
  uint32_t coarse = p >> (ROPE_MIDDLE_BITS + ROPE_FINE_BITS);
  uint32_t middle = middle_at + ((p >> ROPE_FINE_BITS) & ((1u << ROPE_MIDDLE_BITS) - 1));
  uint32_t fine = fine_at + (p & ((1u << ROPE_FINE_BITS) - 1));
  double2 a = __ldg(table + (int64_t)coarse * num_pairs + pair);
  double2 b = __ldg(table + (int64_t)middle * num_pairs + pair);
  double2 c = __ldg(table + (int64_t)fine * num_pairs + pair);
  double2 both = turn(turn(a, b), c);
  return make_float2(__double2float_rn(both.x), __double2float_rn(both.y));
}

// The two rotated values of a pair, without contraction.
__device__ __forceinline__ float rotated_first(float x0, float x1, float2 rotation) {
  return __fsub_rn(__fmul_rn(x0, rotation.x), __fmul_rn(x1, rotation.y));
}
__device__ __forceinline__ float rotated_second(float x0, float x1, float2 rotation) {
  return __fadd_rn(__fmul_rn(x0, rotation.y), __fmul_rn(x1, rotation.x));
}
