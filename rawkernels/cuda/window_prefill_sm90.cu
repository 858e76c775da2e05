// window_prefill for sm_90a, MXFP8 records of 512 values: chunks of a prefill against the joint
// buffer.
// grid (at most one block an SM): each block walks over one range of consecutive tokens; block 384
//      threads: two consumer warpgroups, one warp that requests queries, three that write key rows
// in   records uint8 [num_records, 528], whole: history, then the new tokens; q bf16
//      [num_tokens, num_q_heads, 512] through q_map; pivots int32 [num_tokens, 4]; cu_seqlens_q
//      int32 [num_seqs + 1]; positions int32 [num_tokens]
// out  out bf16 like q, through out_map; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream; window <= ring_len <= 136; heads by the 64;
//      pivots of consecutive tokens of a sequence move on by one key; no visible key gives out 0,
//      lse -inf
// bound by memory: a tile reads and writes 2 x 64 KB, a token reads 528 B of records
//
// The window of a block stays in shared memory. The key at position p lies in row p % ring_len, as
// in the Hopper kernels of window_decode, so a token gets the same bits from all of them. A token
// brings one row, which replaces the oldest one; only where a range enters another sequence are all
// rows replaced. Nothing in the loop stops the whole block: rows are announced and released by the
// token.
#include "hopper.cuh"
#include "window_prefill_sm90_params.cuh"
#include "latent_tile_sm90.cuh"
#include "token_ranges.cuh"

constexpr int NUM_WRITERS = WARPGROUP_THREADS / 32 - 1;  // warps that write key rows
constexpr int TOKEN_ENTRIES = 8;  // tokens that may be announced and not yet released, and one more
constexpr int MAX_TOKENS_AHEAD = TOKEN_ENTRIES - 1;
constexpr int REPLACE_ROWS = 4;  // rows that a writer has on their way at a time
constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int FIRST_FILL = (KEY_ROWS + NUM_WARPS - 1) / NUM_WARPS;

constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 216;
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536, "one SM");

struct Shared {
  TileShared tile;
  NanRows nan_rows;                     // of the window; `any` stays once it is set
  Token tokens[TOKEN_ENTRIES];          // that are announced
  uint64_t rows_ready[TOKEN_ENTRIES];   // all writers have arrived: the token's keys are there
  uint64_t rows_read[TOKEN_ENTRIES];    // all consumers of the token have arrived
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for less");

// The visible keys of a token, oldest first: `num_history` records from `history` on, then records
// from `chunk` on, `num` in all. Key j lies in row (first_row + j) % ring_len.
struct Keys {
  int history, num_history, chunk, num, first_row;
};
__device__ __forceinline__ Keys keys_of(const Params& p, int4 pivots, int position) {
  const bool inside = pivots.x >= 0 && pivots.y >= 0 && pivots.z >= 0 && pivots.w >= 0 &&
                      pivots.x + int64_t(pivots.y) <= p.num_records &&
                      pivots.z + int64_t(pivots.w) <= p.num_records &&
                      int64_t(pivots.y) + pivots.w <= p.ring_len;
  const int num = inside ? pivots.y + pivots.w : 0;
  const int oldest = max(position - num + 1, 0);
  return {pivots.x, pivots.y, pivots.z, num, oldest % p.ring_len};
}
__device__ __forceinline__ int4 load_pivots(const Params& p, int token) {
  return __ldg(p.pivots + token);
}

// ---- key rows: a warp writes one, 16 values a lane

constexpr int LANE_VALUES = HEAD_DIM / 32;
static_assert(LANE_VALUES == 16, "one 16-byte load and half a scale block a lane");

struct RawValues {
  uint4 values;
  uint32_t code;
  bool live;  // false: the row holds no key, and becomes zeros
};
// This lane's part of row `row` of a window that holds `keys`.
__device__ __forceinline__ RawValues load_row(const Params& p, const Keys& keys, int row,
                                              int lane) {
  const int key = row - keys.first_row + (row < keys.first_row ? p.ring_len : 0);
  const int64_t record = key < keys.num_history ? keys.history + key
                                                : keys.chunk + (key - keys.num_history);
  RawValues raw = {make_uint4(0, 0, 0, 0), 0, row < p.ring_len && key < keys.num};
  if (raw.live) {
    const uint8_t* from = p.records + record * RECORD_BYTES;
    raw.values = __ldg(reinterpret_cast<const uint4*>(from) + lane);
    raw.code = __ldg(from + HEAD_DIM + lane / 2);
  }
  return raw;
}
// 16 elements to bf16 pairs, as dequantize_block does with 32. True: not finite, zeros.
__device__ __forceinline__ bool dequantize_lane(uint32_t (&pairs)[8], const RawValues& raw) {
  const uint32_t words[4] = {raw.values.x, raw.values.y, raw.values.z, raw.values.w};
  const uint32_t scale = power_pair(min(raw.code, MAX_ONE_PRODUCT_CODE) - 7);
  const uint32_t rest = power_pair(max(raw.code, MAX_ONE_PRODUCT_CODE) - MAX_ONE_PRODUCT_CODE);
  uint32_t nan = 0, infinite = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t word = words[i / 2];
    const uint32_t elements = i % 2 == 0 ? shifted_pair<0>(word) : shifted_pair<1>(word);
    pairs[i] = multiply_bf16x2(multiply_bf16x2(elements, scale), rest);
    nan |= (word & 0x7F7F7F7Fu) + 0x01010101u;
    infinite |= (pairs[i] & 0x7FFF7FFFu) + 0x00800080u;
  }
  const bool finite = (nan & 0x80808080u) == 0 && (infinite & 0x80008000u) == 0 &&
                      raw.code != E8M0_NAN_BYTE;
#pragma unroll
  for (int i = 0; i < 8; i++) pairs[i] = finite ? pairs[i] : 0;
  return !finite;
}
// The whole warp takes part. A row that is not finite is marked; marks of other rows stay.
__device__ __forceinline__ void write_row(Shared& shared, const RawValues& raw, int row, int lane) {
  const uint32_t to = shared_address(shared.tile.window[lane / 4]) + row * SLAB_ROW_BYTES;
  uint32_t pairs[8];
  const bool not_finite = __any_sync(~0u, dequantize_lane(pairs, raw));
#pragma unroll
  for (int i = 0; i < 2; i++)
    store_shared16(to + ((lane % 4 * 2 + i) ^ (row % 8)) * 16,
                   make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]));
  NanRows& nan_rows = shared.nan_rows;
  if (lane != 0) return;
  if (not_finite) {
    atomicOr(&nan_rows.words[row / 32], 1u << row % 32);
    atomicOr(&nan_rows.any, 1u);
  } else if (*(volatile uint32_t*)&nan_rows.any != 0) {
    atomicAnd(&nan_rows.words[row / 32], ~(1u << row % 32));
  }
}

