// Items of window_attention_sm90.cu: query tiles and their key tiles, and the warp that requests
// them.
#pragma once
#include "window_attention_sm90.cuh"

constexpr int TILE_TOKENS = ROW_TOKENS * CONSUMERS;
constexpr int KEY_SLAB_BYTES = KEY_TILE * SLAB_ROW_BYTES;
constexpr int KEY_BYTES = NUM_SLABS * KEY_SLAB_BYTES;
constexpr int SCORES = KEY_TILE / 2;
static_assert(NARROW_TILE % 16 == 0 && NARROW_TILE < KEY_TILE, "its part that is in sight");
static_assert(KEY_TILE % 16 == 0 && KEY_TILE <= 256, "steps of products, rows of a box");

// A query tile and its keys.
struct Item {
  int token, begin, end, head;    // as RowTokens; `end` 0 behind the last item
  int position;                   // of the first token, in its sequence
  int first_key, window_tiles;    // key tiles of the window, first_key the oldest in sight
  int newest_keys;                // keys of the window's newest key tile that are in sight
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
  uint64_t turns[CONSUMERS];  // to issue products: all warps of the warpgroup before have
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
  item.newest_keys = end - item.first_key - (item.window_tiles - 1) * KEY_TILE;
  item.sink_end = min(p.sink_tokens, item.first_key);
  item.sink_tiles = div_ceil(item.sink_end, KEY_TILE);
  return item;
}

__device__ __forceinline__ void load_values(const Params& p, Shared& shared, const Sequence& s,
                                            int key, int kv_head, Ring<KV_STAGES>& ring,
                                            uint32_t& edges, int lane) {
  const uint32_t full = shared_address(shared.v_full + ring.stage);
  const uint32_t edge = shared_address(&shared.edge);
  const uint32_t to = shared_address(shared.values[ring.stage]);
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
    // Longest first. Blocks work on all heads of nearby tokens; without a window, and where a head
    // has tiles enough, on one head after the other, whose keys then stay in L2.
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
