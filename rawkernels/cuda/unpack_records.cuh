// Records of K and V to rows of k and v in bf16 (or fp16, for fp16 records), a few rows a thread
// block. Shared by the kernels that find the records: paged_load and ring_load.
#pragma once
#include "memory.cuh"
#include "mxfp8.cuh"

static_assert(RECORD_MXFP8 == 0 || RECORD_MXFP8 == 1, "records are mxfp8, or 16 bits a value");
static_assert(HEAD_DIM > 0 && KV_HEADS > 0, "a vector has elements");
static_assert(!RECORD_MXFP8 || HEAD_DIM % MX_BLOCK == 0, "mxfp8 records hold whole blocks");
static_assert(LOAD_BYTES == 16 || LOAD_BYTES == 8 || LOAD_BYTES == 4 || LOAD_BYTES == 2 ||
                  LOAD_BYTES == 1,
              "records are read in pieces of a power of two");

constexpr int THREADS = 128;
constexpr int PART_DIMS = KV_HEADS * HEAD_DIM;  // elements of K, and of V
// Elements that a thread takes at once: 16 bytes of a record, where rows are whole such units.
constexpr int UNIT_DIMS = RECORD_MXFP8 ? 16 : (PART_DIMS % 8 == 0 ? 8 : 1);
constexpr int PART_UNITS = PART_DIMS / UNIT_DIMS;
constexpr int ROW_UNITS = 2 * PART_UNITS;
constexpr int BLOCK_ROWS = LAUNCH_BLOCK_ROWS;  // the launcher's choice: its grid depends on it
constexpr int ROUNDS = UNIT_DIMS == 1 ? 1 : 4;  // loads in flight of a thread
static_assert(BLOCK_ROWS > 0, "a block has rows");

// Where the records of a block's rows lie; null for a row of zeros.
struct RecordSources {
  const uint8_t* values[BLOCK_ROWS][2];  // K, V
  const uint8_t* scales[BLOCK_ROWS][2];  // not read where records have no scales
};

__device__ __forceinline__ void set_source(RecordSources& from, int row, const uint8_t* values,
                                           const uint8_t* scales, int64_t value_part_stride,
                                           int64_t scale_part_stride) {
  from.values[row][0] = values;
  from.values[row][1] = values == nullptr ? nullptr : values + value_part_stride;
  from.scales[row][0] = scales;
  from.scales[row][1] = scales + scale_part_stride;
}

// 16 bytes from an address that is a multiple of LOAD_BYTES.
__device__ __forceinline__ uint4 load_unit(const uint8_t* at) {
  if constexpr (LOAD_BYTES == 16) {
    return load_early((const uint4*)at);
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (LOAD_BYTES >= 4) {
        words[i] = load_early((const uint32_t*)(at + 4 * i));
      } else if constexpr (LOAD_BYTES == 2) {
        const uint16_t* halves = (const uint16_t*)(at + 4 * i);
        words[i] = (uint32_t)load_early(halves) | (uint32_t)load_early(halves + 1) << 16;
      } else {
        words[i] = 0;
#pragma unroll
        for (int b = 0; b < 4; b++) words[i] |= (uint32_t)load_early(at + 4 * i + b) << 8 * b;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Eight bf16 of two words of E4M3 under one scale.
__device__ __forceinline__ uint4 decode_words(uint32_t low, uint32_t high, float scale) {
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    y[i] = e4m3_decode((i < 4 ? low : high) >> (8 * (i % 4)) & 0xFF) * scale;
  uint32_t bits[4];
  float sum = 0.0f;  // NaN where an element is
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bits[i] = pack_bf16(y[2 * i], y[2 * i + 1]);
    sum += y[2 * i] + y[2 * i + 1];
  }
  if (sum != sum) {  // the NaNs have to be BF16_NAN, which the instruction's are not
#pragma unroll
    for (int i = 0; i < 4; i++)
      bits[i] = (uint32_t)float_bf16(y[2 * i]) | (uint32_t)float_bf16(y[2 * i + 1]) << 16;
  }
  return make_uint4(bits[0], bits[1], bits[2], bits[3]);
}

// Fills `rows` rows from row `first` on of k and v [.., KV_HEADS, HEAD_DIM], which lie at multiples
// of 16 bytes where UNIT_DIMS > 1.
__device__ __forceinline__ void unpack_rows(const RecordSources& from, int64_t first, int rows,
                                            uint16_t* k, uint16_t* v) {
#pragma unroll 1
  for (int turn = 0; turn < rows * ROW_UNITS; turn += ROUNDS * THREADS) {
    uint4 raw[ROUNDS];
    uint32_t code[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int unit = turn + r * THREADS + threadIdx.x;
      raw[r] = make_uint4(0, 0, 0, 0);
      code[r] = 0;
      if (unit >= rows * ROW_UNITS) continue;
      int row = unit / ROW_UNITS, u = unit % ROW_UNITS;
      int part = u / PART_UNITS, w = u % PART_UNITS;
      const uint8_t* values = from.values[row][part];
      if (values == nullptr) continue;
      if constexpr (UNIT_DIMS == 1) {
        raw[r].x = values[2 * w] | (uint32_t)values[2 * w + 1] << 8;
      } else {
        raw[r] = load_unit(values + 16 * w);
        if constexpr (RECORD_MXFP8) code[r] = load_early(from.scales[row][part] + w / 2);
      }
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int unit = turn + r * THREADS + threadIdx.x;
      if (unit >= rows * ROW_UNITS) break;
      int row = unit / ROW_UNITS, u = unit % ROW_UNITS;
      uint16_t* to = (u < PART_UNITS ? k : v) + (first + row) * PART_DIMS;
      to += u % PART_UNITS * UNIT_DIMS;
      if constexpr (UNIT_DIMS == 1) {
        *to = (uint16_t)raw[r].x;
      } else if constexpr (RECORD_MXFP8) {
        float scale = scale_value(code[r]);
        ((uint4*)to)[0] = decode_words(raw[r].x, raw[r].y, scale);
        ((uint4*)to)[1] = decode_words(raw[r].z, raw[r].w, scale);
      } else {
        *(uint4*)to = raw[r];
      }
    }
  }
}
