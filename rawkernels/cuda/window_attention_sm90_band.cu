// window_attention for sm_90a and short windows: all keys of a row tile in one product.
// grid (at most one block an SM): each block walks over one range of consecutive steps; block
//      (CONSUMERS + 1) x 128 threads: consumer warpgroups, then one warp that requests copies
// in   as window_attention_sm90.cu
// out  as window_attention_sm90.cu
// needs the same, sink_tokens 0, and WINDOW - 1 <= 16 HISTORY_CHUNKS
// bound by memory: a row is read and written once, keys and values almost once a kv head
//
// A step is STEP_TOKENS tokens of HEADS heads: STEP_TILES row tiles of one warpgroup each. Its
// keys, the band, are its own tokens' and 16 HISTORY_CHUNKS before them. Keys and values stay in
// shared memory, in rings of chunks of 16: a step brings STEP_CHUNKS new ones. So softmax needs no
// second pass, and only the oldest and the newest columns of the band a mask.
//
// S takes the band in pieces of PIECE_CHUNKS chunks. A piece must not wrap in the ring of keys, so
// its first PIECE_CHUNKS - 1 chunks are there a second time behind its end.
#include "hopper.cuh"
#include "window_attention_sm90_band_params.cuh"
#include "window_attention_sm90.cuh"

constexpr int CHUNK = 16;  // keys of a step of O = P V
constexpr int STEP_TOKENS = ROW_TOKENS > CHUNK ? ROW_TOKENS : CHUNK;
constexpr int STEP_CHUNKS = STEP_TOKENS / CHUNK, STEP_TILES = STEP_TOKENS / ROW_TOKENS;
constexpr int BAND_CHUNKS = HISTORY_CHUNKS + STEP_CHUNKS, HISTORY = HISTORY_CHUNKS * CHUNK;
constexpr int PIECES = BAND_CHUNKS / PIECE_CHUNKS, SCORES = PIECE_CHUNKS * CHUNK / 2;
constexpr int NUM_CHUNKS = BAND_CHUNKS + AHEAD_CHUNKS;  // of a ring
constexpr int MIRRORED = PIECE_CHUNKS - 1;
constexpr int CHUNK_SLAB_BYTES = CHUNK * SLAB_ROW_BYTES;
constexpr int KEY_SLAB_BYTES = (NUM_CHUNKS + MIRRORED) * CHUNK_SLAB_BYTES;
constexpr int VALUE_SLAB_BYTES = NUM_CHUNKS * CHUNK_SLAB_BYTES;
constexpr int STEP_ENTRIES = AHEAD_CHUNKS / STEP_CHUNKS + 2;  // steps begun and not all done
static_assert(BAND_CHUNKS % PIECE_CHUNKS == 0, "whole pieces");
static_assert(WINDOW >= 1 && WINDOW - 1 <= HISTORY, "the band holds the window");
static_assert(AHEAD_CHUNKS >= STEP_CHUNKS, "the next step's chunks");
static_assert(Q_STAGES % CONSUMERS == 0, "a warpgroup sees every phase of its own slots");

struct Tile {
  RowTokens tokens;
  int offset;               // of its first token in the step
  int first_key;            // position of the band's first key, may be negative
  int chunk;                // number of the band's first chunk, counted over the block's life
  int slot, round;          // where in the ring it is: chunk % NUM_CHUNKS, chunk / NUM_CHUNKS
  int step;                 // its step, counted so; -1 behind the last tile
};
struct Shared {
  uint8_t queries[Q_STAGES][QUERY_BYTES];
  uint8_t keys[NUM_SLABS * KEY_SLAB_BYTES];
  uint8_t values[NUM_SLABS * VALUE_SLAB_BYTES];
  uint8_t stage[CONSUMER_WARPS][OUT_STAGES * STAGE_BYTES];
  Tile tiles[Q_STAGES];
  int last_step[NUM_CHUNKS];       // that reads what the ring's chunk holds
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES];
  uint64_t chunk_full[NUM_CHUNKS];
  uint64_t step_done[STEP_ENTRIES];
  uint64_t edge;  // the producer waits for values before it clears some of their rows
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for less");

// ---- producer: one warp

