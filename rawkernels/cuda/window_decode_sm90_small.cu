// window_decode for sm_90a, MXFP8 records of 512 values: units of one tile, for small batches and
// for one query token a sequence.
// grid (at most one block an SM): blocks walk over the tiles; block 384 threads: two consumer
//      warpgroups, one producer thread, three warps that write the tokens without keys
// in   slab uint8, flat; offset_len int32 [num_tokens, 2]; q bf16 [num_tokens, num_q_heads, 512]
//      through q_map; positions int32 [num_tokens], with rope_table only
// out  out bf16 like q, through out_map and directly; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream; ring_len <= 136; num_q_heads % 64 == 0; a plan
//      not written by a kernel that calls let_next_kernel_start; no visible key gives out 0, lse
//      -inf
// bound by memory: a tile reads 64 KB of queries and 66 KB of ring and writes 64 KB; by latency
//      where a block has one tile
//
// The consumer warpgroups take the tiles in turn. While one works on a tile, the other takes the
// queries of the next into registers, so that their slots serve its records: these are then there
// when the window is free. The queries of a block's first tile wait in the window itself.
//
// Where there are fewer tiles than multiprocessors, COLUMN_SPLITS blocks do a tile: each computes
// all of S, which takes no longer than its share would if they had to talk, and its own columns of
// O.
#include "hopper.cuh"
#include "window_decode_sm90_small_params.cuh"
#include "window_decode_sm90.cuh"

#ifndef COLUMN_SPLITS
#error "COLUMN_SPLITS: blocks that share a tile's output columns: 1, 2 or 4"
#endif
static_assert(OUT_PARTS % COLUMN_SPLITS == 0, "whole parts of 128 columns");
constexpr int PARTS = OUT_PARTS / COLUMN_SPLITS;
constexpr int QUERY_STEPS = HEAD_DIM / 16;  // steps of 16 columns of S = Q K^T

__device__ __forceinline__ Token token_of_unit(const Params& p, int unit) {
  if (unit >= p.num_units) return {make_int2(0, 0), 0};
  return load_token(p, unit / COLUMN_SPLITS / p.head_tiles);
}

// One thread. Items in their order of use: the records of the first tile, then for each further
// tile its queries and its records, at last an empty tile.
__device__ __forceinline__ void produce(const Params& p, Shared& shared) {
  int n = 0;
  Token token = token_of_unit(p, blockIdx.x);
  wait_for_previous_kernel();
  let_next_kernel_start();

  SlotWriter writer;
  const uint32_t first_full = shared_address(&shared.first_queries_full);
#pragma unroll 1
  for (int id = blockIdx.x; id < p.num_units; id += gridDim.x) {
    const Token next = token_of_unit(p, id + gridDim.x);
    const int tile = id / COLUMN_SPLITS;
    int state_id;
    const int2 keys = visible_keys(p, token.keys, state_id);
    const int position = token.position;
    token = next;
    if (keys.y == 0) continue;
    Unit& unit = shared.units[n % INFO_ENTRIES];  // of a tile that both warpgroups have left
    unit.first_tile = tile;
    unit.num_tiles = 1;
    unit.first_part = id % COLUMN_SPLITS * PARTS;
    unit.first_row = keys.x;
    unit.num_rows = keys.y;
    unit.tokens[0] = {keys, position};
    if (n == 0) {
      barrier_expect(first_full, NUM_SLABS * SLOT_BYTES);
#pragma unroll 1
      for (int slab = 0; slab < NUM_SLABS; slab++)
        copy_tile(shared_address(shared.tile.window[slab]), &p.q_map, slab * SLAB_COLUMNS,
                  tile * HEAD_TILE, first_full);
    } else {
      request_queries(p, shared.tile, writer, tile, n % CONSUMERS);
    }
    request_records(p, shared, writer, state_id, keys.x, keys.y);
    n++;
  }
  if (n == 0) barrier_expect(first_full, 0);
  for (int slab = 0; n > 0 && slab < NUM_SLABS; slab++) {
    writer.open(shared.tile, n % CONSUMERS, 0);
    writer.next();
  }
  end_units(shared, writer, n);
}

