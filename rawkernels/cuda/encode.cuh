// A token's vectors to one part of its record by one warp: rotate, round to bf16 (or fp16),
// quantize. A part is the one vector of a latent record, or all KV heads of K, or of V. Shared by
// encode_records, ring_store and paged_store, so all make the same bytes.
#pragma once
#include "fp16.cuh"
#include "memory.cuh"
#include "mxfp8.cuh"
#include "rope.cuh"

static_assert(RECORD_MXFP8 == 0 || RECORD_MXFP8 == 1, "records are mxfp8, or bf16 or fp16");
static_assert(VALUES_FP16 == 0 || VALUES_FP16 == 1, "vectors are bf16 or fp16");
static_assert(!RECORD_MXFP8 || !VALUES_FP16, "mxfp8 records are made from bf16");
static_assert(HEAD_DIM > 0 && KV_HEADS > 0, "a vector has elements");
static_assert(PARTS == 2 || (PARTS == 1 && KV_HEADS == 1), "K and V, or one latent vector");
static_assert(!RECORD_MXFP8 || HEAD_DIM % MX_BLOCK == 0, "mxfp8 records hold whole blocks");
static_assert(ROPE_DIMS >= 0 && ROPE_DIMS % 2 == 0 && ROPE_DIMS <= HEAD_DIM, "0 is no rotation");
static_assert(STORE_BYTES == 16 || STORE_BYTES == 8 || STORE_BYTES == 4 || STORE_BYTES == 2 ||
                  STORE_BYTES == 1,
              "records are written in pieces of a power of two");

constexpr int WARPS = 8;                                  // parts of a thread block
constexpr int PART_DIMS = KV_HEADS * HEAD_DIM;            // elements of a part
constexpr int LANE_DIMS = HEAD_DIM % CHUNK == 0 ? CHUNK : 1;  // elements of a lane in one round
constexpr int LANES = PART_DIMS / LANE_DIMS;              // lanes a part needs
constexpr int ROUNDS = (LANES + 31) / 32;
// Loads in flight of a lane. A wide part goes in turns: with more loads the registers leave room
// for fewer warps, and ptxas spills.
constexpr int TURN_ROUNDS = ROUNDS < 2 ? ROUNDS : 2;
constexpr int ROPE_START = HEAD_DIM - ROPE_DIMS;          // first rotated element
constexpr int NUM_PAIRS = ROPE_DIMS / 2;
constexpr int TABLE_PAIRS = NUM_PAIRS > 0 ? NUM_PAIRS : 1;
// Lanes hold whole pairs (adjacent), or their partners lie in whole lanes (half).
constexpr bool WHOLE_LANES = LANE_DIMS == CHUNK && ROPE_START % CHUNK == 0 &&
                             (ROPE_ADJACENT || NUM_PAIRS % CHUNK == 0);

// A warp waits for its position, then for the table. Positions are asked for this many items ahead,
// about as many as an H200 holds at once, so that the first wait is short.
constexpr int ITEMS_AHEAD = 8448;

struct RecordPlace {  // of one part
  uint8_t* values;
  uint8_t* scales;  // not used by records without scales
};

// A bf16 or fp16 element as float32, and back.
__device__ __forceinline__ float value_float(uint16_t bits) {
  return VALUES_FP16 ? fp16_float(bits) : bf16_float(bits);
}
__device__ __forceinline__ uint16_t float_value(float x) {
  return VALUES_FP16 ? float_fp16(x) : float_bf16(x);
}

// Fills a warp's table of (cos, sin), one lane a pair. Ends with the warp in step.
__device__ __forceinline__ void prepare_rotation(const double2* table, int32_t position, int lane,
                                                 float2 (&rotation)[TABLE_PAIRS]) {
#pragma unroll 1
  for (int pair = lane; pair < NUM_PAIRS; pair += 32)
    rotation[pair] = rope_rotation(table, NUM_PAIRS, position, pair);
  __syncwarp();
}

// Element e of a rotated head, from memory: for shapes whose pairs do not fit whole lanes.
__device__ __forceinline__ float rotated_element(const uint16_t* kv, int e,
                                                 const float2 (&rotation)[TABLE_PAIRS]) {
  int r = e - ROPE_START;
  bool is_first = ROPE_ADJACENT ? r % 2 == 0 : r < NUM_PAIRS;
  int pair = ROPE_ADJACENT ? r / 2 : (is_first ? r : r - NUM_PAIRS);
  int distance = ROPE_ADJACENT ? 1 : NUM_PAIRS;
  float x0 = value_float(__ldg(kv + (is_first ? e : e - distance)));
  float x1 = value_float(__ldg(kv + (is_first ? e + distance : e)));
  float2 turned = rotation[pair];
  return is_first ? rotated_first(x0, x1, turned) : rotated_second(x0, x1, turned);
}

__device__ __forceinline__ float low_value(uint32_t pair) {
  return VALUES_FP16 ? fp16_float((uint16_t)pair) : low_bf16(pair);
}
__device__ __forceinline__ float high_value(uint32_t pair) {
  return VALUES_FP16 ? fp16_float((uint16_t)(pair >> 16)) : high_bf16(pair);
}
// Two elements, rounded. In an mxfp8 record any NaN will do: it makes its block NaN.
__device__ __forceinline__ uint32_t pack_values(float low, float high) {
  return RECORD_MXFP8 ? pack_bf16(low, high)
                      : (uint32_t)float_value(low) | (uint32_t)float_value(high) << 16;
}

