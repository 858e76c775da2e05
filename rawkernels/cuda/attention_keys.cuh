// The keys of one query token: where their records lie, and their way into shared memory.
//
// A token's keys are an ordered list, oldest first, in up to two runs of consecutive records. The
// list is cut into tiles of KEY_TILE keys from its first key on, whatever else is in the batch: so
// equal keys give equal bits in decode and in prefill.
//
// In shared memory a tile is bf16 [KEY_TILE, PADDED_DIM]. Inside each block of 32 columns, column
// 8t + 2m + e is kept at place 8m + 2t + e (t, m < 4; e < 2): then the 8 columns that a lane holds
// in an accumulator, or needs of a query, are consecutive in memory and move as 16 bytes. The
// 16-byte chunk c of row r is kept at chunk c ^ (r % 8), so that 8 rows of one chunk, which is what
// ldmatrix reads and what 8 lanes write, lie in 8 different groups of banks.
#pragma once
#include "mma.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM: columns of a key, a multiple of 32 from 32 to 512"
#endif
#ifndef HEAD_TILE
#error "HEAD_TILE: query heads of a thread block: 16, 32 or 64"
#endif
#ifndef KEY_TILE
#error "KEY_TILE: keys of a step of the online softmax"
#endif
#ifndef RECORD_MXFP8
#error "RECORD_MXFP8: 1 for E4M3 values with E8M0 scales, 0 for bf16"
#endif
#ifndef PLANAR
#error "PLANAR: 1 where scales lie in a plane of their own, 0 where each follows its values"
#endif
static_assert(HEAD_DIM >= 32 && HEAD_DIM <= 512, "accumulators of 512 columns fill the registers");
static_assert(MX_BLOCK == 32 && HEAD_DIM % MX_BLOCK == 0, "a record is whole blocks of 32 values");
static_assert(KEY_TILE == 32, "a warp's lanes and fragments are laid out for 32 keys");
static_assert(HEAD_TILE == 16 || HEAD_TILE == 32 || HEAD_TILE == 64, "1, 2 or 4 rows of warps");
static_assert(!PLANAR || RECORD_MXFP8, "a bf16 record has no scales to put elsewhere");

constexpr int ROW_GROUPS = HEAD_TILE / 16;  // warps one above the other: 16 heads each
constexpr int COLUMN_GROUPS = 2;            // warps side by side: half of the columns each
constexpr int NUM_WARPS = ROW_GROUPS * COLUMN_GROUPS;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int NUM_BLOCKS = HEAD_DIM / MX_BLOCK;
// Each half holds an even number of blocks, so that its chunks begin at a multiple of 8 and the
// swizzle is the same in both. Columns past HEAD_DIM are zero.
constexpr int PADDED_BLOCKS = (NUM_BLOCKS + 3) / 4 * 4;
constexpr int WARP_BLOCKS = PADDED_BLOCKS / COLUMN_GROUPS;
constexpr int ROW_BYTES = PADDED_BLOCKS * MX_BLOCK * 2;

constexpr int BLOCK_WORDS = RECORD_MXFP8 ? 8 : 16;  // words of 32 values as they lie in a record
constexpr int VALUE_BYTES = NUM_BLOCKS * BLOCK_WORDS * 4;
constexpr int SCALE_BYTES = RECORD_MXFP8 ? NUM_BLOCKS : 0;
constexpr int RECORD_BYTES = VALUE_BYTES + SCALE_BYTES;
constexpr int VALUE_STRIDE = PLANAR ? VALUE_BYTES : RECORD_BYTES;
constexpr int SCALE_STRIDE = PLANAR ? SCALE_BYTES : RECORD_BYTES;
// What every record's address is a multiple of (rings and buffers start at multiples of 16): 528
// bytes allow 16, 132 bytes allow 4, 33 bytes nothing. The lowest bit set, at most 16.
constexpr int VALUE_ALIGN = (VALUE_STRIDE | 16) & -(VALUE_STRIDE | 16);

