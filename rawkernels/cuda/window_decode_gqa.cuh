// Decode attention over grouped-query records: what window_decode_gqa and paged_decode share.
//
// A thread block serves HEADS KV heads of one sequence and up to 8 * ROW_TILES query rows of each
// (row = query token x query head of the group): one warp a KV head and one that fetches records.
// Keys are taken by their index (in the ring, or the position of a paged sequence) in tiles of 16,
// and in parts of PART_KEYS. A part is summed on its own and the parts are merged in their order, by
// one block or by several (`splits`): the bits of a row are the same for every cut, and whatever
// else is in the batch.
#pragma once
#include "gqa_tile.cuh"

#ifndef PART_KEYS
#error "PART_KEYS: keys that are summed before parts are merged, a multiple of 16"
#endif
#ifndef MULTI_PART
#error "MULTI_PART: 1 where a sequence can have more than one part"
#endif
#ifndef MIN_BLOCKS
#error "MIN_BLOCKS: thread blocks that shall fit a multiprocessor"
#endif
static_assert(PART_KEYS % KEY_TILE == 0, "parts are whole tiles");
constexpr int NUM_THREADS = 32 * (HEADS + 1);
constexpr int CONSUMERS = 32 * HEADS;
constexpr int ROWS = 8 * ROW_TILES;
constexpr int PART_TILES = PART_KEYS / KEY_TILE;
// Words of a warp's partial state, lane by lane.
constexpr int STATE_WORDS = 4 * ROW_TILES * (COLUMN_TILES + 1);

struct RowKeys {
  int start, length;  // the row's keys, counted from Keys::first; length 0 sees nothing
};
struct Shared {
  uint8_t stages[NUM_STAGES][STAGE_BYTES];
  uint64_t filled[NUM_STAGES], emptied[NUM_STAGES];  // barriers of each stage
  RowKeys rows[ROWS];
  int is_last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for too little");
static_assert(ROWS <= 32, "a lane reads the keys of a token");
static_assert(STAGE_BYTES % 16 == 0, "ldmatrix reads 16 bytes");

// The query rows of a thread block: rows `first_row` .. of token `token`, which has `group` rows a
// KV head, and of the tokens behind it.
struct Rows {
  int64_t token;
  int first_row, num_rows, num_tokens, group;
};
// The keys that some row sees: indices first, first + 1, .. of a ring of ring_len.
struct Keys {
  int first, length, ring_len;
  int common_start, common_end;  // counted from `first`: seen by every row
};
// Tiles of a thread block: `low` .. low + num_low - 1, then high .. high + num_high - 1.
struct Tiles {
  int low, num_low, high, num_high;
  __device__ __forceinline__ int count() const { return num_low + num_high; }
  __device__ __forceinline__ int at(int i) const {
    return i < num_low ? low + i : high + i - num_low;
  }
};

// Rows r, r + 1, .. of a sequence's num_tokens * group, as many as a block takes.
__device__ __forceinline__ Rows take_rows(int64_t token, int num_tokens, int group, int row_group) {
  const int first = row_group * ROWS;
  Rows rows;
  rows.num_rows = min(num_tokens * group - first, ROWS);
  rows.token = token + first / group;
  rows.first_row = first % group;
  rows.num_tokens = rows.num_rows <= 0 ? 0 : (rows.first_row + rows.num_rows - 1) / group + 1;
  rows.group = group;
  return rows;
}

__device__ __forceinline__ int from_first(const Keys& keys, int index) {
  const int distance = index - keys.first;
  return distance < 0 ? distance + keys.ring_len : distance;
}

// All lanes: lane i has the index of the oldest key and the number of keys of token i of `rows`
// (0 for none). Writes the block's row table and returns the keys of all rows together.
__device__ __forceinline__ Keys join_keys(Shared& shared, const Rows& rows, int oldest, int length,
                                          int ring_len) {
  const int lane = threadIdx.x % 32;
  const uint32_t seeing = __ballot_sync(~0u, length > 0);
  Keys keys = {0, 0, ring_len, 0, 0};
  keys.first = __shfl_sync(~0u, oldest, seeing == 0 ? 0 : __ffs(seeing) - 1);
  const int start = length > 0 ? from_first(keys, oldest) : 0;
  // A row whose keys wrap past `first` again (tokens out of order) counts as reaching all around.
  const int reach = length <= 0 ? 0 : start > ring_len - length ? ring_len : start + length;
  const bool counts = lane < rows.num_tokens;
  keys.length = __reduce_max_sync(~0u, reach);
  keys.common_start = __reduce_max_sync(~0u, counts ? start : 0);
  keys.common_end = -__reduce_max_sync(~0u, counts ? -reach : -ring_len);
  for (int row = 0; row < ROWS; row++) {
    const int of = min((rows.first_row + row) / rows.group, 31);
    const RowKeys own = {__shfl_sync(~0u, start, of), __shfl_sync(~0u, length, of)};
    if (threadIdx.x == row % 32) shared.rows[row] = row < rows.num_rows ? own : RowKeys{0, 0};
  }
  return keys;
}

// The tiles with keys among tiles `begin` .. `end` - 1.
__device__ __forceinline__ Tiles tiles_between(const Keys& keys, int begin, int end) {
  const int wrapped = max(keys.first - (keys.ring_len - keys.length), 0);  // keys from index 0 on
  const int low_end = div_ceil(wrapped, KEY_TILE);
  const int high_end = keys.length == 0 ? 0 : div_ceil(keys.first + keys.length - wrapped, KEY_TILE);
  Tiles tiles;
  tiles.low = begin;
  tiles.num_low = max(min(low_end, end) - begin, 0);
  tiles.high = max(max(keys.first / KEY_TILE, low_end), begin);
  tiles.num_high = max(min(high_end, end) - tiles.high, 0);
  return tiles;
}

// Every row sees every key of a tile.
__device__ __forceinline__ bool is_full(const Keys& keys, int index) {
  const int last = index + KEY_TILE - 1;
  return last < keys.ring_len && (index < keys.first) == (last < keys.first) &&
         from_first(keys, index) >= keys.common_start && from_first(keys, last) < keys.common_end;
}
__device__ __forceinline__ bool is_present(const Keys& keys, int index) {
  return index < keys.ring_len && from_first(keys, index) < keys.length;
}

// -inf for the keys that a row does not see. Lane: keys g and g + 8, rows 2t and 2t + 1.
__device__ __forceinline__ void mask_tile(float (&s)[ROW_TILES][4], const RowKeys* rows,
                                          const Keys& keys, int index) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const RowKeys row = rows[8 * n + 2 * t + i % 2];
      const int key = index + g + i / 2 * 8;
      int distance = from_first(keys, key) - row.start;
      if (distance < 0) distance += keys.ring_len;
      if (key >= keys.ring_len || distance >= row.length) s[n][i] = NEGATIVE_INFINITY;
    }
  }
}

