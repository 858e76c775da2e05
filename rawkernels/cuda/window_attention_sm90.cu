// window_attention for sm_90a: any window, key tiles streamed through shared memory.
// grid (at most one block an SM): each block walks over query tiles of CONSUMERS x 64 rows; block
//      (CONSUMERS + 1) x 128 threads: consumer warpgroups, then one warp that requests copies
// in   q bf16 or fp16 [num_q, num_q_heads, HEAD_DIM] through q_map, k and v [num_k, num_kv_heads,
//      HEAD_DIM] through k_map, v_map; cu_seqlens_q, cu_seqlens_k int32 [num_seqs + 1]
// out  out like q, through out_map and as bounded pieces; lse f32 [num_q, num_q_heads]
// needs HEADS divides num_q_heads / num_kv_heads; num_k > 0; no visible key gives out 0, lse -inf
// bound by products: 4 x HEAD_DIM FLOP a row and key of the visited key tiles
//
// Key tiles start at the oldest key that the query tile sees and are visited newest first, then
// those of sink tokens. Two warpgroups take turns, so that one's softmax runs under the other's
// products; inside a warpgroup the products of the next scores and of the last weights run under
// the softmax between them.
#include "hopper.cuh"
#include "window_attention_sm90_params.cuh"
#include "window_attention_sm90.cuh"

constexpr int TILE_TOKENS = ROW_TOKENS * CONSUMERS;
constexpr int KEY_SLAB_BYTES = KEY_TILE * SLAB_ROW_BYTES;
constexpr int KEY_BYTES = NUM_SLABS * KEY_SLAB_BYTES;
constexpr int QUERY_BYTES = NUM_SLABS * QUERY_SLAB_BYTES;
constexpr int SCORES = KEY_TILE / 2;
constexpr int KEY_STEPS = KEY_TILE / 16;
static_assert(KEY_TILE % 16 == 0 && KEY_TILE <= 256, "steps of products, rows of a box");
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536,
              "one SM");

// A query tile and its keys.
struct Item {
  int token, begin, end, head;    // as RowTokens; `end` 0 behind the last item
  int position;                   // of the first token, in its sequence
  int first_key, window_tiles;    // key tiles of the window, first_key the oldest in sight
  int sink_tiles, sink_end;       // key tiles of keys 0 .. sink_end - 1, ahead of the window
};
struct Shared {
  uint8_t queries[Q_STAGES][CONSUMERS][QUERY_BYTES];
  uint8_t keys[KV_STAGES][KEY_BYTES];
  uint8_t values[KV_STAGES][KEY_BYTES];
  uint8_t stage[CONSUMER_WARPS][OUT_STAGES * STAGE_BYTES];
  Item items[Q_STAGES];
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES];
  uint64_t k_full[KV_STAGES], k_empty[KV_STAGES];
  uint64_t v_full[KV_STAGES], v_empty[KV_STAGES];
  uint64_t edge;  // the producer waits for values before it clears some of their rows
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for less");

// Steps through a ring of STAGES entries; `phase` counts rounds. An entry is full for the consumers
// in phase `phase`, and empty for the producer once phase - 1 has been released.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase++;
  }
};

// First key of key tile `i` in the order of visits.
__device__ __forceinline__ int key_of_tile(const Item& item, int i) {
  return i < item.window_tiles ? item.first_key + (item.window_tiles - 1 - i) * KEY_TILE
                               : (i - item.window_tiles) * KEY_TILE;
}

// ---- producer: one warp

__device__ __forceinline__ Item make_item(const Params& p, const Sequence& s, int tile, int group) {
  Item item;
  const int before = tokens_before(s, TILE_TOKENS), shift = tile * TILE_TOKENS - before;
  item.token = s.first_query + shift;
  item.begin = tile == 0 ? before : 0;
  item.end = min(TILE_TOKENS, s.num_queries - shift);
  item.head = group * HEADS;
  item.position = s.num_keys - s.num_queries + shift;
  const int end = max(item.position + item.end, 0);  // behind the newest key in sight
  item.first_key = min(max(item.position - p.window + 1, 0), end);
  // A tile whose tokens see no key visits one all the same, so that there is one way through.
  item.window_tiles = max(div_ceil(end - item.first_key, KEY_TILE), 1);
  item.sink_end = min(p.sink_tokens, item.first_key);
  item.sink_tiles = div_ceil(item.sink_end, KEY_TILE);
  return item;
}

