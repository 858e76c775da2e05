// Decode attention over grouped-query records: what window_decode_gqa and paged_decode share.
//
// A thread block serves HEADS KV heads of one sequence and up to 8 * ROW_TILES query rows of each
// (row = query token x query head of the group): one warp a KV head and one that fetches records.
// Keys are taken by their index (in the ring, or the position of a paged sequence) in tiles of
// KEY_TILE, and in parts of PART_KEYS. A part is summed on its own and the parts are merged in
// their order, by one block or by several (`splits`): the bits of a row are the same for every cut,
// and whatever else is in the batch.
#pragma once
#include "gqa_keys.cuh"

#ifndef MIN_BLOCKS
#error "MIN_BLOCKS: thread blocks that shall fit a multiprocessor"
#endif
constexpr int NUM_THREADS = 32 * (HEADS + FETCHERS);
constexpr int CONSUMERS = 32 * HEADS;
// Words of a warp's partial state, lane by lane.
constexpr int STATE_WORDS = 4 * ROW_TILES * (COLUMN_TILES + 1);

struct Shared {
  uint8_t stages[NUM_STAGES][STAGE_BYTES];
  uint64_t filled[NUM_STAGES], emptied[NUM_STAGES];  // barriers of each stage
  RowKeys rows[ROWS];
  int is_last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little");
static_assert(STAGE_BYTES % 16 == 0, "ldmatrix reads 16 bytes");

// The warp that fetches. Source::record(index): address of a key's record, null where it is lost.
template <typename Source>
__device__ __forceinline__ void fetch_tiles(Shared& shared, const Keys& keys, const Source& source,
                                            int first_head, int split, int splits) {
  const int num_parts = parts_with_keys(keys);
  const int fetcher = threadIdx.x / 32 - HEADS, lane = threadIdx.x % 32;
  int fetched = 0;
  for (int part = split; part < num_parts; part += splits) {
    const Tiles tiles = tiles_of_part(keys, part);
    for (int i = 0; i < tiles.total(); i++, fetched++) {
      const int stage = fetched % NUM_STAGES;
      const int index = tiles.at(i) * KEY_TILE + lane;
      const bool own = lane < KEY_TILE && lane % FETCHERS == fetcher;
      const bool present = own && is_present(keys, index);
      const uint8_t* record = present ? source.record(index) : nullptr;
      if (fetched >= NUM_STAGES)
        wait_phase(shared_address(&shared.emptied[stage]), (fetched / NUM_STAGES - 1) % 2);
      if (Source::CAN_LOSE && __any_sync(~0u, present && record == nullptr))
        clear_keys(shared_address(shared.stages[stage]), present && record == nullptr);
      fill_stage(shared_address(shared.stages[stage]), record, fetcher, first_head,
                 shared_address(&shared.filled[stage]));
    }
  }
}

// One tile of one head. stage: shared address. FULL: every row sees every key.
template <bool FULL>
__device__ __forceinline__ void take_tile(State& state, const QueryRows& query,
                                          const Shared& shared, uint32_t stage, const Keys& keys,
                                          int index, int first_head, float cap) {
  const int warp = threadIdx.x / 32, codes_at = (first_head + warp) * NUM_BLOCKS;
  uint32_t present = ~0u;
  if (!FULL) present = __ballot_sync(~0u, is_present(keys, index + threadIdx.x % 32));
  Scores tile;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
    score_keys(tile.s[m], query, stage + m * 16 * KEY_STRIDE + warp * HEAD_BYTES,
               stage + m * 16 * KEY_STRIDE + K_SCALES_AT + codes_at);
  if (SOFTCAP) cap_scores(tile, cap);
  if (!FULL) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) mask_keys(tile.s[m], shared.rows, keys, index + 16 * m);
  }
  softmax_tile(tile, state);
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
    value_keys<FULL>(state, tile.s[m], stage + m * 16 * KEY_STRIDE + V_AT + warp * HEAD_BYTES,
                     stage + m * 16 * KEY_STRIDE + V_SCALES_AT + codes_at, present >> 16 * m);
}