// The warp that fetches. Source::record(index): address of a key's record.
template <typename Source>
__device__ __forceinline__ void fetch_tiles(Shared& shared, const Keys& keys, const Tiles& tiles,
                                            const Source& source, int first_head) {
  const int num_tiles = tiles.count();
  for (int i = 0; i < num_tiles; i++) {
    const int stage = i % NUM_STAGES, index = tiles.at(i) * KEY_TILE + threadIdx.x % KEY_TILE;
    const uint8_t* record = is_present(keys, index) ? source.record(index) : nullptr;
    if (i >= NUM_STAGES)
      wait_phase(shared_address(&shared.emptied[stage]), (i / NUM_STAGES - 1) % 2);
    fill_stage(shared_address(shared.stages[stage]), record, first_head,
               shared_address(&shared.filled[stage]));
  }
}

// One tile of one head. stage: shared address; codes_at: of the head's codes from a key's K codes.
template <bool FULL>
__device__ __forceinline__ void take_tile(State& state, const QueryRows& query, const Shared& shared,
                                          uint32_t stage, const Keys& keys, int index,
                                          int first_head, float cap) {
  const int warp = threadIdx.x / 32, codes_at = (first_head + warp) * NUM_BLOCKS;
  float s[ROW_TILES][4];
  score_tile(s, query, stage + warp * HEAD_BYTES, stage + K_SCALES_AT + codes_at);
  if (SOFTCAP) cap_scores(s, cap);
  uint32_t present = 0xFFFF;
  if (!FULL) {
    mask_tile(s, shared.rows, keys, index);
    present = __ballot_sync(~0u, is_present(keys, index + threadIdx.x % KEY_TILE));
  }
  softmax_tile(s, state);
  value_tile<FULL>(state, s, stage + V_AT + warp * HEAD_BYTES, stage + V_SCALES_AT + codes_at,
                   present);
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
      for (int i = 0; i < 4; i++) to[(4 * (ROW_TILES + m * ROW_TILES + n) + i) * 32] = state.o[m][n][i];
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

// The last division, the log-sum-exp and the stores of one head's rows.
template <typename Params>
__device__ __forceinline__ void store_rows(const Params& p, const Shared& shared, const Rows& rows,
                                           const State& state, int kv_head) {
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
      float sum = state.sum[n][j], lse = NEGATIVE_INFINITY;
      if (shared.rows[r].length > 0) {
        // Every score -inf or NaN: the definition subtracts -inf from -inf.
        if (maximum == NEGATIVE_INFINITY) sum = __int_as_float(0x7FC00000);
        lse = __fmaf_rn(maximum, LN_2, logf(sum));
        if (p.sink != nullptr) {
          const float sink = p.sink[kv_head * rows.group + (rows.first_row + r) % rows.group];
          sum = __fadd_rn(sum, exp2_approx(__fmaf_rn(sink, LOG2_E, -maximum)));
        }
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
        uint32_t* out = reinterpret_cast<uint32_t*>(p.out + place_of(p, rows, kv_head, r) * HEAD_DIM);
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

// The warps that compute, each for KV head first_head + warp. unit: of the block, without `split`.
template <typename Params>
__device__ __forceinline__ void attend(Shared& shared, const Params& p, const Rows& rows,
                                       const Keys& keys, const Tiles& tiles, int first_head,
                                       int64_t unit) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, kv_head = first_head + warp;
  QueryRows query;
  const uint16_t* q[ROW_TILES];
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
    const int r = 8 * n + g;
    q[n] = r < rows.num_rows ? p.q + place_of(p, rows, kv_head, r) * HEAD_DIM : nullptr;
  }
  load_rows(query, q, p.score_factor);

  float* partials = nullptr;
  if (MULTI_PART && p.splits > 1)
    partials = p.partials + (unit * HEADS + warp) * p.num_parts * (STATE_WORDS * 32);
  State state, total;
  clear_state(state);
  if (MULTI_PART) clear_state(total);
  int part = -1;
  const int num_tiles = tiles.count();
  for (int i = 0; i < num_tiles; i++) {
    const int stage = i % NUM_STAGES, tile = tiles.at(i), index = tile * KEY_TILE;
    if (MULTI_PART && tile / PART_TILES != part) {
      if (part >= 0) {
        close_state(state);
        if (partials != nullptr) store_state(partials + part * int64_t(STATE_WORDS * 32), state);
        else merge_state(total, state);
        clear_state(state);
      }
      part = tile / PART_TILES;
    }
    wait_phase(shared_address(&shared.filled[stage]), i / NUM_STAGES % 2);
    const uint32_t address = shared_address(shared.stages[stage]);
    if (is_full(keys, index))
      take_tile<true>(state, query, shared, address, keys, index, first_head, p.cap);
    else
      take_tile<false>(state, query, shared, address, keys, index, first_head, p.cap);
    arrive_phase(shared_address(&shared.emptied[stage]));
  }
  close_state(state);
  if (!MULTI_PART) {
    store_rows(p, shared, rows, state, kv_head);
    return;
  }
  if (partials == nullptr) {
    if (part >= 0) merge_state(total, state);
    store_rows(p, shared, rows, total, kv_head);
    return;
  }

  // Of several blocks the one that ends last merges all parts.
  if (part >= 0) store_state(partials + part * int64_t(STATE_WORDS * 32), state);
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
  for (int i = 0; i < p.num_parts; i++) {
    if (tiles_between(keys, i * PART_TILES, (i + 1) * PART_TILES).count() == 0) continue;
    load_state(state, partials + i * int64_t(STATE_WORDS * 32));
    merge_state(total, state);
  }
  store_rows(p, shared, rows, total, kv_head);
}

// A whole thread block. keys: from join_keys in every warp. split: which of p.splits blocks this is.
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
  const int per_split = MULTI_PART ? p.split_parts * PART_TILES : 1 << 26;
  const Tiles tiles = tiles_between(keys, split * per_split, (split + 1) * per_split);
  if (threadIdx.x < CONSUMERS)
    attend(shared, p, rows, keys, tiles, head_group * HEADS, unit);
  else
    fetch_tiles(shared, keys, tiles, source, head_group * HEADS);
}
