// window_decode for sm_90a, MXFP8 records of 512 values: units of two tiles or more.
// grid (at most one block an SM): blocks walk over the units; block 384 threads: two consumer
//      warpgroups, one producer warp, three warps that write the tokens without keys
// in   slab uint8, flat; offset_len int32 [num_tokens, 2]; cu_seqlens_q int32 [num_seqs + 1];
//      q bf16 [num_tokens, num_q_heads, 512] through q_map; positions int32 [num_tokens], read with
//      rope_table only
// out  out bf16 like q, through out_map and directly; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream; ring_len <= 136; num_q_heads % 64 == 0; a plan
//      not written by a kernel that calls let_next_kernel_start; no visible key gives out 0, lse
//      -inf
// bound by memory: a tile reads and writes 2 x 64 KB, a unit reads 70 KB of ring
#include "hopper.cuh"
#include "window_decode_sm90_params.cuh"
#include "window_decode_sm90.cuh"

// Tokens `first` .. `first + num - 1`, a group of one sequence; num 0 where there is none.
struct Group {
  int first, num;
};

// Bounds of a unit's sequence, loaded early: the group follows from them later.
struct Bounds {
  int begin, end;
};
__device__ __forceinline__ Bounds sequence_bounds(const Params& p, int unit) {
  if (unit >= p.num_units) return {0, 0};
  const int seq = unit / p.groups;
  return {__ldg(p.cu_seqlens_q + seq), __ldg(p.cu_seqlens_q + seq + 1)};
}
__device__ __forceinline__ Group group_of(const Params& p, int unit, Bounds bounds) {
  const int first = bounds.begin + unit % p.groups * p.group_tokens;
  return {first, max(min(bounds.end - first, p.group_tokens), 0)};
}
__device__ __forceinline__ Token load_token(const Params& p, Group group, int lane) {
  return lane < group.num ? load_token(p, group.first + lane) : Token{make_int2(0, 0), 0};
}

// Describes unit n to the consumers and requests what it needs. token: this lane's. False
// where no token of the unit sees a key. All lanes of the producer warp take part. The entry is
// free: all items of unit n - 1 have their slots, so consumers are past unit n - 2.
__device__ __forceinline__ bool produce_unit(const Params& p, Shared& shared,
                                             SlotWriter& writer, Group group, Token token,
                                             int n, int first_consumer, int lane) {
  int state_id;
  const int2 keys = visible_keys(p, token.keys, state_id);
  const uint32_t seeing = __ballot_sync(~0u, keys.y > 0);
  if (seeing == 0) return false;
  const int source = __ffs(seeing) - 1;
  int first_row = __shfl_sync(~0u, keys.x, source);
  state_id = __shfl_sync(~0u, state_id, source);
  // Later tokens begin at or after the first one's oldest key. Whatever else a plan says, the whole
  // ring serves it.
  const int ahead = keys.x - first_row + (keys.x < first_row ? p.ring_len : 0);
  int num_rows = __reduce_max_sync(~0u, keys.y > 0 ? ahead + keys.y : 0);
  if (num_rows > p.ring_len) first_row = 0, num_rows = p.ring_len;

  Unit& unit = shared.units[n % INFO_ENTRIES];
  if (lane == 0) {
    unit.first_tile = group.first * p.head_tiles;
    unit.num_tiles = group.num * p.head_tiles;
    unit.first_row = first_row;
    unit.num_rows = num_rows;
  }
  // All is written by the lane that waited for the slots.
#pragma unroll 1
  for (int t = 0; t < group.num; t++) {
    const int position = __shfl_sync(~0u, token.position, t);
    const int row = __shfl_sync(~0u, keys.x, t), num = __shfl_sync(~0u, keys.y, t);
    if (lane == 0) unit.tokens[t] = {make_int2(row, num), position};
    prefetch_rotation(p, position, lane);
  }
  if (lane == 0) {
    request_records(p, shared, writer, state_id, first_row, num_rows);
#pragma unroll 1
    for (int t = 0; t < group.num * p.head_tiles; t++)
      request_queries(p, shared.tile, writer, group.first * p.head_tiles + t,
                      (first_consumer + t) & 1);
  }
  __syncwarp();
  return true;
}

__device__ __forceinline__ void produce(const Params& p, Shared& shared, int lane) {
  const int stride = gridDim.x;
  int unit = blockIdx.x, n = 0, tiles = 0;
  Bounds bounds = sequence_bounds(p, unit), next_bounds = sequence_bounds(p, unit + stride);
  Group group = group_of(p, unit, bounds);
  Token token = load_token(p, group, lane);
  wait_for_previous_kernel();
  if (lane == 0) let_next_kernel_start();

  SlotWriter writer;
#pragma unroll 1
  for (; unit < p.num_units; unit += stride) {
    // One unit ahead for the tokens, two for the bounds.
    const Group next_group = group_of(p, unit + stride, next_bounds);
    const Token next_token = load_token(p, next_group, lane);
    next_bounds = sequence_bounds(p, unit + 2 * stride);
    if (produce_unit(p, shared, writer, group, token, n, tiles & 1, lane)) {
      n++;
      tiles += group.num * p.head_tiles;
    }
    group = next_group;
    token = next_token;
  }
  if (lane == 0) end_units(shared, writer, n);
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, int consumer,
                                        int tid) {
  const int lane = tid % 32, head = tid % WARPGROUP_THREADS / 32 * STAGE_ROWS + lane / 4;
  const uint32_t window_free = shared_address(&shared.window_free);
  SlotReader reader;
  int turn = 0;  // tiles of earlier units: tiles alternate between the warpgroups
#pragma unroll 1
  for (int n = 0;; n++) {
    if (n > 0) barrier_wait(window_free, (n - 1) & 1);
    if (!fill_window(p, shared, reader, n, consumer, tid)) break;
    const Unit& unit = shared.units[n % INFO_ENTRIES];
    const NanRows& nan_rows = shared.nan_rows[n % INFO_ENTRIES];
    const int num_tiles = unit.num_tiles, first_tile = unit.first_tile;
    const int mine = (consumer ^ turn) & 1;  // first tile of this warpgroup
    const int first_slot = reader.slot;
    if (mine >= num_tiles) barrier_arrive(window_free);
    reader.skip(NUM_SLABS * mine);
#pragma unroll 1
    for (int t = mine; t < num_tiles; t += CONSUMERS) {
      const Token token = unit.tokens[t / p.head_tiles];
      const Tile tile = load_tile(p, first_tile + t, token.keys, head);
      const RotationDigits digits = load_rotation(p, token.position, lane);
      float s[SCORES];
      scores_of_tile(s, shared.tile, reader, consumer);
      reader.skip(NUM_SLABS);  // the other warpgroup's
      finish_tile<OUT_PARTS>(p, shared.tile, s, tile, digits, nan_rows,
                             t + CONSUMERS < num_tiles ? 0 : window_free, 0, tid);
    }
    reader.slot = first_slot;
    reader.skip(NUM_SLABS * num_tiles);
    turn += num_tiles;
  }
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_decode_sm90(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  if (tid == CONSUMER_THREADS) {
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.out_map);
  }
  prepare_shared(shared, tid, CONSUMER_THREADS);
  __syncthreads();

  if (warpgroup == CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    const int warp = tid % WARPGROUP_THREADS / 32;
    if (warp == 0) {
      produce(p, shared, lane);
    } else {
      wait_for_previous_kernel();
      zero_blind_tokens(p, warp - 1, lane);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, shared, warpgroup, tid);
  }
}