// Rotates the eight elements from e on of the head at kv, in place.
__device__ __forceinline__ void rotate_chunk(const uint16_t* kv, int e,
                                             const float2 (&rotation)[TABLE_PAIRS],
                                             uint32_t (&pairs)[CHUNK / 2]) {
  if (e + CHUNK <= ROPE_START) return;
  if constexpr (WHOLE_LANES && ROPE_ADJACENT) {
    int first = (e - ROPE_START) / 2;
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
      float x0 = low_value(pairs[i]), x1 = high_value(pairs[i]);
      float2 turned = rotation[first + i];
      pairs[i] = pack_values(rotated_first(x0, x1, turned), rotated_second(x0, x1, turned));
    }
  } else if constexpr (WHOLE_LANES) {
    bool is_first = e < ROPE_START + NUM_PAIRS;
    int first = e - ROPE_START - (is_first ? 0 : NUM_PAIRS);
    uint4 raw = __ldg((const uint4*)(kv + (is_first ? e + NUM_PAIRS : e - NUM_PAIRS)));
    const uint32_t others[CHUNK / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
      float x[2] = {low_value(pairs[i]), high_value(pairs[i])};
      const float other[2] = {low_value(others[i]), high_value(others[i])};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float2 turned = rotation[first + 2 * i + j];
        x[j] = is_first ? rotated_first(x[j], other[j], turned)
                        : rotated_second(other[j], x[j], turned);
      }
      pairs[i] = pack_values(x[0], x[1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++) {
      int at = e + 2 * i;
      float x0 = low_value(pairs[i]), x1 = high_value(pairs[i]);
      if (at >= ROPE_START) x0 = rotated_element(kv, at, rotation);
      if (at + 1 >= ROPE_START) x1 = rotated_element(kv, at + 1, rotation);
      if (at + 1 >= ROPE_START) pairs[i] = pack_values(x0, x1);
    }
  }
}

// Records without scales whose head_dim is no multiple of 8: one lane an element.
__device__ __forceinline__ void store_elements(const uint16_t* kv,
                                               const float2 (&rotation)[TABLE_PAIRS],
                                               bool is_rotated, RecordPlace to, int lane) {
#pragma unroll 1
  for (int e = lane; e < PART_DIMS; e += 32) {
    uint16_t bits = __ldg(kv + e);
    int in_head = e % HEAD_DIM;
    if (is_rotated && in_head >= ROPE_START)
      bits = float_value(rotated_element(kv + (e - in_head), in_head, rotation));
    if constexpr (STORE_BYTES >= 2) {
      *(uint16_t*)(to.values + 2 * e) = bits;
    } else {
      to.values[2 * e] = (uint8_t)bits;
      to.values[2 * e + 1] = (uint8_t)(bits >> 8);
    }
  }
}

// The eight elements of chunk `chunk` of a part, loaded as `raw`; lanes past the part take part in
// the shuffles and store nothing.
__device__ __forceinline__ void encode_lane(const uint16_t* kv, uint4 raw, int chunk,
                                            bool is_rotated, float amax_floor,
                                            const float2 (&rotation)[TABLE_PAIRS], RecordPlace to,
                                            int lane) {
  bool inside = chunk < LANES;
  // Where the first element lies in its head.
  int in_head = KV_HEADS == 1 ? chunk * CHUNK : chunk * CHUNK % HEAD_DIM;
  uint32_t pairs[CHUNK / 2] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (ROPE_DIMS > 0) {
    if (inside && is_rotated)
      rotate_chunk(kv + (chunk * CHUNK - in_head), in_head, rotation, pairs);
  }
  if constexpr (RECORD_MXFP8) {
    uint32_t words[2];
    uint32_t code = encode_pairs<SCALE_CEIL>(pairs, __float_as_uint(amax_floor), words);
    if (!inside) return;
    store_words<(STORE_BYTES < 8 ? STORE_BYTES : 8)>(to.values + chunk * CHUNK, words);
    if (lane % BLOCK_LANES == 0) to.scales[chunk / BLOCK_LANES] = (uint8_t)code;
  } else if (inside) {
    store_words<STORE_BYTES>(to.values + chunk * 2 * CHUNK, pairs);
  }
}

// kv: bf16 or fp16 [KV_HEADS, HEAD_DIM] at a multiple of 16 bytes where HEAD_DIM % 8 == 0; table
// may be null where ROPE_DIMS is 0. Every head is rotated alike, or none is (the values of a pair).
// All 32 lanes of the warp take part.
__device__ __forceinline__ void encode_part(const uint16_t* kv, const double2* table,
                                            int32_t position, bool is_rotated, float amax_floor,
                                            float2 (&rotation)[TABLE_PAIRS], RecordPlace to,
                                            int lane) {
  is_rotated = ROPE_DIMS > 0 && is_rotated;
  if constexpr (LANE_DIMS != CHUNK) {
    if (is_rotated) prepare_rotation(table, position, lane, rotation);
    store_elements(kv, rotation, is_rotated, to, lane);
    return;
  } else {
#pragma unroll 1
    for (int turn = 0; turn < ROUNDS; turn += TURN_ROUNDS) {
      uint4 raw[TURN_ROUNDS];
#pragma unroll
      for (int r = 0; r < TURN_ROUNDS; r++) {
        int chunk = (turn + r) * 32 + lane;
        raw[r] = make_uint4(0, 0, 0, 0);
        if (chunk < LANES) raw[r] = __ldg((const uint4*)kv + chunk);
      }
      if (turn == 0 && is_rotated) prepare_rotation(table, position, lane, rotation);
#pragma unroll
      for (int r = 0; r < TURN_ROUNDS; r++) {
        int chunk = (turn + r) * 32 + lane;
        encode_lane(kv, raw[r], chunk, is_rotated, amax_floor, rotation, to, lane);
      }
    }
  }
}
