// What the two Hopper kernels of window_attention share: how query tiles are found, softmax
// helpers, how a warp's rows leave. The .cu files include their parameters before this.
//
// A row tile is 64 rows of one warpgroup's products: HEADS query heads of one kv head times
// ROW_TOKENS consecutive tokens, token by token. So all rows of a tile share few tokens' keys.
// Tiles begin at positions that are multiples of their tokens, so an output's bits follow from its
// position and the keys, whatever chunk or batch it is computed in.
#pragma once
#include "attention_products_sm90.cuh"
#include "softmax.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "steps of products; O in registers");
static_assert(HEADS >= 1 && HEADS <= 16 && (HEADS & (HEADS - 1)) == 0, "a warp holds whole tokens");
static_assert(sizeof(Params) == PARAMS_BYTES, "the launcher packs another struct");
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536,
              "one SM");

constexpr int ROW_TILE = 64;
constexpr int ROW_TOKENS = ROW_TILE / HEADS;
constexpr int WARP_ROWS = 16, WARP_TOKENS = WARP_ROWS / HEADS;
constexpr int SLAB_COLUMNS = 64, SLAB_ROW_BYTES = SLAB_COLUMNS * 2;
constexpr int NUM_SLABS = (HEAD_DIM + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int OUT_REGISTERS = HEAD_DIM / 2;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;
constexpr int NUM_THREADS = CONSUMER_THREADS + WARPGROUP_THREADS;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / 32;
constexpr int WARPS = WARPGROUP_THREADS / 32;  // of a warpgroup
constexpr int STAGE_BYTES = WARP_ROWS * SLAB_ROW_BYTES;  // 64 columns of a warp's rows
constexpr int QUERY_SLAB_BYTES = ROW_TILE * SLAB_ROW_BYTES;
constexpr int QUERY_BYTES = NUM_SLABS * QUERY_SLAB_BYTES;

__device__ __forceinline__ void prefetch_maps(const Params& p) {
  prefetch_tensor_map(&p.q_map);
  prefetch_tensor_map(&p.k_map);
  prefetch_tensor_map(&p.v_map);
  prefetch_tensor_map(&p.out_map);
}

// Byte offset of columns 16 step .. within an operand whose slabs are `slab_bytes`.
__device__ constexpr uint32_t column_offset(int step, uint32_t slab_bytes) {
  return step / 4 * slab_bytes + step % 4 * 32;
}

// ---- which tile

struct Sequence {
  int first_query, num_queries, first_key, num_keys;
};
__device__ __forceinline__ Sequence load_sequence(const Params& p, int seq) {
  const int q = __ldg(p.cu_seqlens_q + seq), k = __ldg(p.cu_seqlens_k + seq);
  return {q, __ldg(p.cu_seqlens_q + seq + 1) - q, k, __ldg(p.cu_seqlens_k + seq + 1) - k};
}

// Tokens of a sequence's first tile that lie before its first query.
__device__ __forceinline__ int tokens_before(const Sequence& s, int tokens) {
  const int rest = (s.num_keys - s.num_queries) % tokens;
  return rest < 0 ? rest + tokens : rest;
}
__device__ __forceinline__ int tiles_of(const Sequence& s, int tokens) {
  return s.num_queries > 0 ? div_ceil(tokens_before(s, tokens) + s.num_queries, tokens) : 0;
}
// Tiles of `tokens` tokens in sequences base .. base + lane, and in sequence base + lane alone.
__device__ __forceinline__ int2 tiles_up_to_lane(const Params& p, int base, int tokens, int lane) {
  const int seq = base + lane, own = seq < p.num_seqs ? tiles_of(load_sequence(p, seq), tokens) : 0;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_sync(~0u, sum, (lane - step) & 31);
    if (lane >= step) sum += before;
  }
  return make_int2(sum, own);
}
__device__ __forceinline__ int count_tiles(const Params& p, int tokens, int lane) {
  int total = 0;
  for (int base = 0; base < p.num_seqs; base += 32)
    total += __shfl_sync(~0u, tiles_up_to_lane(p, base, tokens, lane).x, 31);
  return total;
}
// (sequence, tile in it) of tile `index` of all sequences. The whole warp takes part.
__device__ __forceinline__ int2 find_tile(const Params& p, int index, int tokens, int lane) {
  for (int base = 0; base < p.num_seqs; base += 32) {
    const int2 tiles = tiles_up_to_lane(p, base, tokens, lane);
    const int all = __shfl_sync(~0u, tiles.x, 31);
    if (index < all) {
      const int owner = __ffs(__ballot_sync(~0u, tiles.x > index)) - 1;
      return make_int2(base + owner,
                       index - __shfl_sync(~0u, tiles.x - tiles.y, owner));
    }
    index -= all;
  }
  return make_int2(-1, 0);
}

// ---- softmax

// With a soft cap, scores become tanh(score * pre_scale); scale_log2 then holds the cap.
template <int N>
__device__ __forceinline__ void soften(float (&s)[N], float pre_scale) {
#if SOFTCAP
#pragma unroll
  for (int i = 0; i < N; i++) s[i] = tanh_approx(s[i] * pre_scale);
#endif
}

// The tokens of a row tile that exist, and where: row r is token first + r / HEADS, for r / HEADS
// in begin .. end - 1, and query head head + r % HEADS.
struct RowTokens {
  int first, begin, end, head;
  __device__ __forceinline__ bool holds(int token) const { return token >= begin && token < end; }
};