// For all tiles of the block, by one warp: plans and tables are older than the kernel before.
__device__ __forceinline__ void prefetch_rotations(const Params& p, int lane) {
  if (p.rope_table == nullptr) return;
  for (int id = blockIdx.x; id < p.num_units; id += gridDim.x)
    prefetch_rotation(p, token_of_unit(p, id).position, lane);
}

// The queries of tile n of the block into registers, as A operands of S = Q K^T.
__device__ __forceinline__ void take_queries(uint32_t (&q)[QUERY_STEPS][4], Shared& shared,
                                             SlotReader& reader, int n, int consumer, int tid) {
  const int lane = tid % 32, row = tid % WARPGROUP_THREADS / 32 * STAGE_ROWS + lane % 16;
  if (n == 0) barrier_wait(shared_address(&shared.first_queries_full), 0);
#pragma unroll
  for (int slab = 0; slab < NUM_SLABS; slab++) {
    uint32_t from = shared_address(shared.tile.window[slab]);
    if (n > 0) {
      reader.wait(shared.tile, consumer);
      from = shared_address(shared.tile.slots[reader.slot]);
    }
#pragma unroll
    for (int i = 0; i < SLAB_COLUMNS / 16; i++)
      ldmatrix_x4(q[slab * (SLAB_COLUMNS / 16) + i],
                  from + row * SLAB_ROW_BYTES + ((2 * i + lane / 16) ^ (row % 8)) * 16);
    if (n > 0) {
      barrier_arrive(shared_address(shared.tile.empty + reader.slot));
      reader.advance(1);
    }
  }
}

// One consumer warpgroup: the tiles n = consumer, consumer + 2, ... of the block are its own.
__device__ __forceinline__ void consume(const Params& p, Shared& shared, int consumer,
                                        int tid) {
  const int lane = tid % 32, head = tid % WARPGROUP_THREADS / 32 * STAGE_ROWS + lane / 4;
  // Before window n is filled: at first the queries in it are taken, then tile n - 1 is done.
  const uint32_t window_free = shared_address(&shared.window_free);
  SlotReader reader;
#pragma unroll 1
  for (int n = consumer;; n += CONSUMERS) {
    // ---- the other warpgroup's tile
    if (n > 0) {
      barrier_wait(window_free, (n - 1) & 1);
      if (n > 1) reader.skip(NUM_SLABS);  // its queries
      if (!fill_window(p, shared, reader, n - 1, consumer, tid)) break;
    }
    // ---- its own tile
    uint32_t q[QUERY_STEPS][4];
    take_queries(q, shared, reader, n, consumer, tid);
    if (n == 0) barrier_arrive(window_free);
    barrier_wait(window_free, n & 1);
    if (!fill_window(p, shared, reader, n, consumer, tid)) break;

    const Unit& unit = shared.units[n % INFO_ENTRIES];
    const Tile tile = load_tile(p, unit.first_tile, unit.tokens[0].keys, head);
    float s[SCORES];
    const uint32_t keys = descriptor(shared_address(shared.tile.window));
    products_begin();
#pragma unroll
    for (int i = 0; i < QUERY_STEPS; i++)
      product_qk(s, q[i],
                 keys + i / 4 * descriptor_step(SLAB_BYTES) + i % 4 * descriptor_step(32), i != 0);
    products_commit();
    products_wait<0>();
    products_ready(s);
    // Not before: the registers hold queries and S until here.
    const RotationDigits digits = load_rotation(p, unit.tokens[0].position, lane);
    finish_tile<PARTS>(p, shared.tile, s, tile, digits, shared.nan_rows[n % INFO_ENTRIES],
                       window_free, unit.first_part, tid);
  }
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_decode_sm90_small(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  if (tid == CONSUMER_THREADS) {
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.out_map);
  }
  prepare_shared(shared, tid, WARPGROUP_THREADS);
  __syncthreads();

  if (warpgroup == CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    const int warp = tid % WARPGROUP_THREADS / 32;
    if (warp == 0) {
      if (lane == 0) produce(p, shared);
    } else {
      if (warp == 1) prefetch_rotations(p, lane);
      wait_for_previous_kernel();
      zero_blind_tokens(p, warp - 1, lane);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, shared, warpgroup, tid);
  }
}
