// Attention of one query token, HEAD_TILE of its heads against its list of keys: what window_decode
// and window_prefill share, so that the same token gets the same bits from both.
//
// Warp w serves heads 16 (w / 2) .. + 15 and half w % 2 of the columns. It keeps its part of q and
// of the output in registers. Both halves of a score are summed through shared memory (a + b is
// b + a, so both warps of a pair hold equal scores and probabilities); products are mma.sync with
// float32 sums, probabilities are rounded to bf16 for the second one. Two buffers of keys: the next
// tile's records are on their way while this tile is computed.
//
// Operations whose bits matter are written with __fmaf_rn and its like, so that the compiler cannot
// contract them differently in the two kernels.
#pragma once
#include "attention_keys.cuh"
#include "attention_output.cuh"

struct Shared {
  uint4 keys[2][KEY_TILE][ROW_BYTES / 16];     // bf16, permuted and swizzled (attention_keys.cuh)
  float4 scores[NUM_WARPS][KEY_TILE / 8][32];  // partial scores of each warp, as lanes hold them
  float2 rotation[ROPE_DIMS / 2 + 1];          // (cos, -sin) of each pair at this position
  // The scales of the next tile, each thread's own: requested two tiles ahead, while the tile
  // between is dequantized, and kept here because a register more would be spilled.
  uint8_t scales[PREFETCHED_TASKS][NUM_THREADS];
  KeyRuns runs;
  Query query;  // kept here because the registers are full while keys are processed
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the launcher asks for another size");
static_assert(SHARED_BYTES <= 99 * 1024, "sm_86 and sm_89 offer a block 99 KB");

// State of the online softmax of the two rows (g and g + 8) that a lane shares with its quad.
struct Softmax {
  float maximum[2];  // of the scaled scores so far, in units of log2
  float sum[2];      // of this lane's probabilities
};

// A fragments of q, 16 heads and WARP_BLOCKS blocks; zero for absent heads and columns.
// q: bf16 [num_heads - first head of this warp, HEAD_DIM] from the warp's first head on.
__device__ __forceinline__ void load_query(uint32_t (&q)[WARP_BLOCKS][2][4], const uint16_t* from,
                                           int heads_left) {
  const int lane = threadIdx.x % 32, first_block = threadIdx.x / 32 % 2 * WARP_BLOCKS;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = lane / 4 + 8 * half;
    const uint16_t* columns = from + row * HEAD_DIM + first_block * MX_BLOCK + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < WARP_BLOCKS; b++) {
      uint4 piece = make_uint4(0, 0, 0, 0);
      if (row < heads_left && first_block + b < NUM_BLOCKS)
        piece = __ldg(reinterpret_cast<const uint4*>(columns + b * MX_BLOCK));
      q[b][0][half] = piece.x, q[b][0][half + 2] = piece.y;
      q[b][1][half] = piece.z, q[b][1][half + 2] = piece.w;
    }
  }
}

// s[j]: scores of keys 8j .. 8j + 7 over this warp's columns. keys: address of the tile.
__device__ __forceinline__ void score_tile(float (&s)[KEY_TILE / 8][4],
                                           const uint32_t (&q)[WARP_BLOCKS][2][4], uint32_t keys) {
  const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2;
  // Lane l points at key l % 8, chunk l / 8 of a block: the four k pieces of 8 columns.
  const uint32_t at = keys + half * (WARP_BLOCKS * 64) + lane % 8 * ROW_BYTES +
                      ((lane / 8) ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j < KEY_TILE / 8; j++)
    for (int i = 0; i < 4; i++) s[j][i] = 0.0f;
#pragma unroll
  for (int b = 0; b < WARP_BLOCKS; b++) {
    const uint32_t block = (b % 2 ? at ^ 64 : at) + b / 2 * 128;
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j += 2) {
      uint32_t k[2][4];
      ldmatrix_x4(k[0], block + j * 8 * ROW_BYTES);
      ldmatrix_x4(k[1], block + (j + 1) * 8 * ROW_BYTES);
      mma_m16n8k16(s[j], q[b][0], k[0][0], k[0][1]);
      mma_m16n8k16(s[j + 1], q[b][0], k[1][0], k[1][1]);
      mma_m16n8k16(s[j], q[b][1], k[0][2], k[0][3]);
      mma_m16n8k16(s[j + 1], q[b][1], k[1][2], k[1][3]);
    }
  }
}

// Adds the other half's scores. All threads of the two warps of a row group take part.
__device__ __forceinline__ void join_scores(Shared& shared, float (&s)[KEY_TILE / 8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < KEY_TILE / 8; j++)
    shared.scores[warp][j][lane] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
  named_barrier(1 + warp / 2, 64);
#pragma unroll
  for (int j = 0; j < KEY_TILE / 8; j++) {
    const float4 other = shared.scores[warp ^ 1][j][lane];
    s[j][0] = __fadd_rn(s[j][0], other.x), s[j][1] = __fadd_rn(s[j][1], other.y);
    s[j][2] = __fadd_rn(s[j][2], other.z), s[j][3] = __fadd_rn(s[j][3], other.w);
  }
}