__device__ __forceinline__ void load_values(const Params& p, Shared& shared, const Sequence& s,
                                            int key, int kv_head, Ring<KV_STAGES>& ring,
                                            uint32_t& edges, int lane) {
  const uint32_t full = shared_address(shared.v_full + ring.stage);
  const uint32_t edge = shared_address(&shared.edge), to = shared_address(shared.values[ring.stage]);
  barrier_wait_phase(shared_address(shared.v_empty + ring.stage), ring.phase - 1);
  const int inside = s.num_keys - key;  // rows that are keys of the sequence
  const bool whole = inside >= KEY_TILE || s.first_key + s.num_keys == p.num_k;
  if (lane == 0) {
    barrier_expect(whole ? full : edge, KEY_BYTES);
#pragma unroll
    for (int slab = 0; slab < NUM_SLABS; slab++)
      copy_box(to + slab * KEY_SLAB_BYTES, &p.v_map, slab * SLAB_COLUMNS, kv_head,
               s.first_key + key, whole ? full : edge);
  }
  if (!whole) {
    barrier_wait_phase(edge, edges++);
    clear_rows(to, KEY_SLAB_BYTES, max(inside, 0), KEY_TILE, lane);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  }
  __syncwarp();
  ring.next();
}

__device__ __forceinline__ void load_keys(const Params& p, Shared& shared, const Sequence& s,
                                          int key, int kv_head, Ring<KV_STAGES>& ring, int lane) {
  const uint32_t full = shared_address(shared.k_full + ring.stage);
  barrier_wait_phase(shared_address(shared.k_empty + ring.stage), ring.phase - 1);
  if (lane == 0) {
    barrier_expect(full, KEY_BYTES);
#pragma unroll
    for (int slab = 0; slab < NUM_SLABS; slab++)
      copy_box(shared_address(shared.keys[ring.stage]) + slab * KEY_SLAB_BYTES, &p.k_map,
               slab * SLAB_COLUMNS, kv_head, s.first_key + key, full);
  }
  ring.next();
}

// Item `n` of this block, in an order whose ends even out: forth and back through the blocks.
__device__ __forceinline__ int64_t item_of_block(int n) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return int64_t(n) * blocks + (n % 2 == 0 ? block : blocks - 1 - block);
}

__device__ __forceinline__ void produce(const Params& p, Shared& shared, int lane) {
  const int tiles = count_tiles(p, TILE_TOKENS, lane), groups = p.num_q_heads / HEADS;
  Ring<Q_STAGES> queries;
  Ring<KV_STAGES> keys, values;
  uint32_t edges = 0;
#pragma unroll 1
  for (int n = 0;; n++) {
    const int64_t index = item_of_block(n);
    // The last blocks of a round may have none while earlier ones go on.
    const bool none = index >= int64_t(tiles) * groups;
    if (none && int64_t(n) * gridDim.x < int64_t(tiles) * groups) continue;
    barrier_wait_phase(shared_address(shared.q_empty + queries.stage), queries.phase - 1);
    const uint32_t full = shared_address(shared.q_full + queries.stage);
    if (none) {
      if (lane == 0) {
        shared.items[queries.stage].end = 0;
        barrier_arrive(full);
      }
      return;
    }
    // Longest first. With a window, blocks work on all heads of nearby tokens; without one, on one
    // kv head after the other, whose keys then stay in L2.
    const int group = static_cast<int>(p.head_major ? index / tiles : index % groups);
    const int tile = tiles - 1 - static_cast<int>(p.head_major ? index % tiles : index / groups);
    const int2 place = find_tile(p, tile, TILE_TOKENS, lane);
    const Sequence s = load_sequence(p, place.x);
    const Item item = make_item(p, s, place.y, group);
    const int kv_head = item.head / p.heads_per_kv;
    if (lane == 0) {
      shared.items[queries.stage] = item;
      barrier_expect(full, CONSUMERS * QUERY_BYTES);
      for (int c = 0; c < CONSUMERS; c++)
        for (int slab = 0; slab < NUM_SLABS; slab++)
          copy_box(shared_address(shared.queries[queries.stage][c]) + slab * QUERY_SLAB_BYTES,
                   &p.q_map, slab * SLAB_COLUMNS, item.head, item.token + c * ROW_TOKENS, full);
    }
    queries.next();
    const int visits = item.window_tiles + item.sink_tiles;
    load_keys(p, shared, s, key_of_tile(item, 0), kv_head, keys, lane);
#pragma unroll 1
    for (int i = 1; i < visits; i++) {
      load_keys(p, shared, s, key_of_tile(item, i), kv_head, keys, lane);
      load_values(p, shared, s, key_of_tile(item, i - 1), kv_head, values, edges, lane);
    }
    load_values(p, shared, s, key_of_tile(item, visits - 1), kv_head, values, edges, lane);
  }
}

