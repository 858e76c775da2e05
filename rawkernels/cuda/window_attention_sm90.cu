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
#include "window_attention_sm90_items.cuh"

// ---- consumers: a warpgroup each

// The keys of a tile that a row does not see become -inf.
template <int N>
__device__ __forceinline__ void mask_scores(const Params& p, float (&s)[N], const Item& item,
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
    for (int j = 0; j < N / 4; j++) {
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

// Scores to weights; returns what earlier outputs are to be multiplied by.
template <int N>
__device__ __forceinline__ float2 weigh(float (&s)[N], Softmax& state, float scale_log2) {
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float largest[2] = {s[2 * i], s[2 * i + 1]};
#pragma unroll
    for (int j = 1; j < N / 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) largest[e] = fmaxf(largest[e], s[4 * j + 2 * i + e]);
    const float now =
        fmaxf(quad_max(fmaxf(largest[0], largest[1])), state.largest[i]);
    // Without a visible key so far the base is 0: all weights are then 0.
    const float base = now == minus_infinity() ? 0.0f : now * scale_log2;
    factor[i] = exp2_approx(fmaf(state.largest[i], scale_log2, -base));
    state.largest[i] = now;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& score = s[4 * j + 2 * i + e];
        score = exp2_approx(fmaf(score, scale_log2, -base));
        sum[e] += score;
      }
    }
    state.sum[i] = fmaf(state.sum[i], factor[i], sum[0] + sum[1]);
  }
  return make_float2(factor[0], factor[1]);
}
template <int N>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[N / 2], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) weights[i] = pack_operands(s[2 * i], s[2 * i + 1]);
}

// Of the first 2 N keys of a tile.
template <int N>
__device__ __forceinline__ void issue_scores(float (&s)[N], uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int i = 0; i < DIM_STEPS; i++)
    product_keys(s, queries + descriptor_step(column_offset(i, QUERY_SLAB_BYTES)),
                 keys + descriptor_step(column_offset(i, KEY_SLAB_BYTES)), i != 0);
  products_commit();
}
template <int N>
__device__ __forceinline__ void issue_outputs(float (&o)[OUT_REGISTERS], const uint32_t (&w)[N],
                                              uint32_t values, int add) {
#pragma unroll
  for (int i = 0; i < N / 4; i++)
    product_values(o, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3],
                   values + i * descriptor_step(16 * SLAB_ROW_BYTES), i == 0 ? add : 1);
  products_commit();
}

// A warpgroup issues its products when the one before it has. `turn` counts its own turns; the
// first warpgroup has the first one without waiting.
__device__ __forceinline__ void wait_turn(Shared& shared, int consumer, uint32_t turn) {
#if TAKE_TURNS
  barrier_wait_phase(shared_address(shared.turns + consumer), consumer == 0 ? turn - 1 : turn);
#endif
}
__device__ __forceinline__ void pass_turn(Shared& shared, int consumer, uint32_t& turn, int lane) {
#if TAKE_TURNS
  warp_barrier();
  if (lane == 0) barrier_arrive(shared_address(shared.turns + (consumer + 1) % CONSUMERS));
  turn++;
#endif
}