// Scores to probabilities relative to the new maximum; `correction` is what older sums and outputs
// must be multiplied by. Keys from `keys_left` on do not exist.
__device__ __forceinline__ void softmax_tile(float (&s)[KEY_TILE / 8][4], Softmax& softmax,
                                             float (&correction)[2], float scale_log2,
                                             int keys_left) {
  const int first_column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float maximum = softmax.maximum[half];
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[j][2 * half + e];
        score = __fmul_rn(score, scale_log2);
        if (8 * j + first_column + e >= keys_left) score = minus_infinity();
        maximum = fmaxf(maximum, score);
      }
    }
    maximum = quad_max(maximum);
    // Keys that hold infinities can leave every score of a tile at -inf; -inf - -inf would be NaN
    // and stay, although a later tile may have finite scores.
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    correction[half] = exp2_approx(__fsub_rn(softmax.maximum[half], base));
    float sum = __fmul_rn(softmax.sum[half], correction[half]);
#pragma unroll
    for (int j = 0; j < KEY_TILE / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[j][2 * half + e];
        score = exp2_approx(__fsub_rn(score, base));
        sum = __fadd_rn(sum, score);
      }
    }
    softmax.maximum[half] = maximum, softmax.sum[half] = sum;
  }
}

// o += p v over this warp's columns. p: probabilities as accumulators of score_tile.
__device__ __forceinline__ void value_tile(float (&o)[WARP_BLOCKS][4][4],
                                           const float (&p)[KEY_TILE / 8][4], uint32_t keys) {
  const int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2;
  // Lane l points at key l % 16, chunk l / 16 of a pair of chunks.
  const uint32_t at = keys + half * (WARP_BLOCKS * 64) + lane % 16 * ROW_BYTES +
                      ((lane / 16) ^ (lane % 8)) * 16;
  uint32_t a[KEY_TILE / 16][4];
#pragma unroll
  for (int step = 0; step < KEY_TILE / 16; step++) {
    // An accumulator of 16 x 8 scores is the left or right half of an A fragment.
    const float(&left)[4] = p[2 * step];
    const float(&right)[4] = p[2 * step + 1];
    a[step][0] = pack_bf16(left[0], left[1]), a[step][1] = pack_bf16(left[2], left[3]);
    a[step][2] = pack_bf16(right[0], right[1]), a[step][3] = pack_bf16(right[2], right[3]);
  }
  // Pairs of chunks whose place in a group of 8 is equal share one swizzled address.
#pragma unroll
  for (int place = 0; place < 8; place += 2) {
    const uint32_t pair = at ^ place * 16;
#pragma unroll
    for (int step = 0; step < KEY_TILE / 16; step++) {
#pragma unroll
      for (int group = 0; group < WARP_BLOCKS / 2; group++) {
        const int b = 2 * group + place / 4;
        uint32_t v[4];
        ldmatrix_x4_trans(v, pair + group * 128 + step * 16 * ROW_BYTES);
        mma_m16n8k16(o[b][place % 4], a[step], v[0], v[1]);
        mma_m16n8k16(o[b][place % 4 + 1], a[step], v[2], v[3]);
      }
    }
  }
}

// The rest of the denominator, the log-sum-exp, and the factor that each row of o still needs.
__device__ __forceinline__ void finish_softmax(const Softmax& softmax, const Query& query,
                                               float (&factor)[2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int head = warp / 2 * 16 + lane / 4 + 8 * half;
    const float maximum = softmax.maximum[half];
    float sum = quad_sum(softmax.sum[half]);
    // Every score -inf or NaN: the definition subtracts -inf from -inf.
    if (maximum == minus_infinity()) sum = __int_as_float(0x7FC00000);
    float denominator = sum;
    if (head < query.num_heads) {
      if (query.sink != nullptr) {
        const float sink = exp2_approx(__fmaf_rn(query.sink[head], LOG2_E, -maximum));
        denominator = __fadd_rn(sum, sink);
      }
      if (warp % 2 == 0 && lane % 4 == 0)
        query.lse[head] = __fmaf_rn(maximum, LN_2, logf(sum));
    }
    factor[half] = __frcp_rn(denominator);
  }
}

