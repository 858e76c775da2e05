// Attention of a tile of query rows over tiles of keys and values that lie in plain arrays: what a
// thread block of window_attention does between its loop bounds.
//
// A block has 64 rows, 16 a warp: PACK query heads of one KV head for each of 64 / PACK queries, so
// that heads of a group share each load of a key, and a window as short as a tile is not drowned in
// the keys of other queries. Products are mma.sync with float32 sums; probabilities are rounded to
// the dtype of v for the second one. A row's arithmetic depends on its own keys alone, cut into
// tiles from key 0 on: a tile in which it sees no key changes none of its bits. So that masked and
// unmasked tiles round alike, arithmetic is written with __fmaf_rn and its like.
//
// Rows of shared memory are 16 bytes longer than head_dim asks for: 8 rows of one 16-byte chunk,
// which is what ldmatrix reads, then lie in 8 different groups of banks.
#pragma once
#include "softmax.cuh"
#include "tile_ptx.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM: columns of q, k and v, a multiple of 16 from 16 to 256"
#endif
#ifndef KEY_TILE
#error "KEY_TILE: keys of a step of the online softmax, a multiple of 16"
#endif
#ifndef PACK
#error "PACK: query heads of one KV head that share a tile, 1 to 16"
#endif
#ifndef FP16
#error "FP16: 1 where q, k, v and out are float16, 0 where they are bf16"
#endif
#ifndef SOFTCAP
#error "SOFTCAP: 1 where scores are capped"
#endif
#ifndef COUNT_TILES
#error "COUNT_TILES: 1 in the debug build that counts what it visits, 0 in every other"
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 256, "columns of a fragment");
static_assert(KEY_TILE % 16 == 0 && KEY_TILE >= 16 && KEY_TILE <= 64, "keys of a fragment");
static_assert(PACK >= 1 && PACK <= 16, "a tile has at least 4 queries");
static_assert((FP16 == 0 || FP16 == 1) && (SOFTCAP == 0 || SOFTCAP == 1), "switches");

constexpr int BLOCK_ROWS = 64;
constexpr int NUM_THREADS = 128;
constexpr int QUERY_TILE = BLOCK_ROWS / PACK;  // queries; rows past the last whole one stay idle
constexpr int CHUNKS = HEAD_DIM / 8;           // 16-byte pieces of a row
constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;
constexpr bool KEEP_QUERY = HEAD_DIM <= 128;  // in registers; else the output fills them

struct Shared {
  uint4 q[BLOCK_ROWS][ROW_BYTES / 16];  // in the end the output
  uint4 k[KEY_TILE][ROW_BYTES / 16];
  uint4 v[KEY_TILE][ROW_BYTES / 16];
#if COUNT_TILES
  uint4 visible;  // .x: pairs of the tile at hand
#endif
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");
static_assert(SHARED_BYTES <= 99 * 1024, "sm_86 and sm_89 offer a block 99 KB");

// The two rows (g and g + 8 of its warp) that a lane shares with its quad.
struct Rows {
  int position[2];   // of the query; -1 for a row that does not exist, negative: sees no key
  float maximum[2];  // of the scaled scores so far, in units of log2
  float sum[2];      // of this lane's probabilities
};

// First key of the window of a query; no difference that leaves an int, whatever the window.
__device__ __forceinline__ int oldest_key(int position, int window) {
  return position < window ? 0 : position - window + 1;
}

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if (FP16)
    mma_m16n8k16_fp16(d, a, b0, b1);
  else
    mma_m16n8k16(d, a, b0, b1);
}
__device__ __forceinline__ uint32_t pack_values(float low, float high) {
  return FP16 ? pack_fp16(low, high) : pack_bf16(low, high);
}

// A fragment of q: 16 rows of this warp, columns 16 step .. + 15.
__device__ __forceinline__ void load_query(uint32_t (&a)[4], const Shared& shared, int step) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
  ldmatrix_x4(a, shared_address(&shared.q[row][2 * step + lane / 16]));
}

// s[j]: scores of keys 8j .. 8j + 7, not scaled.
__device__ __forceinline__ void score_tile(float (&s)[KEY_TILE / 8][4],
                                           const uint32_t (&q)[HEAD_DIM / 16][4],
                                           const Shared& shared) {
  const int lane = threadIdx.x % 32;
  // Lane l points at key l % 8 (+ 8 from lane 16 on), chunk l / 8 % 2 of 16 columns.
  const uint32_t at = shared_address(&shared.k[lane / 16 * 8 + lane % 8][lane / 8 % 2]);
#pragma unroll
  for (int j = 0; j < KEY_TILE / 8; j++)
    for (int i = 0; i < 4; i++) s[j][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    uint32_t a[4];
    if (KEEP_QUERY)
      for (int i = 0; i < 4; i++) a[i] = q[step][i];
    else
      load_query(a, shared, step);
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, at + j * 8 * ROW_BYTES + step * 32);
      multiply(s[j], a, k[0], k[1]);
      multiply(s[j + 1], a, k[2], k[3]);
    }
  }
}