__device__ __forceinline__ void scale_outputs(float (&o)[OUT_REGISTERS], float2 factor) {
#pragma unroll
  for (int i = 0; i < OUT_REGISTERS; i++) o[i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
}

// An item's first key tile where NARROW_TILE of its keys are in sight at most; the outputs start
// with it. Keys behind those would add zeros, so it makes no difference to a bit.
__device__ __forceinline__ void narrow_tile(const Params& p, Shared& shared, const Item& item,
                                            uint32_t queries, Softmax& state,
                                            float (&o)[OUT_REGISTERS], Ring<KV_STAGES>& keys,
                                            Ring<KV_STAGES>& values, int consumer, int tid) {
#if NARROW_TILE
  float s[NARROW_TILE / 2];
  uint32_t weights[NARROW_TILE / 4];
  barrier_wait_phase(shared_address(shared.k_full + keys.stage), keys.phase);
  products_begin();
  issue_scores(s, queries, descriptor(shared_address(shared.keys[keys.stage])));
  products_wait<0>();
  products_ready(s);
  warp_barrier();
  if (tid % 32 == 0) barrier_arrive(shared_address(shared.k_empty + keys.stage));
  keys.next();
  soften(s, p.pre_scale);
  mask_scores(p, s, item, 0, key_of_tile(item, 0), consumer * ROW_TILE + row_of_thread(tid),
              tid % 4);
  weigh(s, state, p.scale_log2);
  pack_weights(weights, s);
  barrier_wait_phase(shared_address(shared.v_full + values.stage), values.phase);
  products_begin();
  issue_outputs(o, weights, descriptor(shared_address(shared.values[values.stage]), KEY_SLAB_BYTES),
                0);
  products_wait<0>();
  products_ready(o);
  warp_barrier();
  if (tid % 32 == 0) barrier_arrive(shared_address(shared.v_empty + values.stage));
  values.next();
#endif
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, int consumer, int tid) {
  const int lane = tid % 32, quad = lane % 4;
  const int row = consumer * ROW_TILE + tid % WARPGROUP_THREADS / 32 * WARP_ROWS + lane / 4;
  Ring<Q_STAGES> query;
  Ring<KV_STAGES> key_ring, value_ring;
  uint32_t turn = 0;
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
    Softmax state = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
    // The newest key tile is often seen in a small part only, and has a way of its own then.
    const bool narrow = NARROW_TILE > 0 && item.newest_keys <= NARROW_TILE && visits > 1;
    if (narrow)
      narrow_tile(p, shared, item, queries, state, o, key_ring, value_ring, consumer, tid);

    const int first_visit = narrow ? 1 : 0;
    int key = key_of_tile(item, first_visit);
    barrier_wait_phase(shared_address(shared.k_full + key_ring.stage), key_ring.phase);
    wait_turn(shared, consumer, turn);
    products_begin();
    issue_scores(s, queries, descriptor(shared_address(shared.keys[key_ring.stage])));
    pass_turn(shared, consumer, turn, lane);
    products_wait<0>();
    products_ready(s);
    warp_barrier();
    if (lane == 0) barrier_arrive(shared_address(shared.k_empty + key_ring.stage));
    key_ring.next();
    soften(s, p.pre_scale);
    if (key + KEY_TILE > full_end || key < full_begin)
      mask_scores(p, s, item, first_visit, key, row, quad);
    const float2 first_factor = weigh(s, state, p.scale_log2);
    if (narrow) scale_outputs(o, first_factor);
    pack_weights(weights, s);
    barrier_wait_phase(shared_address(shared.v_full + value_ring.stage), value_ring.phase);

#pragma unroll 1
    for (int i = first_visit + 1; i < visits; i++) {
      key = key_of_tile(item, i);
      barrier_wait_phase(shared_address(shared.k_full + key_ring.stage), key_ring.phase);
      wait_turn(shared, consumer, turn);
      products_begin();
      issue_scores(s, queries, descriptor(shared_address(shared.keys[key_ring.stage])));
      issue_outputs(o, weights,
                    descriptor(shared_address(shared.values[value_ring.stage]), KEY_SLAB_BYTES),
                    i > 1);
      pass_turn(shared, consumer, turn, lane);
      products_wait<1>();
      products_ready(s);
      warp_barrier();
      if (lane == 0) barrier_arrive(shared_address(shared.k_empty + key_ring.stage));
      key_ring.next();
      soften(s, p.pre_scale);
      if (key + KEY_TILE > full_end || key < full_begin)
        mask_scores(p, s, item, i, key, row, quad);
      const float2 factor = weigh(s, state, p.scale_log2);
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
      scale_outputs(o, factor);
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
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_attention_sm90(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  if (tid == 0) {
    prefetch_maps(p);
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
    for (int i = 0; i < CONSUMERS; i++) barrier_init(shared_address(shared.turns + i), WARPS);
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