// ---- consumers: a warpgroup each

// The keys of a tile that a row does not see become -inf.
__device__ __forceinline__ void mask_scores(const Params& p, float (&s)[SCORES], const Item& item,
                                            int visit, int key, int row, int quad) {
  const float none = minus_infinity();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int position = item.position + (row + 8 * i) / HEADS;
    const bool window = visit < item.window_tiles;
    // Of the thread's first column; column c is seen for c <= last, and c >= first or c < sink.
    const int last = (window ? position : item.sink_end - 1) - key - 2 * quad;
    const int first = (window ? max(position - p.window + 1, 0) : 0) - key - 2 * quad;
    const int sink = p.sink_tokens - key - 2 * quad;
#pragma unroll
    for (int j = 0; j < SCORES / 4; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 8 * j + e;
        float& score = s[4 * j + 2 * i + e];
        score = column <= last && (column >= first || column < sink) ? score : none;
      }
    }
  }
}

// What a thread keeps of its two rows.
struct Softmax {
  float largest[2], sum[2];
};

// Scores to weights; returns what earlier sums and outputs are to be multiplied by.
template <bool FIRST>
__device__ __forceinline__ float2 weigh(float (&s)[SCORES], Softmax& state, float scale_log2) {
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float largest[2] = {s[2 * i], s[2 * i + 1]};
#pragma unroll
    for (int j = 1; j < SCORES / 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) largest[e] = fmaxf(largest[e], s[4 * j + 2 * i + e]);
    float now = quad_max(fmaxf(largest[0], largest[1]));
    if (!FIRST) now = fmaxf(now, state.largest[i]);
    // Without a visible key so far the base is 0: all weights are then 0.
    const float base = now == minus_infinity() ? 0.0f : now * scale_log2;
    factor[i] = FIRST ? 0.0f : exp2_approx(fmaf(state.largest[i], scale_log2, -base));
    state.largest[i] = now;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < SCORES / 4; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[4 * j + 2 * i + e];
        score = exp2_approx(fmaf(score, scale_log2, -base));
        sum[e] += score;
      }
    }
    state.sum[i] = FIRST ? sum[0] + sum[1] : fmaf(state.sum[i], factor[i], sum[0] + sum[1]);
  }
  return make_float2(factor[0], factor[1]);
}
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[SCORES / 2],
                                             const float (&s)[SCORES]) {
#pragma unroll
  for (int i = 0; i < SCORES / 2; i++) weights[i] = pack_operands(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void issue_scores(float (&s)[SCORES], uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int i = 0; i < DIM_STEPS; i++)
    product_keys(s, queries + descriptor_step(column_offset(i, QUERY_SLAB_BYTES)),
                 keys + descriptor_step(column_offset(i, KEY_SLAB_BYTES)), i != 0);
  products_commit();
}
__device__ __forceinline__ void issue_outputs(float (&o)[OUT_REGISTERS],
                                              const uint32_t (&w)[SCORES / 2], uint32_t values,
                                              int add) {
#pragma unroll
  for (int i = 0; i < KEY_STEPS; i++)
    product_values(o, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3],
                   values + i * descriptor_step(16 * SLAB_ROW_BYTES), i == 0 ? add : 1);
  products_commit();
}

