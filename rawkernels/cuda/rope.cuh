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

// The entries of the table whose product is a rotation, one for each digit of the position. Where
// nothing is rotated they stay 1.
struct RotationDigits {
  double2 coarse = {1.0, 0.0}, middle = {1.0, 0.0}, fine = {1.0, 0.0};
};

// Table rows of a position's digits; a negative position (padding) counts as 0.
struct DigitRows {
  uint32_t coarse, middle, fine;
};
__device__ __forceinline__ DigitRows digit_rows(int32_t position) {
  const uint32_t p = (uint32_t)max(position, 0);
  constexpr uint32_t MIDDLE_AT = ROPE_COARSE_ROWS;
  constexpr uint32_t FINE_AT = ROPE_COARSE_ROWS + (1 << ROPE_MIDDLE_BITS);
  return {p >> (ROPE_MIDDLE_BITS + ROPE_FINE_BITS),
          MIDDLE_AT + ((p >> ROPE_FINE_BITS) & ((1u << ROPE_MIDDLE_BITS) - 1)),
          FINE_AT + (p & ((1u << ROPE_FINE_BITS) - 1))};
}
// Of pair `pair` at a position. table: float64 [ROPE_TABLE_ROWS, num_pairs, 2], from rope_table().
__device__ __forceinline__ RotationDigits load_digits(const double2* table, int num_pairs,
                                                      int32_t position, int pair) {
  const DigitRows rows = digit_rows(position);
  return {__ldg(table + (int64_t)rows.coarse * num_pairs + pair),
          __ldg(table + (int64_t)rows.middle * num_pairs + pair),
          __ldg(table + (int64_t)rows.fine * num_pairs + pair)};
}
// (cos, sin), rounded to float32.
__device__ __forceinline__ float2 rotation_of(const RotationDigits& digits) {
  double2 both = turn(turn(digits.coarse, digits.middle), digits.fine);
  return make_float2(__double2float_rn(both.x), __double2float_rn(both.y));
}
__device__ __forceinline__ float2 rope_rotation(const double2* table, int num_pairs,
                                                int32_t position, int pair) {
  return rotation_of(load_digits(table, num_pairs, position, pair));
}

// The two rotated values of a pair, without contraction.
__device__ __forceinline__ float rotated_first(float x0, float x1, float2 rotation) {
  return __fsub_rn(__fmul_rn(x0, rotation.x), __fmul_rn(x1, rotation.y));
}
__device__ __forceinline__ float rotated_second(float x0, float x1, float2 rotation) {
  return __fadd_rn(__fmul_rn(x0, rotation.y), __fmul_rn(x1, rotation.x));
}
