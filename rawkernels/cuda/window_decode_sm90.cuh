// What the two Hopper kernels of window_decode share: units, and the filling of a window from a
// ring.
//
// A unit is what one window serves: the tiles of up to MAX_UNIT_TOKENS tokens of one sequence. One
// warp of a producer warpgroup requests records and queries in the order of their use.
#pragma once
#include "latent_tile_sm90.cuh"

static_assert(MX_BLOCK == 32, "one thread dequantizes a block from two 16-byte loads");

constexpr int ZERO_WARPS = WARPGROUP_THREADS / 32 - 1;  // the rest of the producer warpgroup
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536, "one SM");

constexpr int CHUNK_ROWS = SLOT_BYTES / RECORD_BYTES;  // records of one slot, rounded down
constexpr int CHUNK_SCALES_AT = CHUNK_ROWS * HEAD_DIM;  // planar rings: scales of a slot's records
constexpr int INFO_ENTRIES = 4;  // units whose description may be in use at once, and to spare
static_assert(CHUNK_ROWS == 15 && NUM_BLOCKS == 16, "16 threads for the rows of a chunk, 1 idle");
static_assert(WARPGROUP_THREADS == 16 * NUM_BLOCKS / 2, "a thread has two blocks of a chunk");
static_assert((INFO_ENTRIES & (INFO_ENTRIES - 1)) == 0, "indices are masked");

// A unit, written by the producer. num_tiles 0 says that there is none left.
struct Unit {
  int first_tile;  // token * head_tiles + tile of heads
  int num_tiles;
  int first_part;              // of the output, for window_decode_sm90_small
  int first_row, num_rows;     // ring rows that a token of the unit may see; they wrap
  Token tokens[MAX_UNIT_TOKENS];
};