// The window of the range's first token, by all warps of the block: many loads at once.
__device__ __forceinline__ void fill_first_window(const Params& p, Shared& shared,
                                                  const Keys& keys, int warp, int lane) {
  RawValues raw[FIRST_FILL];
#pragma unroll
  for (int i = 0; i < FIRST_FILL; i++) raw[i] = load_row(p, keys, warp + i * NUM_WARPS, lane);
#pragma unroll
  for (int i = 0; i < FIRST_FILL; i++)
    if (warp + i * NUM_WARPS < KEY_ROWS) write_row(shared, raw[i], warp + i * NUM_WARPS, lane);
}

// A writer's share of all rows. A row is always written by the same warp, `row % NUM_WRITERS`, so
// that nothing older overwrites a key.
__device__ __forceinline__ void replace_window(const Params& p, Shared& shared,
                                               const Keys& keys, int writer, int lane) {
#pragma unroll 1
  for (int base = writer; base < KEY_ROWS; base += REPLACE_ROWS * NUM_WRITERS) {
    RawValues raw[REPLACE_ROWS];
#pragma unroll
    for (int i = 0; i < REPLACE_ROWS; i++) raw[i] = load_row(p, keys, base + i * NUM_WRITERS, lane);
#pragma unroll
    for (int i = 0; i < REPLACE_ROWS; i++) {
      const int row = base + i * NUM_WRITERS;
      if (row < KEY_ROWS) write_row(shared, raw[i], row, lane);
    }
  }
}

// First sequence that ends behind `token`.
__device__ __forceinline__ int sequence_of(const Params& p, int token) {
  int low = 0, high = p.num_seqs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (__ldg(p.cu_seqlens_q + middle + 1) > token) high = middle;
    else low = middle + 1;
  }
  return low;
}

// Tokens past the last sequence's are padding that sees no keys, and count as its own.
__device__ __forceinline__ int end_of_sequence(const Params& p, int seq) {
  return seq + 1 < p.num_seqs ? __ldg(p.cu_seqlens_q + seq + 1) : p.num_tokens;
}

