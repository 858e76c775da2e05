// Attention of the query rows of one KV head over tiles of 16 or 32 keys: one warp, everything
// in registers but the keys.
//
// Products are turned around, S^T = K Q^T and O^T = V^T P^T: keys, then columns, are the 16 rows of
// mma.m16n8k16 and query rows its 8 columns, because a decode step has few query rows and many
// keys. Lane 4g + t holds query rows 2t and 2t + 1 of each group of 8.
//
// MXFP8 values enter as bit patterns: an E4M3 byte shifted to bf16's exponent and mantissa is its
// value times 2^-120, subnormals included. The scales, powers of two, are applied to the scores of
// a block of 32 columns, and for V to the probabilities. Queries are scaled up so that no product
// becomes too small; all of it is exact and divided out in float32.
#pragma once
#include "gqa_records.cuh"
#include "softmax.cuh"

#ifndef ROW_TILES
#error "ROW_TILES: groups of 8 query rows of a warp"
#endif
#ifndef SOFTCAP
#error "SOFTCAP: 1 where scores go through cap * tanh(score / cap)"
#endif
static_assert(ROW_TILES * HEAD_DIM <= 256, "accumulators of part and total fit the registers");

constexpr int M_TILES = KEY_TILE / 16;
constexpr int K_STEPS = HEAD_DIM / 16;
constexpr int COLUMN_TILES = HEAD_DIM / 16;
// A scale is read as 1.5 * 2^(code - 127): with that mantissa, code 255 is NaN by itself.
constexpr int V_SCALE_SHIFT = 64;  // added to V's codes; codes above 255 - 64 are NaN
constexpr float OUT_FACTOR = MXFP8 ? 72057594037927936.0f / 1.5f : 1.0f;  // 2^(120 - 64) / 1.5
// A maximum may lag behind by this much (in units of log2): rescaling what was summed is rare then,
// and probabilities are at most 2^8.
constexpr float MAXIMUM_LAG = 8.0f;
constexpr float TWO_THIRDS = 0.66666666666666667f;

// Query rows of a warp as B operands. MXFP8: columns 4t .. 4t + 3 of each 16, in the order of the
// bytes of a word; else 2t, 2t + 1, 8 + 2t, 8 + 2t + 1.
struct QueryRows {
  uint32_t words[K_STEPS][ROW_TILES][2];
  float factor[ROW_TILES][2];  // from sums to scores, as `score_numbers` in gqa_shapes.py
};
// Scores, then probabilities, of a tile. Lane: keys 16m + g and 16m + g + 8, rows 2t and 2t + 1 of
// each group n.
struct Scores {
  float s[M_TILES][ROW_TILES][4];
};
// Online softmax and output of a part of the keys, or of all of them.
struct State {
  float maximum[ROW_TILES][2];  // of the scores so far, in units of log2
  float sum[ROW_TILES][2];      // of the probabilities; of this lane's keys until `close_state`
  float o[COLUMN_TILES][ROW_TILES][4];
};

__device__ __forceinline__ void clear_state(State& state) {
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) state.maximum[n][j] = minus_infinity(), state.sum[n][j] = 0.0f;
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; m++)
      for (int i = 0; i < 4; i++) state.o[m][n][i] = 0.0f;
  }
}

__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  if constexpr (RECORD_TYPE == 1)
    mma_m16n8k16_fp16(d, a, b[0], b[1]);
  else
    mma_m16n8k16(d, a, b[0], b[1]);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  return RECORD_TYPE == 1 ? pack_fp16(low, high) : pack_bf16(low, high);
}

// Bytes of MXFP8 to bf16 bits of value * 2^-120: sign and 7 bits of each half, moved in place.
__device__ __forceinline__ uint32_t place_bits(uint32_t sign_extended) {
  return (sign_extended << 4) & 0x87F087F0u;
}
// Scale codes of one head and key, four a word.
struct Codes {
  uint32_t words[(NUM_BLOCKS + 3) / 4];
};
__device__ __forceinline__ Codes load_codes(uint32_t address) {
  Codes codes;
  constexpr int BYTES = NUM_BLOCKS % 4 == 0 ? 4 : NUM_BLOCKS % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < (NUM_BLOCKS + 3) / 4; i++) codes.words[i] = 0;
