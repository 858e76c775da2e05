// What the two Hopper kernels of window_decode share: the window in shared memory, its filling, and
// all of a tile behind S = Q K^T.
//
// A tile is 64 query heads of one token. A unit is what one window serves: the tiles of up to
// MAX_UNIT_TOKENS tokens of one sequence. The key at ring index i lies in row i of the window, and
// rows that a token does not see have the weight 0. So the order of every sum follows from the
// keys' positions alone, and a token's bits do not depend on the unit, the kernel or the batch.
//
// One warp of a producer warpgroup requests records and queries in the order of their use, through
// one ring of slots. Each slot is for one of two consumer warpgroups, which releases it once read.
// See the two .cu files, which include their parameters before this.
#pragma once
#include "hopper.cuh"
#include "rope.cuh"

static_assert(HEAD_DIM == 512, "8 slabs of 64 columns, 4 parts of 128 columns of output");
static_assert(HEAD_TILE == 64, "rows of a warpgroup product");
static_assert(MX_BLOCK == 32, "one thread dequantizes a block from two 16-byte loads");
static_assert(KEY_ROWS == 136, "keys of a product of 64 x 136");
static_assert(sizeof(DecodeParams) == PARAMS_BYTES, "the launcher packs another struct");

constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;
constexpr int NUM_THREADS = CONSUMER_THREADS + WARPGROUP_THREADS;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / 32;
constexpr int ZERO_WARPS = WARPGROUP_THREADS / 32 - 1;  // the rest of the producer warpgroup
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= 65536, "one SM");

constexpr int NUM_BLOCKS = HEAD_DIM / MX_BLOCK;
constexpr int RECORD_BYTES = HEAD_DIM + NUM_BLOCKS;
constexpr int SLAB_COLUMNS = 64;
constexpr int NUM_SLABS = HEAD_DIM / SLAB_COLUMNS;
constexpr int SLAB_ROW_BYTES = SLAB_COLUMNS * 2;
constexpr int SLAB_BYTES = KEY_ROWS * SLAB_ROW_BYTES;
constexpr int KEY_STEPS = (KEY_ROWS + 15) / 16;  // steps of 16 keys of O = P V
constexpr int SLOT_BYTES = HEAD_TILE * SLAB_ROW_BYTES;
constexpr int NUM_SLOTS = 9;
constexpr int CHUNK_ROWS = SLOT_BYTES / RECORD_BYTES;  // records of one slot, rounded down
constexpr int CHUNK_SCALES_AT = CHUNK_ROWS * HEAD_DIM;  // planar rings: scales of a slot's records
constexpr int STAGE_ROWS = 16;                          // heads of one warp
constexpr int STAGE_BYTES = STAGE_ROWS * SLAB_ROW_BYTES;
constexpr int INFO_ENTRIES = 4;  // units whose description may be in use at once, and to spare
static_assert(CHUNK_ROWS == 15 && NUM_BLOCKS == 16, "16 threads for the rows of a chunk, 1 idle");
static_assert(WARPGROUP_THREADS == 16 * NUM_BLOCKS / 2, "a thread has two blocks of a chunk");
static_assert(SLAB_BYTES % 1024 == 0, "operands of products start at multiples of 1024");
static_assert((INFO_ENTRIES & (INFO_ENTRIES - 1)) == 0, "indices are masked");

constexpr uint32_t MAX_ONE_PRODUCT_CODE = 134;  // see dequantize_block: 2^(134 - 7) is a bf16
constexpr float LOG2_E = 1.44269504089f, LN_2 = 0.69314718056f;

// Ids of the named barriers.
constexpr int WINDOW_READY = 1;  // the window of a unit is dequantized
constexpr int WINDOW_FREE = 2;   // and + 1: it is no longer read

// A unit, written by the producer. num_tiles 0 says that there is none left.
struct Unit {
  int first_tile;  // token * head_tiles + tile of heads
  int num_tiles;
  int first_row, num_rows;     // ring rows that a token of the unit may see; they wrap
  int2 keys[MAX_UNIT_TOKENS];  // of each token: row of its oldest key, number of keys
};

// Rows of a window whose record is not finite: bit r % 32 of words[r / 32]. `any` is their union.
struct NanRows {
  uint32_t words[(KEY_ROWS + 31) / 32], any;
};