// A warpgroup issues its products when the one before it has; the ids are 1 .. CONSUMERS.
__device__ __forceinline__ void wait_turn(int consumer) {
#if TAKE_TURNS
  named_barrier(1 + consumer, 2 * WARPGROUP_THREADS);
#endif
}
__device__ __forceinline__ void pass_turn(int consumer) {
#if TAKE_TURNS
  named_arrive(1 + (consumer + 1) % CONSUMERS, 2 * WARPGROUP_THREADS);
#endif
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, int consumer, int tid) {
  const int lane = tid % 32, quad = lane % 4;
  const int row = consumer * ROW_TILE + tid % WARPGROUP_THREADS / 32 * WARP_ROWS + lane / 4;
  Ring<Q_STAGES> query;
  Ring<KV_STAGES> key_ring, value_ring;
  if (consumer == CONSUMERS - 1) pass_turn(consumer);
#pragma unroll 1
  for (;; query.next()) {
    barrier_wait_phase(shared_address(shared.q_full + query.stage), query.phase);
    const Item item = shared.items[query.stage];
    if (item.end == 0) break;
    const uint32_t queries = descriptor(shared_address(shared.queries[query.stage][consumer]));
    const int visits = item.window_tiles + item.sink_tiles;
    // A key tile in which some token of the query tile does not see some key.
    const int full_end = item.position + 1, full_begin = item.position + item.end - p.window;
    float s[SCORES], o[OUT_REGISTERS];
    uint32_t weights[SCORES / 2];
    Softmax state;

    int key = key_of_tile(item, 0);
    barrier_wait_phase(shared_address(shared.k_full + key_ring.stage), key_ring.phase);
    wait_turn(consumer);
    products_begin();
    issue_scores(s, queries, descriptor(shared_address(shared.keys[key_ring.stage])));
    pass_turn(consumer);
    products_wait<0>();
    products_ready(s);
    warp_barrier();
    if (lane == 0) barrier_arrive(shared_address(shared.k_empty + key_ring.stage));
    key_ring.next();
    soften(s, p.pre_scale);
    if (key + KEY_TILE > full_end || key < full_begin) mask_scores(p, s, item, 0, key, row, quad);
    weigh<true>(s, state, p.scale_log2);
    pack_weights(weights, s);
    barrier_wait_phase(shared_address(shared.v_full + value_ring.stage), value_ring.phase);

#pragma unroll 1
    for (int i = 1; i < visits; i++) {
      key = key_of_tile(item, i);
      barrier_wait_phase(shared_address(shared.k_full + key_ring.stage), key_ring.phase);
      wait_turn(consumer);
      products_begin();
      issue_scores(s, queries, descriptor(shared_address(shared.keys[key_ring.stage])));
      issue_outputs(o, weights,
                    descriptor(shared_address(shared.values[value_ring.stage]), KEY_SLAB_BYTES),
                    i > 1);
      pass_turn(consumer);
      products_wait<1>();
      products_ready(s);
      warp_barrier();
      if (lane == 0) barrier_arrive(shared_address(shared.k_empty + key_ring.stage));
      key_ring.next();
      soften(s, p.pre_scale);
      if (key + KEY_TILE > full_end || key < full_begin)
        mask_scores(p, s, item, i, key, row, quad);
      const float2 factor = weigh<false>(s, state, p.scale_log2);
      // The values of these weights: they are waited for here, in front of the wait for products,
      // as the assembler does not move that one across a loop. It would run ahead of the softmax.
      products_ready(s);
      const int read = value_ring.stage;
      value_ring.next();
      barrier_wait_phase(shared_address(shared.v_full + value_ring.stage), value_ring.phase);
      products_wait<0>();
      products_ready(o);
      warp_barrier();
      if (lane == 0) barrier_arrive(shared_address(shared.v_empty + read));
      pack_weights(weights, s);
#pragma unroll
      for (int j = 0; j < OUT_REGISTERS; j++) o[j] *= j / 2 % 2 == 0 ? factor.x : factor.y;
    }
    if (lane == 0) barrier_arrive(shared_address(shared.q_empty + query.stage));
    products_begin();
    issue_outputs(o, weights,
                  descriptor(shared_address(shared.values[value_ring.stage]), KEY_SLAB_BYTES),
                  visits > 1);
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      base[i] = state.largest[i] == minus_infinity() ? 0.0f : state.largest[i] * p.scale_log2;
    const int skipped = consumer * ROW_TOKENS;
    const RowTokens tokens = {item.token + skipped, item.begin - skipped, item.end - skipped,
                              item.head};
    const Rows rows = finish_rows(base, state.sum, load_sinks(p, item.head, tid));
    store_lse(p, rows, tokens, tid);
    products_wait<0>();
    products_ready(o);
    warp_barrier();
    if (lane == 0) barrier_arrive(shared_address(shared.v_empty + value_ring.stage));
    value_ring.next();
    store_rows(p, o, rows, tokens, shared_address(shared.stage[tid / 32]), tid);
  }
  if (consumer == 0) wait_turn(consumer);  // what the last pass_turn gave; no barrier stays open
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_attention_sm90(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  if (tid == 0) {
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.k_map);
    prefetch_tensor_map(&p.v_map);
    prefetch_tensor_map(&p.out_map);
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(shared_address(shared.q_full + i), 1);
      barrier_init(shared_address(shared.q_empty + i), CONSUMER_WARPS);
    }
    for (int i = 0; i < KV_STAGES; i++) {
      barrier_init(shared_address(shared.k_full + i), 1);
      barrier_init(shared_address(shared.v_full + i), 1);
      barrier_init(shared_address(shared.k_empty + i), CONSUMER_WARPS);
      barrier_init(shared_address(shared.v_empty + i), CONSUMER_WARPS);
    }
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