#pragma unroll
  for (int i = 0; i < NUM_BLOCKS; i += BYTES)
    codes.words[i / 4] |= load_shared_word<BYTES>(address + i) << 8 * (i % 4);
  return codes;
}
__device__ __forceinline__ uint32_t code_of(const Codes& codes, int block) {
  return codes.words[block / 4] >> 8 * (block % 4) & 0xFFu;
}
// 1.5 * 2^(code - 127), NaN for 255.
__device__ __forceinline__ float scale_of(uint32_t code) {
  return __uint_as_float(code * 0x00800000u + 0x00400000u);
}

// q: row g of each group of 8 (null for absent rows), HEAD_DIM columns.
__device__ __forceinline__ void load_rows(QueryRows& rows, const uint16_t* const (&q)[ROW_TILES],
                                          float score_factor) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      uint32_t(&words)[2] = rows.words[k][n];
      words[0] = words[1] = 0;
      if (q[n] != nullptr) {
        const uint16_t* columns = q[n] + 16 * k;
        if constexpr (MXFP8) {
          const uint2 pair = __ldg(reinterpret_cast<const uint2*>(columns + 4 * t));
          words[0] = pair.x, words[1] = pair.y;
        } else {
          words[0] = __ldg(reinterpret_cast<const uint32_t*>(columns + 2 * t));
          words[1] = __ldg(reinterpret_cast<const uint32_t*>(columns + 2 * t + 8));
        }
      }
      if constexpr (MXFP8) {
        for (int i = 0; i < 2; i++)
          largest = max(largest, max(words[i] & 0x7FFFu, words[i] >> 16 & 0x7FFFu));
      }
    }
    if constexpr (!MXFP8) {
      rows.factor[n][0] = rows.factor[n][1] = score_factor;
      continue;
    }
    // The row's largest element goes to the binade of 2^126; a product is then at most 2^15.
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const int shift = min(253 - static_cast<int>(largest >> 7), 246);
    const int half = shift / 2;
    const float first = __int_as_float((127 + half) << 23);
    const float second = __int_as_float((127 + shift - half) << 23);
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t& word = rows.words[k][n][i];
        word = pack_bf16(__uint_as_float(word << 16) * first * second,
                         __uint_as_float(word & 0xFFFF0000u) * first * second);
      }
    }
    const float factor =
        __int_as_float((127 + 120 - shift) << 23) * __fmul_rn(score_factor, TWO_THIRDS);
    rows.factor[n][0] = __shfl_sync(~0u, factor, 8 * t);
    rows.factor[n][1] = __shfl_sync(~0u, factor, 8 * t + 4);
  }
}

// Sums of products of keys g and g + 8 of 16 with rows 2t, 2t + 1 of each group. keys: shared
// address of this head's K of the 16 keys; scales: of its codes.
__device__ __forceinline__ void score_keys(float (&s)[ROW_TILES][4], const QueryRows& rows,
                                           uint32_t keys, uint32_t scales) {
  const int lane = threadIdx.x % 32;
  const uint32_t at = keys + lane % 16 * KEY_STRIDE + lane / 16 * 16;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++)
    for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
  if constexpr (MXFP8) {
    const Codes low = load_codes(scales + lane / 4 * KEY_STRIDE);
    const Codes high = load_codes(scales + (lane / 4 + 8) * KEY_STRIDE);
#pragma unroll
    for (int b = 0; b < NUM_BLOCKS; b++) {
      uint32_t raw[4];
      ldmatrix_x4(raw, at + b * MX_BLOCK);
      float sums[ROW_TILES][4];
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        for (int i = 0; i < 4; i++) sums[n][i] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t a[4] = {place_bits(sign_extend_bytes<0>(raw[2 * half])),
                               place_bits(sign_extend_bytes<0>(raw[2 * half + 1])),
                               place_bits(sign_extend_bytes<1>(raw[2 * half])),
                               place_bits(sign_extend_bytes<1>(raw[2 * half + 1]))};
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) product(sums[n], a, rows.words[2 * b + half][n]);
      }
      const float scale[2] = {scale_of(code_of(low, b)), scale_of(code_of(high, b))};
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        for (int i = 0; i < 4; i++) s[n][i] = __fmaf_rn(sums[n][i], scale[i / 2], s[n][i]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < K_STEPS; k++) {
      uint32_t a[4];
      ldmatrix_x4(a, at + k * 32);
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) product(s[n], a, rows.words[k][n]);
    }
  }
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++)
    for (int i = 0; i < 4; i++) s[n][i] = __fmul_rn(s[n][i], rows.factor[n][i % 2]);
}