struct Producer {
  int chunk = 0, slot = 0, q_slot = 0, step = 0, steps_done = 0;
  uint32_t q_phase = 0, edges = 0;
};
// Chunk of keys `key` .. + 15 of a sequence, last read by step `last_step`.
__device__ __forceinline__ void load_chunk(const Params& p, Shared& shared, Producer& state,
                                           const Sequence& s, int key, int kv_head, int last_step,
                                           int lane) {
  const int slot = state.slot;
  if (state.chunk >= NUM_CHUNKS) {
    const int must_be_done = shared.last_step[slot];
    for (; state.steps_done <= must_be_done; state.steps_done++)
      barrier_wait_phase(shared_address(shared.step_done + state.steps_done % STEP_ENTRIES),
                         state.steps_done / STEP_ENTRIES);
  }
  __syncwarp();
  const bool mirrored = slot < MIRRORED;
  const uint32_t full = shared_address(shared.chunk_full + slot);
  const uint32_t edge = shared_address(&shared.edge);
  const uint32_t to_keys = shared_address(shared.keys) + slot * CHUNK_SLAB_BYTES;
  const uint32_t to_values = shared_address(shared.values) + slot * CHUNK_SLAB_BYTES;
  // Rows of the chunk that are keys of the sequence.
  const int first = max(-key, 0), end = min(s.num_keys - key, CHUNK);
  const bool whole = first == 0 && end == CHUNK, none = first >= end;
  if (lane == 0) {
    shared.last_step[slot] = last_step;
    if (!none) {
      const uint32_t barrier = whole ? full : edge;
      const int row = s.first_key + key;
      barrier_expect(barrier, (mirrored ? 3 : 2) * NUM_SLABS * CHUNK_SLAB_BYTES);
#pragma unroll
      for (int slab = 0; slab < NUM_SLABS; slab++) {
        const int x = slab * SLAB_COLUMNS;
        copy_box(to_keys + slab * KEY_SLAB_BYTES, &p.k_map, x, kv_head, row, barrier);
        if (mirrored)
          copy_box(to_keys + slab * KEY_SLAB_BYTES + NUM_CHUNKS * CHUNK_SLAB_BYTES, &p.k_map, x,
                   kv_head, row, barrier);
        copy_box(to_values + slab * VALUE_SLAB_BYTES, &p.v_map, x, kv_head, row, barrier);
      }
    }
  }
  if (!whole) {
    if (!none) barrier_wait_phase(edge, state.edges++);
    clear_rows(to_values, VALUE_SLAB_BYTES, 0, none ? CHUNK : first, lane);
    clear_rows(to_values, VALUE_SLAB_BYTES, none ? CHUNK : end, CHUNK, lane);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  }
  __syncwarp();
  state.chunk++;
  state.slot = slot + 1 == NUM_CHUNKS ? 0 : slot + 1;
}

__device__ __forceinline__ void load_tile(const Params& p, Shared& shared, Producer& state,
                                          const Tile& tile, int lane) {
  barrier_wait_phase(shared_address(shared.q_empty + state.q_slot), state.q_phase - 1);
  const uint32_t full = shared_address(shared.q_full + state.q_slot);
  if (lane == 0) {
    shared.tiles[state.q_slot] = tile;
    if (tile.step >= 0) {
      barrier_expect(full, QUERY_BYTES);
#pragma unroll
      for (int slab = 0; slab < NUM_SLABS; slab++)
        copy_box(shared_address(shared.queries[state.q_slot]) + slab * QUERY_SLAB_BYTES, &p.q_map,
                 slab * SLAB_COLUMNS, tile.tokens.head, tile.tokens.first, full);
    } else {
      barrier_arrive(full);
    }
  }
  if (++state.q_slot == Q_STAGES) state.q_slot = 0, state.q_phase++;
}