struct Shared {
  uint8_t window[NUM_SLABS][SLAB_BYTES];       // bf16, as the products want it
  uint8_t zeros[KEY_STEPS * 16 - KEY_ROWS][SLAB_ROW_BYTES];  // rows 136 .. 143 of the last slab
  uint8_t slots[NUM_SLOTS][SLOT_BYTES];        // CHUNK_ROWS records, or 64 columns of queries
  uint8_t stage[CONSUMER_WARPS][STAGE_BYTES];  // 64 columns of output on their way out
  Unit units[INFO_ENTRIES];
  NanRows nan_rows[INFO_ENTRIES];
  uint64_t empty[NUM_SLOTS];            // released by the warpgroup that it was filled for
  uint64_t full[CONSUMERS][NUM_SLOTS];  // apart for each warpgroup, so that it sees every phase
  uint64_t first_queries_full;          // window_decode_sm90_small only
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launcher asks for less");
static_assert(sizeof(((Shared*)nullptr)->zeros) % 1024 == 0, "slots are operands of products");

// Thread `tid` of the block prepares barriers and constant rows. Followed by __syncthreads.
__device__ __forceinline__ void prepare_shared(Shared& shared, int tid) {
  if (tid == CONSUMER_THREADS) {
    for (int i = 0; i < NUM_SLOTS; i++) {
      barrier_init(shared_address(shared.empty + i), WARPGROUP_THREADS);
      for (int c = 0; c < CONSUMERS; c++) barrier_init(shared_address(shared.full[c] + i), 1);
    }
    barrier_init(shared_address(&shared.first_queries_full), 1);
    fence_barrier_init();
  }
  // The last row is in no chunk where a ring has nine; it must be finite all the same.
  if (tid < NUM_SLABS * 8) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    store_shared16(shared_address(shared.zeros) + tid * 16, zero);
    store_shared16(shared_address(shared.window[tid / 8]) + (KEY_ROWS - 1) * SLAB_ROW_BYTES +
                       tid % 8 * 16, zero);
  }
  if (tid < INFO_ENTRIES) shared.nan_rows[tid] = NanRows{};
}

// ---- the producer's side

// Visible keys of a token as (ring row of the oldest, number), with the token's state slot in
// `state_id`. (0, 0) where there are none or the plan points outside the slab.
__device__ __forceinline__ int2 visible_keys(const DecodeParams& p, int2 offset_len,
                                             int& state_id) {
  const bool seen = offset_len.y > 0 && (uint32_t)offset_len.x < (uint32_t)p.num_rows;
  state_id = seen ? offset_len.x / p.ring_len : 0;
  return seen ? make_int2(offset_len.x - state_id * p.ring_len, min(offset_len.y, p.ring_len))
              : make_int2(0, 0);
}

// Fills the slots of the ring in turn, each once its last content has been read.
struct SlotWriter {
  int slot = 0;
  uint32_t phases = (1u << NUM_SLOTS) - 1;  // parities to wait for: at first all slots are empty