// cap * tanh(score / cap), from 2 / cap of the score, all in units of log2.
__device__ __forceinline__ void cap_scores(Scores& tile, float cap) {
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
    for (int n = 0; n < ROW_TILES; n++)
      for (int i = 0; i < 4; i++) {
        float& score = tile.s[m][n][i];
        const float inverse = reciprocal_approx(__fadd_rn(1.0f, exp2_approx(score)));
        score = __fmaf_rn(-2.0f * cap, inverse, cap);
      }
}

// The largest of a lane's scores of row 2t + j of group n.
__device__ __forceinline__ float largest_of(const Scores& tile, int n, int j) {
  float largest = fmaxf(tile.s[0][n][j], tile.s[0][n][j + 2]);
#pragma unroll
  for (int m = 1; m < M_TILES; m++)
    largest = fmaxf(largest, fmaxf(tile.s[m][n][j], tile.s[m][n][j + 2]));
  return largest;
}

// Scores to probabilities; what the state holds follows where a maximum grows by more than
// MAXIMUM_LAG. That is decided row by row, so a row's bits do not depend on other rows.
__device__ __forceinline__ void softmax_tile(Scores& tile, State& state) {
  bool grows = false;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++)
    for (int j = 0; j < 2; j++)
      grows |= largest_of(tile, n, j) > __fadd_rn(state.maximum[n][j], MAXIMUM_LAG);
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float largest = largest_of(tile, n, j);
        for (int mask = 4; mask < 32; mask *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        const float before = state.maximum[n][j];
        if (!(largest > __fadd_rn(before, MAXIMUM_LAG))) largest = before;
        // Rows that have seen no key yet: -inf - -inf would be NaN.
        const float base = largest == minus_infinity() ? 0.0f : largest;
        const float correction = exp2_approx(__fsub_rn(before, base));
        state.maximum[n][j] = largest;
        state.sum[n][j] = __fmul_rn(state.sum[n][j], correction);
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; m++) {
          state.o[m][n][j] = __fmul_rn(state.o[m][n][j], correction);
          state.o[m][n][j + 2] = __fmul_rn(state.o[m][n][j + 2], correction);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float maximum = state.maximum[n][j];
      const float base = maximum == minus_infinity() ? 0.0f : maximum;
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        float(&p)[4] = tile.s[m][n];
        p[j] = exp2_approx(__fsub_rn(p[j], base));
        p[j + 2] = exp2_approx(__fsub_rn(p[j + 2], base));
        state.sum[n][j] = __fadd_rn(state.sum[n][j], __fadd_rn(p[j], p[j + 2]));
      }
    }
  }
}