// A range of steps: all steps of all sequences for the first HEADS heads, then for the next.
__device__ __forceinline__ void produce(const Params& p, Shared& shared, int lane) {
  const int steps = count_tiles(p, STEP_TOKENS, lane), groups = p.num_q_heads / HEADS;
  const int64_t all = int64_t(steps) * groups;
  int64_t next = all * blockIdx.x / gridDim.x;
  const int64_t end = all * (blockIdx.x + 1) / gridDim.x;
  Producer state;
#pragma unroll 1
  while (next < end) {
    const int group = static_cast<int>(next / steps);
    const int2 place = find_tile(p, static_cast<int>(next % steps), STEP_TOKENS, lane);
    const Sequence s = load_sequence(p, place.x);
    const int left = tiles_of(s, STEP_TOKENS) - place.y;
    const int run = static_cast<int>(end - next < left ? end - next : left);
    const int head = group * HEADS, kv_head = head / p.heads_per_kv;
    const int first_chunk = state.chunk, first_step = state.step;
    const int before = tokens_before(s, STEP_TOKENS);
    const int first_token = place.y * STEP_TOKENS - before;  // may lie before the sequence's
    const int first_key = s.num_keys - s.num_queries + first_token - HISTORY;
    int loaded = 0;
#pragma unroll 1
    for (int i = 0; i < run; i++) {
      for (; loaded < BAND_CHUNKS + i * STEP_CHUNKS; loaded++)
        load_chunk(p, shared, state, s, first_key + loaded * CHUNK, kv_head,
                   first_step + min(loaded / STEP_CHUNKS, run - 1), lane);
#pragma unroll 1
      for (int t = 0; t < STEP_TILES; t++) {
        const int token = first_token + i * STEP_TOKENS + t * ROW_TOKENS;
        // A tile behind the sequence's end has no tokens, but its step waits for it.
        const Tile tile = {{s.first_query + token, -token, s.num_queries - token, head},
                           t * ROW_TOKENS,
                           first_key + i * STEP_TOKENS,
                           first_chunk + i * STEP_CHUNKS,
                           (first_chunk + i * STEP_CHUNKS) % NUM_CHUNKS,
                           (first_chunk + i * STEP_CHUNKS) / NUM_CHUNKS,
                           first_step + i};
        load_tile(p, shared, state, tile, lane);
      }
    }
    state.step += run;
    next += run;
  }
  const Tile none = {{0, 0, 0, 0}, 0, 0, 0, 0, 0, -1};
  for (int c = 0; c < CONSUMERS; c++) load_tile(p, shared, state, none, lane);
}

// ---- consumers: a warpgroup each

// Score of column 8 j + e + 2 (lane % 4) of row 8 i + lane / 4 of the warp.
__device__ __forceinline__ float& score_at(float (&s)[PIECES][SCORES], int i, int j, int e) {
  return s[j / (2 * PIECE_CHUNKS)][j % (2 * PIECE_CHUNKS) * 4 + 2 * i + e];
}
// The columns of the band that a row does not see become -inf. All rows see the columns between the
// oldest and the newest ones, but for a band that begins before its sequence (BEGIN).
template <bool BEGIN>
__device__ __forceinline__ void mask_scores(float (&s)[PIECES][SCORES], const Tile& tile,
                                            int tid) {
  constexpr int OLDEST_SEEN = HISTORY - WINDOW + 1;  // column that the step's first token sees
  const float none = minus_infinity();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int token = tile.offset + (row_of_thread(tid) + 8 * i) / HEADS;
    const int first = max(token + OLDEST_SEEN, BEGIN ? -tile.first_key : 0) - 2 * (tid % 4);
    const int last = token - 2 * (tid % 4);  // from column HISTORY on
#pragma unroll
    for (int j = 0; j < BAND_CHUNKS * 2; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 8 * j + e;
        float& score = score_at(s, i, j, e);
        if (!BEGIN && OLDEST_SEEN == 1 && column < STEP_TOKENS && HISTORY >= STEP_TOKENS) {
          // Token t sees column c here where it does not see HISTORY + c: one comparison for both.
          float& newest = score_at(s, i, j + HISTORY / 8, e);
          const bool past = column <= last;
          score = past ? none : score;
          newest = past ? newest : none;
          continue;
        }
        if (BEGIN || 8 * j < OLDEST_SEEN + STEP_TOKENS - 1)
          score = column >= first ? score : none;
        if (8 * j + 7 > HISTORY && (BEGIN || OLDEST_SEEN != 1 || HISTORY < STEP_TOKENS))
          score = column - HISTORY <= last ? score : none;
      }
    }
  }
}

__device__ __forceinline__ int ring_slot(int slot) {
  return slot >= NUM_CHUNKS ? slot - NUM_CHUNKS : slot;
}

__device__ __forceinline__ void scores_of_tile(float (&s)[PIECES][SCORES], uint32_t queries,
                                               uint32_t keys, int first_slot) {
  products_begin();
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    const uint32_t b = keys + ring_slot(first_slot + piece * PIECE_CHUNKS) *
                                  descriptor_step(CHUNK_SLAB_BYTES);
#pragma unroll
    for (int i = 0; i < DIM_STEPS; i++)
      product_keys(s[piece], queries + descriptor_step(column_offset(i, QUERY_SLAB_BYTES)),
                   b + descriptor_step(column_offset(i, KEY_SLAB_BYTES)), i != 0);
  }
  products_commit();
  products_wait<0>();
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) products_ready(s[piece]);
}