// Loads and dequantizes tile 0 into the first buffer, and sees to the scales of tile 1.
__device__ __forceinline__ void fill_first_tile(Shared& shared) {
  RawBlock raw[WARP_TASKS];
  uint8_t scales[WARP_TASKS], next_scales[PREFETCHED_TASKS];
#pragma unroll
  for (int i = 0; i < WARP_TASKS; i++) {
    load_block(raw[i], shared.runs, 0, share_of_tile(i));
    scales[i] = load_scale(shared.runs, 0, share_of_tile(i));
    if (i < PREFETCHED_TASKS) next_scales[i] = load_scale(shared.runs, 1, share_of_tile(i));
  }
  uint8_t* buffer = reinterpret_cast<uint8_t*>(shared.keys[0]);
#pragma unroll
  for (int i = 0; i < WARP_TASKS; i++) store_block(buffer, raw[i], scales[i], share_of_tile(i));
#pragma unroll
  for (int i = 0; i < PREFETCHED_TASKS; i++) shared.scales[i][threadIdx.x] = next_scales[i];
}

// Dequantizes tile `tile + 1`, of which the first shares have arrived in `next`, into its buffer.
__device__ __forceinline__ void fill_next_tile(Shared& shared, int tile,
                                               const RawBlock (&next)[PREFETCHED_TASKS]) {
  uint8_t scales_after[PREFETCHED_TASKS];
#pragma unroll
  for (int i = 0; i < PREFETCHED_TASKS; i++)
    scales_after[i] = load_scale(shared.runs, tile + 2, share_of_tile(i));
  uint8_t* buffer = reinterpret_cast<uint8_t*>(shared.keys[(tile + 1) % 2]);
#pragma unroll
  for (int i = 0; i < WARP_TASKS; i++) {
    const Share share = share_of_tile(i);
    if (i < PREFETCHED_TASKS) {
      store_block(buffer, next[i], shared.scales[i][threadIdx.x], share);
    } else {
      RawBlock raw;
      load_block(raw, shared.runs, tile + 1, share);
      store_block(buffer, raw, load_scale(shared.runs, tile + 1, share), share);
    }
  }
#pragma unroll
  for (int i = 0; i < PREFETCHED_TASKS; i++) shared.scales[i][threadIdx.x] = scales_after[i];
}

// The whole of it. `shared.runs` has been written by thread 0; all threads of the block call this.
__device__ __forceinline__ void attend(Shared& shared, const Query& own_query, float scale_log2) {
  const int warp = threadIdx.x / 32;
  const int warp_head = warp / 2 * 16;

  // The query is requested before anything is waited for.
  uint32_t q[WARP_BLOCKS][2][4];
  load_query(q, own_query.q + warp_head * HEAD_DIM, own_query.num_heads - warp_head);
  load_rotation(shared.rotation, own_query);
  if (threadIdx.x == 0) shared.query = own_query;
  __syncthreads();
  const Query& query = shared.query;
  const int length = shared.runs.length;
  if (length == 0) {
    store_nothing(query);
    return;
  }

  fill_first_tile(shared);
  float o[WARP_BLOCKS][4][4];
#pragma unroll
  for (int b = 0; b < WARP_BLOCKS; b++)
    for (int m = 0; m < 4; m++)
      for (int i = 0; i < 4; i++) o[b][m][i] = 0.0f;
  Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
  __syncthreads();

  // One tile after the other. Buffer tile % 2 holds this tile; the other was last read before the
  // barrier that ended the previous turn.
  const int num_tiles = div_ceil(length, KEY_TILE);
  for (int tile = 0; tile < num_tiles; tile++) {
    const uint32_t keys = shared_address(shared.keys[tile % 2]);
    const bool another = tile + 1 < num_tiles;
    RawBlock next[PREFETCHED_TASKS];
    if (another) {
#pragma unroll
      for (int i = 0; i < PREFETCHED_TASKS; i++)
        load_block(next[i], shared.runs, tile + 1, share_of_tile(i));
    }

    float s[KEY_TILE / 8][4], correction[2];
    score_tile(s, q, keys);
    join_scores(shared, s);
    softmax_tile(s, softmax, correction, scale_log2, length - tile * KEY_TILE);
    // Multiplying by 1 changes no bit, so a warp whose maxima stood still may skip it.
    if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int b = 0; b < WARP_BLOCKS; b++)
        for (int m = 0; m < 4; m++)
          for (int i = 0; i < 4; i++) o[b][m][i] = __fmul_rn(o[b][m][i], correction[i / 2]);
    }
    value_tile(o, s, keys);

    if (another) fill_next_tile(shared, tile, next);
    __syncthreads();
  }

  float factor[2];
  finish_softmax(softmax, query, factor);
#pragma unroll
  for (int b = 0; b < WARP_BLOCKS; b++)
    for (int m = 0; m < 4; m++)
      for (int i = 0; i < 4; i++) o[b][m][i] = __fmul_rn(o[b][m][i], factor[i / 2]);
  // The key buffers are free from here on: the loop ended with a barrier.
  store_output(o, reinterpret_cast<float*>(shared.keys), shared.rotation, query);
}