struct Shared {
  TileShared tile;
  Unit units[INFO_ENTRIES];
  NanRows nan_rows[INFO_ENTRIES];
  uint64_t window_ready;             // all consumers have written the window of a unit
  uint64_t window_free;              // those that read it last have done so
  uint64_t first_queries_full;       // window_decode_sm90_small only
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for less");

// Thread `tid` of the block prepares barriers and constant rows. Followed by __syncthreads.
// window_readers: threads that arrive at window_free for each window.
__device__ __forceinline__ void prepare_shared(Shared& shared, int tid, int window_readers) {
  if (tid == CONSUMER_THREADS) {
    barrier_init(shared_address(&shared.window_ready), CONSUMER_THREADS);
    barrier_init(shared_address(&shared.window_free), window_readers);
    barrier_init(shared_address(&shared.first_queries_full), 1);
  }
  if (tid < INFO_ENTRIES) shared.nan_rows[tid] = NanRows{};
  prepare_tiles(shared.tile, tid);
}

// ---- the producer's side

// A token's entry of the plan: its offset_len in `keys`, not yet looked at.
__device__ __forceinline__ Token load_token(const Params& p, int token) {
  return {__ldg(p.offset_len + token), p.rope_table == nullptr ? 0 : __ldg(p.positions + token)};
}

// Visible keys of a token as (ring row of the oldest, number), with the token's state slot in
// `state_id`. (0, 0) where there are none or the plan points outside the slab.
__device__ __forceinline__ int2 visible_keys(const Params& p, int2 offset_len,
                                             int& state_id) {
  const bool seen = offset_len.y > 0 && (uint32_t)offset_len.x < (uint32_t)p.num_rows;
  state_id = seen ? offset_len.x / p.ring_len : 0;
  return seen ? make_int2(offset_len.x - state_id * p.ring_len, min(offset_len.y, p.ring_len))
              : make_int2(0, 0);
}

// Requests rows `begin` .. `end` of a ring, which lie in chunk `chunk`, into a slot.
__device__ __forceinline__ void request_rows(const Params& p, const uint8_t* ring,
                                             uint32_t slot, int chunk, int begin, int end,
                                             uint32_t full) {
  const int rows = end - begin, at = begin - chunk * CHUNK_ROWS;
  if (rows <= 0) return;
  if (p.planar) {
    copy_bulk(slot + at * HEAD_DIM, ring + begin * HEAD_DIM, rows * HEAD_DIM, full);
    copy_bulk(slot + CHUNK_SCALES_AT + at * NUM_BLOCKS,
              ring + p.ring_len * HEAD_DIM + begin * NUM_BLOCKS, rows * NUM_BLOCKS, full);
  } else {
    copy_bulk(slot + at * RECORD_BYTES, ring + begin * RECORD_BYTES, rows * RECORD_BYTES, full);
  }
}

// Requests the records of a unit: `num_rows` rows from `first_row` on, wrapping. The warpgroups
// take its chunks in turn.
__device__ __forceinline__ void request_records(const Params& p, Shared& shared,
                                                SlotWriter& writer, int state_id, int first_row,
                                                int num_rows) {
  const uint8_t* ring = p.slab + state_id * p.slot_bytes + p.ring_offset;
  const int end = min(first_row + num_rows, p.ring_len), wrapped = first_row + num_rows - end;
#pragma unroll 1
  for (int chunk = 0; chunk < p.num_chunks; chunk++) {
    const int low = chunk * CHUNK_ROWS, high = low + CHUNK_ROWS;
    const int begin = max(first_row, low), stop = min(end, high), wrap_stop = min(wrapped, high);
    const int rows = max(stop - begin, 0) + max(wrap_stop - low, 0);
    const uint32_t full = writer.open(shared.tile, chunk % CONSUMERS, rows * RECORD_BYTES);
    const uint32_t slot = shared_address(shared.tile.slots[writer.slot]);
    request_rows(p, ring, slot, chunk, low, wrap_stop, full);
    request_rows(p, ring, slot, chunk, begin, stop, full);
    writer.next();
  }
}

// Tells the consumers, who wait for the first chunk of unit n, that there is none.
__device__ __forceinline__ void end_units(Shared& shared, SlotWriter& writer, int n) {
  shared.units[n % INFO_ENTRIES].num_tiles = 0;
  for (int consumer = 0; consumer < CONSUMERS; consumer++) {
    writer.open(shared.tile, consumer, 0);
    writer.next();
  }
}

// Output 0 and lse -inf for the tokens that see no key: by ZERO_WARPS warps of each block. Such a
// token of a unit whose other tokens see keys is written by the unit as well, with the same bytes.
__device__ __forceinline__ void zero_blind_tokens(const Params& p, int warp, int lane) {
  const int heads = p.head_tiles * HEAD_TILE, step = gridDim.x * ZERO_WARPS * 32;
  for (int base = (blockIdx.x * ZERO_WARPS + warp) * 32; base < p.num_tokens; base += step) {
    int state_id, token = base + lane;
    const bool blind =
        token < p.num_tokens && visible_keys(p, p.offset_len[token], state_id).y == 0;
    for (uint32_t left = __ballot_sync(~0u, blind); left != 0; left &= left - 1) {
      const int64_t row = (int64_t)(base + __ffs(left) - 1) * heads;
      uint4* out = (uint4*)p.out + row * (HEAD_DIM / 8);
      for (int i = lane; i < heads * (HEAD_DIM / 8); i += 32) out[i] = make_uint4(0, 0, 0, 0);
      for (int i = lane; i < heads; i += 32) p.lse[row + i] = minus_infinity();
    }
  }
}

// ---- the consumers' side: records to bf16

// 32 elements and their scale code to bf16 pairs. Exact, but below bf16's smallest step, 2^-133.
// A block that holds NaN, or values beyond bf16, becomes zeros and returns true: then the scores of
// that key are made NaN, where a token sees it, and nothing reaches a token that does not.
__device__ __forceinline__ bool dequantize_block(uint32_t (&pairs)[16], const uint4& low,
                                                 const uint4& high, uint32_t code, bool live) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t nan = 0;  // bit 7 of each byte: some element is NaN
#pragma unroll
  for (int i = 0; i < 8; i++) nan |= (words[i] & 0x7F7F7F7Fu) + 0x01010101u;
  nan &= 0x80808080u;
  // 2^120 * 2^(code - 127), as far as bf16 goes. A row that nobody sees is multiplied by 0,
  // whatever its bytes are.
  const uint32_t scale = live ? power_pair(min(code, MAX_ONE_PRODUCT_CODE) - 7) : 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    pairs[2 * i] = multiply_bf16x2(shifted_pair<0>(words[i]), scale);
    pairs[2 * i + 1] = multiply_bf16x2(shifted_pair<1>(words[i]), scale);
  }
  if (!live || (code <= MAX_ONE_PRODUCT_CODE && nan == 0)) return false;

  // Rare: the rest of a large scale, and NaN.
  const uint32_t rest = power_pair(max(code, MAX_ONE_PRODUCT_CODE) - MAX_ONE_PRODUCT_CODE);
  uint32_t infinite = 0;  // bit 15 of each half: some exponent field is all ones