// Where the keys of a token lie. Key j of the list is record j of run 0 where j < first_length,
// else record j - first_length of run 1.
struct KeyRuns {
  const uint8_t* values[2];  // first record of each run
  const uint8_t* scales[2];  // first scales of each run; unused for bf16 records
  int first_length;
  int length;                // both runs together; 0 is a token without a visible key
};

// 32 values of a record as they lie there.
struct RawBlock {
  uint32_t words[BLOCK_WORDS];
};

// One lane's share of a tile: block `block` of row `row`. A warp takes 8 rows of 4 blocks at a
// time, 128 bytes (of MXFP8) in each of 8 records; 8 lanes of one store have 8 different rows.
constexpr int TILE_TASKS = (KEY_TILE / 8) * (PADDED_BLOCKS / 4);
constexpr int WARP_TASKS = (TILE_TASKS + NUM_WARPS - 1) / NUM_WARPS;
// As many of these are requested a tile ahead as there are registers for, 16 or so.
constexpr int PREFETCHED_TASKS = RECORD_MXFP8 && WARP_TASKS > 1 ? 2 : 1;
struct Share {
  int row, block;
  bool mine;  // false where the warps do not divide the tile evenly
};
__device__ __forceinline__ Share share_of_tile(int task_of_warp) {
  const int task = task_of_warp * NUM_WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  return {task % (KEY_TILE / 8) * 8 + lane % 8, task / (KEY_TILE / 8) * 4 + lane / 8,
          TILE_TASKS % NUM_WARPS == 0 || task < TILE_TASKS};
}

// Consecutive words from an address that is a multiple of ALIGN.
template <int ALIGN>
__device__ __forceinline__ void load_words(uint32_t (&words)[BLOCK_WORDS], const uint8_t* from) {
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; i += ALIGN > 4 ? ALIGN / 4 : 1) {
    const uint8_t* at = from + 4 * i;
    if constexpr (ALIGN == 16) {
      const uint4 piece = __ldg(reinterpret_cast<const uint4*>(at));
      words[i] = piece.x, words[i + 1] = piece.y, words[i + 2] = piece.z, words[i + 3] = piece.w;
    } else if constexpr (ALIGN == 8) {
      const uint2 piece = __ldg(reinterpret_cast<const uint2*>(at));
      words[i] = piece.x, words[i + 1] = piece.y;
    } else if constexpr (ALIGN == 4) {
      words[i] = __ldg(reinterpret_cast<const uint32_t*>(at));
    } else if constexpr (ALIGN == 2) {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
      words[i] = __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16;
    } else {
      words[i] = __ldg(at) | static_cast<uint32_t>(__ldg(at + 1)) << 8 |
                 static_cast<uint32_t>(__ldg(at + 2)) << 16 |
                 static_cast<uint32_t>(__ldg(at + 3)) << 24;
    }
  }
}

// Reads a lane's share of tile `tile`. What is not there (rows past the last key, columns past
// HEAD_DIM) becomes zeros: a masked row's bytes are never looked at, so no NaN in them can meet a
// probability of 0.
__device__ __forceinline__ void load_block(RawBlock& raw, const KeyRuns& runs, int tile,
                                           const Share& share) {
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; i++) raw.words[i] = 0;
  const int key = tile * KEY_TILE + share.row;
  if (!share.mine || key >= runs.length || share.block >= NUM_BLOCKS) return;
  const int run = key >= runs.first_length;
  const int64_t record = run ? key - runs.first_length : key;
  load_words<VALUE_ALIGN>(raw.words, runs.values[run] + record * VALUE_STRIDE +
                                         share.block * (BLOCK_WORDS * 4));
}

