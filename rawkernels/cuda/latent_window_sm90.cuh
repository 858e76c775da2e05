// What all Hopper kernels of window attention share: keys and queries on their way through shared
// memory.
//
// A tile is 64 query heads of one token. The window holds keys as bf16; the key at ring index i
// lies in row i, and rows that a token does not see have the weight 0. So the order of every sum
// follows from the keys' positions alone: a token's bits depend neither on the kernel that serves
// it nor on what else is in the batch.
//
// A producer fills one ring of slots in the order of use; each slot is for one of two consumer
// warpgroups, which releases it once read. The .cu files include their parameters before this.
#pragma once
#include "hopper.cuh"
#include "rope.cuh"
#include "softmax.cuh"

static_assert(HEAD_DIM == 512, "8 slabs of 64 columns, 4 parts of 128 columns of output");
static_assert(HEAD_TILE == 64, "rows of a warpgroup product");
static_assert(KEY_ROWS == 136, "keys of a product of 64 x 136");
static_assert(sizeof(Params) == PARAMS_BYTES, "the launcher packs another struct");

constexpr int CONSUMERS = 2;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;
constexpr int NUM_THREADS = CONSUMER_THREADS + WARPGROUP_THREADS;
constexpr int CONSUMER_WARPS = CONSUMER_THREADS / 32;

constexpr int NUM_BLOCKS = HEAD_DIM / MX_BLOCK;
constexpr int RECORD_BYTES = HEAD_DIM + NUM_BLOCKS;
constexpr int SLAB_COLUMNS = 64;
constexpr int NUM_SLABS = HEAD_DIM / SLAB_COLUMNS;
constexpr int SLAB_ROW_BYTES = SLAB_COLUMNS * 2;
constexpr int SLAB_BYTES = KEY_ROWS * SLAB_ROW_BYTES;
constexpr int KEY_STEPS = (KEY_ROWS + 15) / 16;  // steps of 16 keys of O = P V
constexpr int SLOT_BYTES = HEAD_TILE * SLAB_ROW_BYTES;
constexpr int NUM_SLOTS = 9;
constexpr int STAGE_ROWS = 16;                          // heads of one warp
constexpr int STAGE_BYTES = STAGE_ROWS * SLAB_ROW_BYTES;
static_assert(SLAB_BYTES % 1024 == 0, "operands of products start at multiples of 1024");

constexpr uint32_t MAX_ONE_PRODUCT_CODE = 134;  // see dequantize_block: 2^(134 - 7) is a bf16

// Rows of a window whose record is not finite: bit r % 32 of words[r / 32]. `any` is their union.
struct NanRows {
  uint32_t words[(KEY_ROWS + 31) / 32], any;
};

struct TileShared {
  uint8_t window[NUM_SLABS][SLAB_BYTES];       // bf16, as the products want it
  uint8_t zeros[KEY_STEPS * 16 - KEY_ROWS][SLAB_ROW_BYTES];  // rows 136 .. 143 of the last slab
  uint8_t slots[NUM_SLOTS][SLOT_BYTES];        // 64 columns of a tile's queries, or records
  uint8_t stage[CONSUMER_WARPS][STAGE_BYTES];  // 64 columns of output on their way out
  uint64_t empty[NUM_SLOTS];            // released by the warpgroup that it was filled for
  uint64_t full[CONSUMERS][NUM_SLOTS];  // apart for each warpgroup, so that it sees every phase
};
static_assert(sizeof(((TileShared*)nullptr)->zeros) % 1024 == 0, "slots are operands of products");

// Thread `tid` of the block prepares barriers and constant rows. Followed by __syncthreads.
__device__ __forceinline__ void prepare_tiles(TileShared& shared, int tid) {
  if (tid == CONSUMER_THREADS) {
    for (int i = 0; i < NUM_SLOTS; i++) {
      barrier_init(shared_address(shared.empty + i), WARPGROUP_THREADS);
      for (int c = 0; c < CONSUMERS; c++) barrier_init(shared_address(shared.full[c] + i), 1);
    }
    fence_barrier_init();
  }
  // The last row is in no chunk where a ring has nine; it must be finite all the same.
  if (tid < NUM_SLABS * 8) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    store_shared16(shared_address(shared.zeros) + tid * 16, zero);
    store_shared16(shared_address(shared.window[tid / 8]) + (KEY_ROWS - 1) * SLAB_ROW_BYTES +
                       tid % 8 * 16, zero);
  }
}

// ---- slots

// Fills the slots of the ring in turn, each once its last content has been read.
struct SlotWriter {
  int slot = 0;
  uint32_t phases = (1u << NUM_SLOTS) - 1;  // parities to wait for: at first all slots are empty

  // Takes the next slot for `bytes` of copies, which one consumer warpgroup waits for. Returns the
  // barrier that they complete.
  __device__ __forceinline__ uint32_t open(TileShared& shared, int consumer, uint32_t bytes) {
    barrier_wait(shared_address(shared.empty + slot), (phases >> slot) & 1);
    phases ^= 1u << slot;
    const uint32_t full = shared_address(shared.full[consumer] + slot);
    barrier_expect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void next() { slot = slot + 1 == NUM_SLOTS ? 0 : slot + 1; }
};

// Requests the queries of a tile, 64 columns a slot.
__device__ __forceinline__ void request_queries(const Params& p, TileShared& shared,
                                                SlotWriter& writer, int tile, int consumer) {
#pragma unroll 1
  for (int slab = 0; slab < NUM_SLABS; slab++) {
    const uint32_t full = writer.open(shared, consumer, SLOT_BYTES);
    copy_tile(shared_address(shared.slots[writer.slot]), &p.q_map, slab * SLAB_COLUMNS,
              tile * HEAD_TILE, full);
    writer.next();
  }
}

// Follows the slots of the ring. `phases`: parities of the barriers of this thread's warpgroup.
struct SlotReader {
  int slot = 0;
  uint32_t phases = 0;

  __device__ __forceinline__ void wait(TileShared& shared, int consumer) {
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

// ---- records to bf16

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