#pragma unroll
  for (int i = 0; i < 16; i++) {
    pairs[i] = multiply_bf16x2(pairs[i], rest);
    infinite |= (pairs[i] & 0x7FFF7FFFu) + 0x00800080u;
  }
  const bool finite = nan == 0 && code != E8M0_NAN_BYTE && (infinite & 0x80008000u) == 0;
#pragma unroll
  for (int i = 0; i < 16; i++) pairs[i] = finite ? pairs[i] : 0;
  return !finite;
}

// Fills the window with the records of unit n; all consumers take part, the warpgroups by turns of
// a chunk, a thread two blocks of a row. False: no unit is left. The blocks of 16 neighbouring
// threads lie on a diagonal, so that neither the loads, 528 or 512 bytes apart, nor the stores meet
// in a bank.
__device__ __forceinline__ bool fill_window(const Params& p, Shared& shared,
                                            SlotReader& reader, int n, int consumer, int tid) {
  constexpr uint32_t APART = NUM_BLOCKS / 2;  // the two blocks of a thread
  const uint32_t thread = tid % WARPGROUP_THREADS, chunk_row = thread % 16;
  const uint32_t block = (thread / 16 + chunk_row) % NUM_BLOCKS;
  const uint32_t values_at = chunk_row * (p.planar ? HEAD_DIM : RECORD_BYTES);
  const uint32_t codes_at = p.planar ? CHUNK_SCALES_AT + chunk_row * NUM_BLOCKS
                                     : HEAD_DIM + chunk_row * RECORD_BYTES;
  const uint32_t ring_len = p.ring_len;
  const Unit& unit = shared.units[n % INFO_ENTRIES];
  NanRows& nan_rows = shared.nan_rows[n % INFO_ENTRIES];
  const uint32_t window = shared_address(shared.tile.window);
  const int first_slot = reader.slot;
  uint32_t first_row = 0, num_rows = 0;
  reader.advance(consumer);
#pragma unroll 1
  for (int chunk = consumer; chunk < p.num_chunks; chunk += CONSUMERS) {
    reader.wait(shared.tile, consumer);
    if (chunk == consumer) {
      if (unit.num_tiles == 0) return false;
      first_row = unit.first_row;
      num_rows = unit.num_rows;
    }
    const uint32_t row = chunk * CHUNK_ROWS + chunk_row;
    if (chunk_row < CHUNK_ROWS && row < KEY_ROWS) {
      const uint32_t slot = shared_address(shared.tile.slots[reader.slot]);
      uint4 values[2][2];
      uint32_t codes[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t at = block ^ i * APART;
        values[i][0] = load_shared16(slot + values_at + at * MX_BLOCK);
        values[i][1] = load_shared16(slot + values_at + at * MX_BLOCK + 16);
        codes[i] = load_shared_byte(slot + codes_at + at);
      }
      const uint32_t from_first = row - first_row + (row < first_row ? ring_len : 0);
      const bool live = from_first < num_rows && row < ring_len;
      const uint32_t to_row = window + row * SLAB_ROW_BYTES + ((block % 2 * 4) ^ (row % 8)) * 16;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t pairs[16];
        if (dequantize_block(pairs, values[i][0], values[i][1], codes[i], live)) {
          atomicOr(&nan_rows.words[row / 32], 1u << row % 32);
          nan_rows.any = 1;
        }
        const uint32_t to = to_row + (block ^ i * APART) / 2 * SLAB_BYTES;
#pragma unroll
        for (int piece = 0; piece < 4; piece++)
          store_shared16(to ^ piece * 16, make_uint4(pairs[4 * piece], pairs[4 * piece + 1],
                                                     pairs[4 * piece + 2], pairs[4 * piece + 3]));
      }
    }
    barrier_arrive(shared_address(shared.tile.empty + reader.slot));
    reader.advance(CONSUMERS);
  }
  reader.slot = first_slot;
  reader.skip(p.num_chunks);
  fence_async_proxy();
  barrier_arrive(shared_address(&shared.window_ready));
  barrier_wait(shared_address(&shared.window_ready), n & 1);
  // The entry of unit n + 2: nobody reads it any more, and nobody writes it before the next
  // window is ready.
  if (tid == 0) shared.nan_rows[(n + 2) % INFO_ENTRIES] = NanRows{};
  return true;
}