// o += P V over 16 keys. values: shared address of this head's V of them; scales: of its codes.
// present: bit i for key i, where FULL is false; the bytes of absent keys are not looked at.
template <bool FULL>
__device__ __forceinline__ void value_keys(State& state, const float (&p)[ROW_TILES][4],
                                           uint32_t values, uint32_t scales, uint32_t present) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t keep[2];  // of keys 2t, 2t + 1 and 2t + 8, 2t + 9
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t bits = present >> (2 * t + 8 * i);
    keep[i] = (bits & 1 ? 0xFFFFu : 0u) | (bits & 2 ? 0xFFFF0000u : 0u);
  }
  if constexpr (MXFP8) {
    const uint32_t at = values + lane % 16 * KEY_STRIDE + lane / 16 * 16;
    const Codes low = load_codes(scales + g * KEY_STRIDE);
    const Codes high = load_codes(scales + (g + 8) * KEY_STRIDE);
#pragma unroll
    for (int b = 0; b < NUM_BLOCKS; b++) {
      uint32_t codes[2] = {code_of(low, b), code_of(high, b)};
      if (!FULL) {
        if (!(present >> g & 1)) codes[0] = 0;
        if (!(present >> (g + 8) & 1)) codes[1] = 0;
      }
      const float scale[2] = {scale_of(min(codes[0] + V_SCALE_SHIFT, 255u)),
                              scale_of(min(codes[1] + V_SCALE_SHIFT, 255u))};
      uint32_t weights[ROW_TILES][2];
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++)
        for (int i = 0; i < 2; i++)
          weights[n][i] = transpose_8x8(pack_bf16(__fmul_rn(p[n][2 * i], scale[i]),
                                                  __fmul_rn(p[n][2 * i + 1], scale[i])));
      // Rows g of a product are columns 2g of V, rows g + 8 are columns 2g + 1.
      uint32_t raw[4];
      ldmatrix_x4_trans(raw, at + b * MX_BLOCK);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t left = raw[2 * half], right = raw[2 * half + 1];
        if (!FULL) left &= keep[0], right &= keep[1];
        const uint32_t a[4] = {place_bits(sign_extend_every_second<0>(left)),
                               place_bits(sign_extend_every_second<1>(left)),
                               place_bits(sign_extend_every_second<0>(right)),
                               place_bits(sign_extend_every_second<1>(right))};
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) product(state.o[2 * b + half][n], a, weights[n]);
      }
    }
  } else {
    const uint32_t at = values + (lane / 16 * 8 + lane % 8) * KEY_STRIDE + lane / 8 % 2 * 16;
    uint32_t weights[ROW_TILES][2];
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
      for (int i = 0; i < 2; i++)
        weights[n][i] = transpose_8x8(pack_pair(p[n][2 * i], p[n][2 * i + 1]));
#pragma unroll
    for (int m = 0; m < COLUMN_TILES; m++) {
      uint32_t a[4];
      ldmatrix_x4_trans(a, at + m * 32);
      if (!FULL) a[0] &= keep[0], a[1] &= keep[0], a[2] &= keep[1], a[3] &= keep[1];
#pragma unroll
      for (int n = 0; n < ROW_TILES; n++) product(state.o[m][n], a, weights[n]);
    }
  }
}

// The sums of all lanes' keys: after this a state is a number a row, and can be merged.
__device__ __forceinline__ void close_state(State& state) {
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++)
    for (int j = 0; j < 2; j++)
      for (int mask = 4; mask < 32; mask *= 2)
        state.sum[n][j] =
            __fadd_rn(state.sum[n][j], __shfl_xor_sync(~0u, state.sum[n][j], mask));
}

// total: parts so far, in their order; then with `part` as well.
__device__ __forceinline__ void merge_state(State& total, const State& part) {
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float maximum = fmaxf(total.maximum[n][j], part.maximum[n][j]);
      const float base = maximum == minus_infinity() ? 0.0f : maximum;
      const float old = exp2_approx(__fsub_rn(total.maximum[n][j], base));
      const float now = exp2_approx(__fsub_rn(part.maximum[n][j], base));
      total.maximum[n][j] = maximum;
      total.sum[n][j] =
          __fmaf_rn(part.sum[n][j], now, __fmul_rn(total.sum[n][j], old));
#pragma unroll
      for (int m = 0; m < COLUMN_TILES; m++)
        for (int i = j; i < 4; i += 2)
          total.o[m][n][i] = __fmaf_rn(part.o[m][n][i], now, __fmul_rn(total.o[m][n][i], old));
    }
  }
}