  // Takes the next slot for `bytes` of copies, which one consumer warpgroup waits for. Returns the
  // barrier that they complete.
  __device__ __forceinline__ uint32_t open(Shared& shared, int consumer, uint32_t bytes) {
    barrier_wait(shared_address(shared.empty + slot), (phases >> slot) & 1);
    phases ^= 1u << slot;
    const uint32_t full = shared_address(shared.full[consumer] + slot);
    barrier_expect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void next() { slot = slot + 1 == NUM_SLOTS ? 0 : slot + 1; }
};

// Requests rows `begin` .. `end` of a ring, which lie in chunk `chunk`, into a slot.
__device__ __forceinline__ void request_rows(const DecodeParams& p, const uint8_t* ring,
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
__device__ __forceinline__ void request_records(const DecodeParams& p, Shared& shared,
                                                SlotWriter& writer, int state_id, int first_row,
                                                int num_rows) {
  const uint8_t* ring = p.slab + state_id * p.slot_bytes + p.ring_offset;
  const int end = min(first_row + num_rows, p.ring_len), wrapped = first_row + num_rows - end;
#pragma unroll 1
  for (int chunk = 0; chunk < p.num_chunks; chunk++) {
    const int low = chunk * CHUNK_ROWS, high = low + CHUNK_ROWS;
    const int begin = max(first_row, low), stop = min(end, high), wrap_stop = min(wrapped, high);
    const int rows = max(stop - begin, 0) + max(wrap_stop - low, 0);
    const uint32_t full = writer.open(shared, chunk % CONSUMERS, rows * RECORD_BYTES);
    const uint32_t slot = shared_address(shared.slots[writer.slot]);
    request_rows(p, ring, slot, chunk, low, wrap_stop, full);
    request_rows(p, ring, slot, chunk, begin, stop, full);
    writer.next();
  }
}

// Requests the queries of a tile, 64 columns a slot.
__device__ __forceinline__ void request_queries(const DecodeParams& p, Shared& shared,
                                                SlotWriter& writer, int tile, int consumer) {
#pragma unroll 1
  for (int slab = 0; slab < NUM_SLABS; slab++) {
    const uint32_t full = writer.open(shared, consumer, SLOT_BYTES);
    copy_tile(shared_address(shared.slots[writer.slot]), &p.q_map, slab * SLAB_COLUMNS,
              tile * HEAD_TILE, full);
    writer.next();
  }
}

// Tells the consumers, who wait for the first chunk of unit n, that there is none.
__device__ __forceinline__ void end_units(Shared& shared, SlotWriter& writer, int n) {
  shared.units[n % INFO_ENTRIES].num_tiles = 0;
  for (int consumer = 0; consumer < CONSUMERS; consumer++) {
    writer.open(shared, consumer, 0);
    writer.next();
  }
}

// Output 0 and lse -inf for the tokens that see no key: by ZERO_WARPS warps of each block. Such a
// token of a unit whose other tokens see keys is written by the unit as well, with the same bytes.
__device__ __forceinline__ void zero_blind_tokens(const DecodeParams& p, int warp, int lane) {
  const int heads = p.head_tiles * HEAD_TILE, step = gridDim.x * ZERO_WARPS * 32;
  for (int base = (blockIdx.x * ZERO_WARPS + warp) * 32; base < p.num_tokens; base += step) {
    int state_id, token = base + lane;
    const bool blind =
        token < p.num_tokens && visible_keys(p, p.offset_len[token], state_id).y == 0;
    for (uint32_t left = __ballot_sync(~0u, blind); left != 0; left &= left - 1) {
      const int64_t row = (int64_t)(base + __ffs(left) - 1) * heads;
      uint4* out = (uint4*)p.out + row * (HEAD_DIM / 8);
      for (int i = lane; i < heads * (HEAD_DIM / 8); i += 32) out[i] = make_uint4(0, 0, 0, 0);
      for (int i = lane; i < heads; i += 32) p.lse[row + i] = __int_as_float(0xFF800000);
    }
  }
}

// ---- the consumers' side: records to bf16

// Follows the slots of the ring. `phases`: parities of the barriers of this thread's warpgroup.
struct SlotReader {
  int slot = 0;
  uint32_t phases = 0;

  __device__ __forceinline__ void wait(Shared& shared, int consumer) {
    barrier_wait(shared_address(shared.full[consumer] + slot), (phases >> slot) & 1);
    phases ^= 1u << slot;
  }
  __device__ __forceinline__ void skip(int slots) { slot = (slot + slots) % NUM_SLOTS; }
  // The same for less than a round.
  __device__ __forceinline__ void advance(int slots) {
    slot += slots;
    if (slot >= NUM_SLOTS) slot -= NUM_SLOTS;
  }
};

// A pair of bf16 2^exponent, exponent -126 .. 127.
__device__ __forceinline__ uint32_t power_pair(int exponent) {
  return (exponent + 127) * 0x00800080u;
}
// The E4M3 bytes of a pair, read as bf16: shifted to exponent and mantissa, an element is 2^-120 of
// its value, subnormals included.
template <int HALF>
__device__ __forceinline__ uint32_t shifted_pair(uint32_t word) {
  return (sign_extend_bytes<HALF>(word) << 4) & 0x87F087F0u;
}

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
__device__ __forceinline__ bool fill_window(const DecodeParams& p, Shared& shared,
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
  const uint32_t window = shared_address(shared.window);
  const int first_slot = reader.slot;
  uint32_t first_row = 0, num_rows = 0;
  reader.advance(consumer);
#pragma unroll 1
  for (int chunk = consumer; chunk < p.num_chunks; chunk += CONSUMERS) {
    reader.wait(shared, consumer);
    if (chunk == consumer) {
      if (unit.num_tiles == 0) return false;
      first_row = unit.first_row;
      num_rows = unit.num_rows;
    }
    const uint32_t row = chunk * CHUNK_ROWS + chunk_row;
    if (chunk_row < CHUNK_ROWS && row < KEY_ROWS) {
      const uint32_t slot = shared_address(shared.slots[reader.slot]);
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
    barrier_arrive(shared_address(shared.empty + reader.slot));
    reader.advance(CONSUMERS);
  }
  reader.slot = first_slot;
  reader.skip(p.num_chunks);
  fence_async_proxy();
  named_barrier(WINDOW_READY, CONSUMER_THREADS);
  // The entry of unit n + 2: nobody reads it any more, and nobody writes it before the next
  // WINDOW_READY.
  if (tid == 0) shared.nan_rows[(n + 2) % INFO_ENTRIES] = NanRows{};
  return true;
}