// c tanh(y) in units of log2, where y = score * softmax_scale / c. cap_log2: c log2(e).
__device__ __forceinline__ float capped(float y, float cap_log2) {
  // 1 - 2 / (e^2y + 1) loses its digits where y is small; a series has them there.
  const float y2 = __fmul_rn(y, y);
  float series = __fmaf_rn(y2, -17.0f / 315, 2.0f / 15);
  series = __fmaf_rn(y2, series, -1.0f / 3);
  series = __fmul_rn(y, __fmaf_rn(y2, series, 1.0f));
  const float power = exp2_approx(__fmul_rn(2.0f * LOG2_E, y));
  const float whole = __fmaf_rn(-2.0f, reciprocal_approx(__fadd_rn(power, 1.0f)), 1.0f);
  return __fmul_rn(cap_log2, fabsf(y) < 0.125f ? series : whole);
}

// Scores to probabilities relative to the new maximum; `correction` is what older sums and outputs
// must be multiplied by. `scale` brings a score to units of log2, or to the argument of the cap.
// MASKED: a row at position p sees keys oldest(p) .. p and keys below sink_tokens.
template <bool MASKED>
__device__ __forceinline__ void softmax_tile(float (&s)[KEY_TILE / 8][4], Rows& rows,
                                             float (&correction)[2], float scale, float cap_log2,
                                             int first_key, int window, int sink_tokens) {
  const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int position = rows.position[half];
    const int last = position - first_key;  // in columns of the tile
    const int oldest = oldest_key(position, window) - first_key;
    const int sinks = sink_tokens - first_key;
    float maximum = rows.maximum[half];
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[j][2 * half + e];
        score = __fmul_rn(score, scale);
        if (SOFTCAP) score = capped(score, cap_log2);
        if (MASKED) {
          const int column = 8 * j + first_column + e;
          if (column > last || (column < oldest && column >= sinks)) score = minus_infinity();
        }
        maximum = fmaxf(maximum, score);
      }
    }
    maximum = quad_max(maximum);
    // A row may see no key of its first tile (and infinite keys can leave a whole tile at -inf):
    // -inf - -inf would be NaN and stay.
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    correction[half] = exp2_approx(__fsub_rn(rows.maximum[half], base));
    float sum = __fmul_rn(rows.sum[half], correction[half]);
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[j][2 * half + e];
        score = exp2_approx(__fsub_rn(score, base));
        sum = __fadd_rn(sum, score);
      }
    }
    rows.maximum[half] = maximum, rows.sum[half] = sum;
  }
}

// o += p v. p: probabilities as accumulators of score_tile.
__device__ __forceinline__ void value_tile(float (&o)[CHUNKS][4], const float (&p)[KEY_TILE / 8][4],
                                           const Shared& shared) {
  const int lane = threadIdx.x % 32;
  // Lane l points at key l % 16, chunk l / 16 of a pair of chunks.
  const uint32_t at = shared_address(&shared.v[lane % 16][lane / 16]);
#pragma unroll
  for (int step = 0; step < KEY_TILE / 16; step++) {
    // An accumulator of 16 x 8 scores is the left or right half of an A fragment.
    const float(&left)[4] = p[2 * step];
    const float(&right)[4] = p[2 * step + 1];
    const uint32_t a[4] = {pack_values(left[0], left[1]), pack_values(left[2], left[3]),
                           pack_values(right[0], right[1]), pack_values(right[2], right[3])};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, at + step * 16 * ROW_BYTES + chunk * 16);
      multiply(o[chunk], a, v[0], v[1]);
      multiply(o[chunk + 1], a, v[2], v[3]);
    }
  }
}

// The log-sum-exp and what is left of a row's division. Row `half` of this lane: returns the factor
// of its outputs; `sink` is its logit, -inf where there is none.
__device__ __forceinline__ float finish_row(const Rows& rows, int half, float sink, float& lse) {
  const float maximum = rows.maximum[half];
  float sum = quad_sum(rows.sum[half]);
  if (rows.position[half] < 0) {
    lse = minus_infinity();
    return 0.0f;
  }
  // Every score -inf or NaN: the definition subtracts -inf from -inf.
  if (maximum == minus_infinity()) sum = __int_as_float(0x7FC00000);
  lse = __fmaf_rn(maximum, LN_2, logf(sum));
  return __frcp_rn(__fadd_rn(sum, exp2_approx(__fmaf_rn(sink, LOG2_E, -maximum))));
}