__device__ __forceinline__ void store_state(float* to, const State& state) {
  to += threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    for (int j = 0; j < 2; j++) {
      to[(4 * n + j) * 32] = state.maximum[n][j];
      to[(4 * n + 2 + j) * 32] = state.sum[n][j];
    }
    for (int m = 0; m < COLUMN_TILES; m++)
      for (int i = 0; i < 4; i++)
        to[(4 * (ROW_TILES + m * ROW_TILES + n) + i) * 32] = state.o[m][n][i];
  }
}
__device__ __forceinline__ void load_state(State& state, const float* from) {
  from += threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    for (int j = 0; j < 2; j++) {
      state.maximum[n][j] = __ldcg(from + (4 * n + j) * 32);
      state.sum[n][j] = __ldcg(from + (4 * n + 2 + j) * 32);
    }
    for (int m = 0; m < COLUMN_TILES; m++)
      for (int i = 0; i < 4; i++)
        state.o[m][n][i] = __ldcg(from + (4 * (ROW_TILES + m * ROW_TILES + n) + i) * 32);
  }
}

// Row r of the block's rows: its place among [num_tokens, num_q_heads].
template <typename Params>
__device__ __forceinline__ int64_t place_of(const Params& p, const Rows& rows, int kv_head, int r) {
  const int row = rows.first_row + r;
  return (rows.token + row / rows.group) * p.num_q_heads + kv_head * rows.group + row % rows.group;
}

// The sink logits of a lane's rows, in units of log2; -inf adds nothing. Read long before use.
struct Sinks {
  float logits[ROW_TILES][2];
};
__device__ __forceinline__ Sinks load_sinks(const float* sink, const Rows& rows, int kv_head) {
  Sinks sinks;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int head = (rows.first_row + 8 * n + threadIdx.x % 4 * 2 + j) % rows.group;
      const float* at = sink + kv_head * rows.group + head;
      sinks.logits[n][j] = sink == nullptr ? minus_infinity() : __fmul_rn(__ldg(at), LOG2_E);
    }
  }
  return sinks;
}

// The last division, the log-sum-exp and the stores of one head's rows.
template <typename Params>
__device__ __forceinline__ void store_rows(const Params& p, const Shared& shared, const Rows& rows,
                                           const State& state, const Sinks& sinks, int kv_head) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    float factor[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int r = 8 * n + 2 * t + j;
      factor[j] = 0.0f;
      if (r >= rows.num_rows) continue;
      const int64_t place = place_of(p, rows, kv_head, r);
      const float maximum = state.maximum[n][j];
      float sum = state.sum[n][j], lse = minus_infinity();
      if (shared.rows[r].length > 0 || shared.rows[r].pinned > 0) {
        // Every score -inf or NaN: the definition subtracts -inf from -inf.
        if (maximum == minus_infinity()) sum = __int_as_float(0x7FC00000);
        lse = __fmaf_rn(maximum, LN_2, logf(sum));
        // Without a finite score the sum is NaN already, and -inf - -inf would be no news.
        sum = __fadd_rn(sum, exp2_approx(__fsub_rn(sinks.logits[n][j], maximum)));
        factor[j] = __fmul_rn(OUT_FACTOR, __frcp_rn(sum));
      }
      if (g == 0) p.lse[place] = lse;
    }
    // Each lane's two columns side by side: MXFP8's are, others after a transposition.
    if constexpr (MXFP8) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int r = 8 * n + 2 * t + j;
        if (r >= rows.num_rows) continue;
        const int64_t place = place_of(p, rows, kv_head, r);
        uint32_t* out = reinterpret_cast<uint32_t*>(p.out + place * HEAD_DIM);
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; m++)
          out[m * 8 + g] = pack_bf16(__fmul_rn(state.o[m][n][j], factor[j]),
                                     __fmul_rn(state.o[m][n][j + 2], factor[j]));
      }
    } else {
      const int r = 8 * n + g;
      uint32_t* out = reinterpret_cast<uint32_t*>(
          p.out + place_of(p, rows, kv_head, min(r, rows.num_rows - 1)) * HEAD_DIM);
#pragma unroll
      for (int m = 0; m < COLUMN_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float(&o)[4] = state.o[m][n];
          const uint32_t pair = transpose_8x8(pack_pair(__fmul_rn(o[2 * half], factor[0]),
                                                        __fmul_rn(o[2 * half + 1], factor[1])));
          if (r < rows.num_rows) out[m * 8 + half * 4 + t] = pair;
        }
      }
    }
  }
}