// Scores to weights, in registers as the A operand of O = P V. One row after the other, so that the
// second one's comparisons run under the first one's exponentials.
__device__ __forceinline__ void weigh(const float (&s)[PIECES][SCORES],
                                      uint32_t (&weights)[PIECES][SCORES / 2], float (&base)[2],
                                      float (&sum)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int j = 0; j < SCORES / 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          largest[e] = fmaxf(largest[e], s[piece][4 * j + 2 * i + e]);
    const float most = quad_max(fmaxf(largest[0], largest[1]));
    // Without a visible key the base is 0: all weights are then 0.
    base[i] = most == minus_infinity() ? 0.0f : most * scale_log2;
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
#pragma unroll
      for (int j = 0; j < SCORES / 4; j++) {
        float w[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          w[e] = exp2_approx(fmaf(s[piece][4 * j + 2 * i + e], scale_log2, -base[i]));
          part[e] += w[e];
        }
        weights[piece][2 * j + i] = pack_operands(w[0], w[1]);
      }
    }
    sum[i] = part[0] + part[1];
  }
}

// Not piece by piece, with the products of each under the exponentials of the next: that was 2 to
// 7 % slower on an H200.
__device__ __forceinline__ void issue_outputs(float (&o)[OUT_REGISTERS],
                                              const uint32_t (&weights)[PIECES][SCORES / 2],
                                              uint32_t values, int first_slot) {
  products_begin();
#pragma unroll
  for (int c = 0; c < BAND_CHUNKS; c++) {
    const uint32_t* w = weights[c / PIECE_CHUNKS] + c % PIECE_CHUNKS * 4;
    product_values(o, w[0], w[1], w[2], w[3],
                   values + ring_slot(first_slot + c) * descriptor_step(CHUNK_SLAB_BYTES), c != 0);
  }
  products_commit();
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, int consumer, int tid) {
  const int lane = tid % 32;
  int q_slot = consumer, chunks_seen = 0;
  uint32_t q_phase = 0;
#pragma unroll 1
  for (;;) {
    barrier_wait_phase(shared_address(shared.q_full + q_slot), q_phase);
    const Tile tile = shared.tiles[q_slot];
    if (tile.step < 0) break;
    // Chunks of earlier tiles that this band still holds have been waited for.
    for (int c = max(chunks_seen - tile.chunk, 0); c < BAND_CHUNKS; c++) {
      const int slot = ring_slot(tile.slot + c);
      barrier_wait_phase(shared_address(shared.chunk_full + slot),
                         tile.round + (slot < tile.slot ? 1 : 0));
    }
    chunks_seen = tile.chunk + BAND_CHUNKS;
    float s[PIECES][SCORES];
    scores_of_tile(s, descriptor(shared_address(shared.queries[q_slot])),
                   descriptor(shared_address(shared.keys)), tile.slot);
    warp_barrier();  // all lanes have read the tile
    if (lane == 0) barrier_arrive(shared_address(shared.q_empty + q_slot));
    q_slot += CONSUMERS;
    if (q_slot >= Q_STAGES) q_slot -= Q_STAGES, q_phase++;

#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) soften(s[piece], p.pre_scale);
    if (tile.first_key < 0) mask_scores<true>(s, tile, opaque(tid));
    else mask_scores<false>(s, tile, opaque(tid));
    const Sinks sinks = load_sinks(p, tile.tokens.head, opaque(tid));
    float base[2], sum[2], o[OUT_REGISTERS];
    uint32_t weights[PIECES][SCORES / 2];
    weigh(s, weights, base, sum, p.scale_log2);
    issue_outputs(o, weights, descriptor(shared_address(shared.values), VALUE_SLAB_BYTES),
                  tile.slot);
    // Under the products.
    const Rows rows = finish_rows(base, sum, sinks);
    store_lse(p, rows, tile.tokens, opaque(tid));
    products_wait<0>();
    products_ready(o);
    if (lane == 0) barrier_arrive(shared_address(shared.step_done + tile.step % STEP_ENTRIES));
    const int thread = opaque(tid);
    store_rows(p, o, rows, tile.tokens, shared_address(shared.stage[thread / 32]), thread);
  }
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_attention_sm90_band(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  if (tid == 0) {
    prefetch_maps(p);
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(shared_address(shared.q_full + i), 1);
      barrier_init(shared_address(shared.q_empty + i), WARPS);
    }
    for (int i = 0; i < NUM_CHUNKS; i++) barrier_init(shared_address(shared.chunk_full + i), 1);
    for (int i = 0; i < STEP_ENTRIES; i++)
      barrier_init(shared_address(shared.step_done + i), STEP_TILES * WARPS);
    barrier_init(shared_address(&shared.edge), 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    if (tid / 32 == CONSUMER_WARPS) produce(p, shared, lane);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, shared, warpgroup, tid);
  }
}