// The scale byte of a lane's share; 0, the smallest scale, for what is not there.
__device__ __forceinline__ uint8_t load_scale(const KeyRuns& runs, int tile, const Share& share) {
  const int key = tile * KEY_TILE + share.row;
  if (!RECORD_MXFP8 || !share.mine || key >= runs.length || share.block >= NUM_BLOCKS) return 0;
  const int run = key >= runs.first_length;
  const int64_t record = run ? key - runs.first_length : key;
  return __ldg(runs.scales[run] + record * SCALE_STRIDE + share.block);
}

// The bf16 pair of columns 8t + 2m, 8t + 2m + 1 of a block. For MXFP8 the value is exact but where
// it is below bf16's smallest subnormal step, 2^-133, or above its largest value (infinity, as in
// float32).
//
// An E4M3 byte shifted to bf16's exponent and mantissa reads as its value times 2^-120, the
// difference of the exponent biases, subnormals included. Two products undo that and apply the
// scale; one product would overflow for large scale codes.
constexpr uint32_t TWO_TO_120 = 0x7B807B80u;  // a pair of bf16
template <int T, int M>
__device__ __forceinline__ uint32_t block_pair(const RawBlock& raw, uint32_t scale_pair) {
  if constexpr (RECORD_MXFP8) {
    const uint32_t bytes = sign_extend_bytes<M % 2>(raw.words[2 * T + M / 2]);
    const uint32_t shifted = (bytes << 4) & 0x87F087F0u;  // sign and 7 bits of each half
    return multiply_bf16x2(multiply_bf16x2(shifted, TWO_TO_120), scale_pair);
  } else {
    return raw.words[4 * T + M];
  }
}

// The scale of a block as a pair of bf16: 2^(code - 127), NaN for code 255. A block that holds a
// NaN element (0x7F or 0xFF) becomes NaN as a whole. That is exact for attention: NaN in one column
// makes the key's score NaN, and with it every column of every head's output.
__device__ __forceinline__ uint32_t block_scale_pair(const RawBlock& raw, uint32_t scale) {
  uint32_t found = 0;
  if constexpr (RECORD_MXFP8) {
#pragma unroll
    for (int i = 0; i < BLOCK_WORDS; i++) found |= (raw.words[i] & 0x7F7F7F7Fu) + 0x01010101u;
  }
  const bool nan_element = (found & 0x80808080u) != 0;
  // Code 0 is 2^-127, the bf16 subnormal 0x0040. The same bit makes 255 a NaN instead of infinity.
  const uint32_t code = nan_element ? E8M0_NAN_BYTE : scale;
  const uint32_t bits = code << 7 | (code == 0 || code == E8M0_NAN_BYTE ? 0x40u : 0u);
  return bits * 0x10001u;
}

template <int M>
__device__ __forceinline__ uint4 block_chunk(const RawBlock& raw, uint32_t scale_pair) {
  return make_uint4(block_pair<0, M>(raw, scale_pair), block_pair<1, M>(raw, scale_pair),
                    block_pair<2, M>(raw, scale_pair), block_pair<3, M>(raw, scale_pair));
}

// Writes a lane's share of a tile, dequantized, permuted and swizzled. keys: [KEY_TILE, ROW_BYTES].
__device__ __forceinline__ void store_block(uint8_t* keys, const RawBlock& raw, uint32_t scale,
                                            const Share& share) {
  if (!share.mine) return;
  const uint32_t scale_pair = block_scale_pair(raw, scale);
  uint8_t* row = keys + share.row * ROW_BYTES;
  const int chunk = share.block * 4, swizzle = share.row % 8;
  *reinterpret_cast<uint4*>(row + ((chunk + 0) ^ swizzle) * 16) = block_chunk<0>(raw, scale_pair);
  *reinterpret_cast<uint4*>(row + ((chunk + 1) ^ swizzle) * 16) = block_chunk<1>(raw, scale_pair);
  *reinterpret_cast<uint4*>(row + ((chunk + 2) ^ swizzle) * 16) = block_chunk<2>(raw, scale_pair);
  *reinterpret_cast<uint4*>(row + ((chunk + 3) ^ swizzle) * 16) = block_chunk<3>(raw, scale_pair);
}