// The two rows of a thread, with their logits of the sink times log2 e, -inf without one.
struct Sinks {
  float logit[2];
};
__device__ __forceinline__ int row_of_thread(int tid) {
  return tid % WARPGROUP_THREADS / 32 * WARP_ROWS + tid % 32 / 4;
}
__device__ __forceinline__ Sinks load_sinks(const Params& p, int head, int tid) {
  if (p.sink == nullptr) return {{minus_infinity(), minus_infinity()}};
  const float* sink = p.sink + head;
  const int row = row_of_thread(tid);
  return {{__ldg(sink + row % HEADS) * LOG2_E, __ldg(sink + (row + 8) % HEADS) * LOG2_E}};
}
// What they are once all keys are through: a factor of O, and lse.
struct Rows {
  float inverse[2], lse[2];
};
__device__ __forceinline__ Rows finish_rows(const float (&base)[2], const float (&sum)[2],
                                            const Sinks& sinks) {
  Rows rows;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float all = quad_sum(sum[i]);
    rows.lse[i] = (base[i] + __log2f(all)) * LN_2;
    rows.inverse[i] =
        all == 0.0f ? 0.0f : reciprocal_approx(all + exp2_approx(sinks.logit[i] - base[i]));
  }
  return rows;
}
__device__ __forceinline__ void store_lse(const Params& p, const Rows& rows, const RowTokens& t,
                                          int tid) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = row_of_thread(tid) + 8 * i, token = row / HEADS;
    if (tid % 4 == 0 && t.holds(token))
      p.lse[int64_t(t.first + token) * p.num_q_heads + t.head + row % HEADS] = rows.lse[i];
  }
}

// ---- output: a warp's 16 rows, staged OUT_STAGES x 64 columns at a time

static_assert(OUT_STAGES == 1 || OUT_STAGES >= NUM_SLABS, "one slab at a time, or all at once");
constexpr int ROUND_SLABS = OUT_STAGES == 1 ? 1 : NUM_SLABS;

// Rows from their stages, where the sequence begins or ends inside the warp's tokens: the others
// are another's.
__device__ __forceinline__ void store_pieces(const Params& p, const RowTokens& t, uint32_t stage,
                                             int first_slab, int first_token, int lane) {
  for (int i = lane; i < WARP_ROWS * 8 * ROUND_SLABS; i += 32) {
    const int slab = i / (WARP_ROWS * 8), row = i / 8 % WARP_ROWS, piece = i % 8;
    const int column = (first_slab + slab) * SLAB_COLUMNS + piece * 8;
    const int token = first_token + row / HEADS;
    if (!t.holds(token) || column >= HEAD_DIM) continue;
    const int64_t at =
        (int64_t(t.first + token) * p.num_q_heads + t.head + row % HEADS) * HEAD_DIM + column;
    *reinterpret_cast<uint4*>(p.out + at) = load_shared16(
        stage + slab * STAGE_BYTES + row * SLAB_ROW_BYTES + (piece ^ (row % 8)) * 16);
  }
  __syncwarp();
}

__device__ __forceinline__ void store_rows(const Params& p, const float (&o)[OUT_REGISTERS],
                                           const Rows& rows, const RowTokens& t, uint32_t stage,
                                           int tid) {
  const int lane = tid % 32, stage_row = lane % 16, half = lane / 16;
  // The stage's columns 8 half ..; others follow by exclusive or, as stages are aligned.
  const uint32_t to = stage + stage_row * SLAB_ROW_BYTES + (half ^ (stage_row % 8)) * 16;
  const int first = tid % WARPGROUP_THREADS / 32 * WARP_TOKENS;  // token of the warp's first row
  const bool whole = first >= t.begin && first + WARP_TOKENS <= t.end;
#pragma unroll
  for (int round = 0; round < NUM_SLABS; round += ROUND_SLABS) {
    if (lane == 0) wait_stores_read();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4 * ROUND_SLABS && round * 4 + i < DIM_STEPS; i++) {
      // The sum with +0 makes a zero positive, whatever signs the products of zero weights had.
      const float* x = o + round * 32 + i * 8;
      uint32_t packed[4];
#pragma unroll
      for (int m = 0; m < 4; m++)
        packed[m] = pack_operands(fmaf(x[2 * m], rows.inverse[m % 2], 0.0f),
                                  fmaf(x[2 * m + 1], rows.inverse[m % 2], 0.0f));
      stmatrix_x4((to ^ (i % 4 * 32)) + i / 4 * STAGE_BYTES, packed[0], packed[1], packed[2],
                  packed[3]);
    }
    fence_async_proxy();
    __syncwarp();
    if (whole) {
      if (lane == 0) {
#pragma unroll
        for (int slab = 0; slab < ROUND_SLABS; slab++)
          store_box(&p.out_map, (round + slab) * SLAB_COLUMNS, t.head, t.first + first,
                    stage + slab * STAGE_BYTES);
        commit_stores();
      }
    } else {
      store_pieces(p, t, stage, round, first, lane);
    }
  }
}

// ---- values of rows that are no keys of the sequence

// Rows first .. end - 1 of an operand with slabs of `slab_bytes` become zeros, by one warp: 0 times
// what lies there might be NaN.
__device__ __forceinline__ void clear_rows(uint32_t to, uint32_t slab_bytes, int first, int end,
                                           int lane) {
#pragma unroll
  for (int slab = 0; slab < NUM_SLABS; slab++)
    for (int i = first * 8 + lane; i < end * 8; i += 32)
      store_shared16(to + slab * slab_bytes + i * 16, make_uint4(0, 0, 0, 0));
}