// All tiles of a part; `taken` tiles came before them.
__device__ __forceinline__ void take_part(State& state, const QueryRows& query, Shared& shared,
                                          const Keys& keys, const Tiles& tiles, int taken,
                                          int first_head, float cap) {
  for (int i = 0; i < tiles.total(); i++, taken++) {
    const int stage = taken % NUM_STAGES, index = tiles.at(i) * KEY_TILE;
    wait_phase(shared_address(&shared.filled[stage]), taken / NUM_STAGES % 2);
    const uint32_t address = shared_address(shared.stages[stage]);
    if (is_full(keys, index))
      take_tile<true>(state, query, shared, address, keys, index, first_head, cap);
    else
      take_tile<false>(state, query, shared, address, keys, index, first_head, cap);
    arrive_phase(shared_address(&shared.emptied[stage]));
  }
  close_state(state);
}

// The warps that compute, each for KV head first_head + warp. unit: of the block, without `split`.
template <typename Params>
__device__ __forceinline__ void attend(Shared& shared, const Params& p, const Rows& rows,
                                       const Keys& keys, int first_head, int split, int64_t unit) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, kv_head = first_head + warp;
  QueryRows query;
  const uint16_t* q[ROW_TILES];
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    const int r = 8 * n + g;
    q[n] = r < rows.num_rows ? p.q + place_of(p, rows, kv_head, r) * HEAD_DIM : nullptr;
  }
  const Sinks sinks = load_sinks(p.sink, rows, kv_head);
  load_rows(query, q, p.score_factor);

  const int num_parts = parts_with_keys(keys);
  State state;
  clear_state(state);
  if constexpr (!MULTI_PART) {
    const Tiles tiles = tiles_of_part(keys, 0);
    take_part(state, query, shared, keys, tiles, 0, first_head, p.cap);
    store_rows(p, shared, rows, state, sinks, kv_head);
    return;
  }
  State total;
  clear_state(total);
  const int64_t warp_states = (unit * HEADS + warp) * p.num_parts;
  float* partials = p.splits == 1 ? nullptr : p.partials + warp_states * (STATE_WORDS * 32);
  int taken = 0;
  for (int part = split; part < num_parts; part += p.splits) {
    const Tiles tiles = tiles_of_part(keys, part);
    if (tiles.total() == 0) continue;
    take_part(state, query, shared, keys, tiles, taken, first_head, p.cap);
    taken += tiles.total();
    if (partials == nullptr) merge_state(total, state);
    else store_state(partials + part * int64_t(STATE_WORDS * 32), state);
    clear_state(state);
  }

  // Of several blocks the one that ends last merges all parts.
  if (partials != nullptr) {
    __threadfence();
    named_barrier(1, CONSUMERS);
    if (threadIdx.x == 0) {
      const bool is_last = atomicAdd(p.counters + unit, 1u) == uint32_t(p.splits - 1);
      if (is_last) p.counters[unit] = 0;
      shared.is_last = is_last;
    }
    named_barrier(1, CONSUMERS);
    if (!shared.is_last) return;
    __threadfence();
    for (int part = 0; part < num_parts; part++) {
      if (tiles_of_part(keys, part).total() == 0) continue;
      load_state(state, partials + part * int64_t(STATE_WORDS * 32));
      merge_state(total, state);
    }
  }
  store_rows(p, shared, rows, total, sinks, kv_head);
}

// A whole thread block. keys: from join_keys in every warp. split: which of p.splits blocks.
template <typename Params, typename Source>
__device__ __forceinline__ void decode_rows(Shared& shared, const Params& p, const Rows& rows,
                                            const Keys& keys, const Source& source, int head_group,
                                            int split, int64_t unit) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < NUM_STAGES; i++) {
      barrier_init(shared_address(&shared.filled[i]), FILL_ARRIVALS);
      barrier_init(shared_address(&shared.emptied[i]), CONSUMERS);
    }
    publish_barriers();
  }
  __syncthreads();
  wait_for_kernel_ahead();
  let_kernel_behind_start();
  if (threadIdx.x < CONSUMERS)
    attend(shared, p, rows, keys, head_group * HEADS, split, unit);
  else
    fetch_tiles(shared, keys, source, head_group * HEADS, split, p.splits);
}