// One of the warps that keep the window up to date and announce tokens.
__device__ __forceinline__ void write_rows(const Params& p, Shared& shared, TokenRange range,
                                           int writer, int lane) {
  // A row may be replaced once the tokens that see its old key are read.
  const int ahead = min(p.ring_len - p.window + 1, MAX_TOKENS_AHEAD);
  int seq = sequence_of(p, range.first), seq_end = end_of_sequence(p, seq);
  int4 pivots = load_pivots(p, range.first);
  int position = __ldg(p.positions + range.first);
  int tokens_read = 0;
#pragma unroll 1
  for (int n = 0; n < range.num; n++) {
    const int token = range.first + n, entry = n % TOKEN_ENTRIES;
    const Keys keys = keys_of(p, pivots, position);
    const int token_position = position;
    const int next = min(n + 1, range.num - 1) + range.first;
    pivots = load_pivots(p, next);
    position = __ldg(p.positions + next);
    if (writer == 0) prefetch_rotation(p, token_position, lane);
    const bool new_sequence = token >= seq_end;
    while (token >= seq_end) seq_end = end_of_sequence(p, ++seq);
    if ((n == 0 || new_sequence) && seq_end < range.first + range.num && writer == 0 && lane == 0)
      prefetch_to_l2(p.records + (seq + 1) * int64_t(p.window) * RECORD_BYTES,
                     p.window * RECORD_BYTES);

    const int must_be_read = new_sequence ? n : n - ahead + 1;
    for (; tokens_read < must_be_read; tokens_read++)
      barrier_wait(shared_address(shared.rows_read + tokens_read % TOKEN_ENTRIES),
                   tokens_read / TOKEN_ENTRIES & 1);
    if (new_sequence) {
      replace_window(p, shared, keys, writer, lane);
    } else if (n > 0 && keys.num > 0) {
      const int newest = keys.first_row + keys.num - 1;
      const int row = newest < p.ring_len ? newest : newest - p.ring_len;
      if (row % NUM_WRITERS == writer) write_row(shared, load_row(p, keys, row, lane), row, lane);
    }
    if (writer == 0 && lane == 0)
      shared.tokens[entry] = {make_int2(keys.first_row, keys.num), token_position};
    fence_async_proxy();
    barrier_arrive(shared_address(shared.rows_ready + entry));
  }
}

__device__ __forceinline__ void request_all_queries(const Params& p, TileShared& shared,
                                                    TokenRange range) {
  SlotWriter writer;
  const int tiles = range.num * p.head_tiles, first_tile = range.first * p.head_tiles;
#pragma unroll 1
  for (int t = 0; t < tiles; t++) request_queries(p, shared, writer, first_tile + t, t & 1);
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, TokenRange range,
                                        int consumer, int tid) {
  const int lane = tid % 32, head = tid % WARPGROUP_THREADS / 32 * STAGE_ROWS + lane / 4;
  const int tiles = range.num * p.head_tiles, first_tile = range.first * p.head_tiles;
  SlotReader reader;
  reader.skip(consumer * NUM_SLABS);
  int tokens_ready = 0;
#pragma unroll 1
  for (int t = consumer; t < tiles; t += CONSUMERS) {
    const int n = t / p.head_tiles, entry = n % TOKEN_ENTRIES;
    for (; tokens_ready <= n; tokens_ready++)
      barrier_wait(shared_address(shared.rows_ready + tokens_ready % TOKEN_ENTRIES),
                   tokens_ready / TOKEN_ENTRIES & 1);
    const Token token = shared.tokens[entry];
    const Tile tile = load_tile(p, first_tile + t, token.keys, head);
    const RotationDigits digits = load_rotation(p, token.position, lane);
    float s[SCORES];
    scores_of_tile(s, shared.tile, reader, consumer);
    reader.skip(NUM_SLABS);
    finish_tile<OUT_PARTS>(p, shared.tile, s, tile, digits, shared.nan_rows, 0, 0, tid);
    barrier_arrive(shared_address(shared.rows_read + entry));
  }
  if (lane == 0) wait_stores_done();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1)
window_prefill_sm90(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int tid = threadIdx.x, lane = tid % 32;
  const int warpgroup = __shfl_sync(~0u, tid / WARPGROUP_THREADS, 0);
  const TokenRange range =
      range_of_block(p.cu_seqlens_q, p.num_seqs, p.num_tokens, blockIdx.x, gridDim.x);
  if (range.num == 0) return;
  if (tid == 0) {
    prefetch_tensor_map(&p.q_map);
    prefetch_tensor_map(&p.out_map);
    for (int i = 0; i < TOKEN_ENTRIES; i++) {
      barrier_init(shared_address(shared.rows_ready + i), NUM_WRITERS * 32);
      barrier_init(shared_address(shared.rows_read + i), p.head_tiles * WARPGROUP_THREADS);
    }
    fence_barrier_init();
  }
  if (tid == 0) shared.nan_rows = NanRows{};
  prepare_tiles(shared.tile, tid);
  __syncthreads();
  fill_first_window(p, shared,
                    keys_of(p, load_pivots(p, range.first), __ldg(p.positions + range.first)),
                    tid / 32, lane);
  fence_async_proxy();
  __syncthreads();

  if (warpgroup == CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    const int warp = tid % WARPGROUP_THREADS / 32;
    if (warp > 0) {
      write_rows(p, shared, range, warp - 1, lane);
    } else if (lane == 0) {
      request_all_queries(p, shared.tile, range);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(p, shared, range, warpgroup, tid);
  }
}
