// The end of a query token: inverse rotation of the output, rounding to bf16, stores.
#pragma once
#include "attention_keys.cuh"
#include "rope.cuh"
#include "softmax.cuh"

#ifndef ROPE_DIMS
#error "ROPE_DIMS: last columns of the output that are rotated back, 0 for none"
#endif
#ifndef ROPE_ADJACENT
#error "ROPE_ADJACENT: 1 for pairs (2i, 2i + 1), 0 for pairs (i, i + ROPE_DIMS / 2)"
#endif
static_assert(ROPE_DIMS >= 0 && ROPE_DIMS <= HEAD_DIM, "rotary columns are columns of the output");
static_assert(ROPE_DIMS % 2 == 0, "rotary columns come in pairs");
constexpr int ROPE_START = HEAD_DIM - ROPE_DIMS;

// One token's heads of this thread block. Pointers are to the first of them.
struct Query {
  const uint16_t* q;          // bf16 [num_heads, HEAD_DIM]
  uint16_t* out;              // bf16 [num_heads, HEAD_DIM]
  float* lse;                 // [num_heads]
  const float* sink;          // [num_heads], may be null
  const double2* rope_table;  // [table rows, ROPE_DIMS / 2] cosine, sine; null where ROPE_DIMS is 0
  int position;               // of the token
  int num_heads;              // heads that exist, 1 .. HEAD_TILE
};

// Heads first_head .. of a token; Params are window_decode's or window_prefill's.
template <typename Params>
__device__ __forceinline__ Query query_of(const Params& p, int token, int first_head) {
  const int64_t row = int64_t(token) * p.num_q_heads + first_head;
  Query query;
  query.q = p.q + row * HEAD_DIM;
  query.out = p.out + row * HEAD_DIM;
  query.lse = p.lse + row;
  query.sink = p.sink == nullptr ? nullptr : p.sink + first_head;
  query.rope_table = p.rope_table;
  query.position = ROPE_DIMS > 0 ? p.positions[token] : 0;
  query.num_heads = min(p.num_q_heads - first_head, HEAD_TILE);
  return query;
}

// The rotation back from the position, (cos, -sin) of each pair. rotation: [ROPE_DIMS / 2].
__device__ __forceinline__ void load_rotation(float2* rotation, const Query& query) {
  for (int pair = threadIdx.x; pair < ROPE_DIMS / 2; pair += NUM_THREADS) {
    const float2 forward = rope_rotation(query.rope_table, ROPE_DIMS / 2, query.position, pair);
    rotation[pair] = make_float2(forward.x, -forward.y);
  }
}

// Output 0 and lse -inf, for a token without a visible key.
__device__ __forceinline__ void store_nothing(const Query& query) {
  uint4* out = reinterpret_cast<uint4*>(query.out);
  for (int i = threadIdx.x; i < query.num_heads * (HEAD_DIM / 8); i += NUM_THREADS)
    out[i] = make_uint4(0, 0, 0, 0);
  for (int head = threadIdx.x; head < query.num_heads; head += NUM_THREADS)
    query.lse[head] = minus_infinity();
}

// Rotates adjacent pairs: columns 8t .. 8t + 7 of a block are four whole pairs of one lane.
__device__ __forceinline__ void rotate_adjacent(float (&columns)[8], const float2* rotation,
                                                int first_column) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int at = first_column + i - ROPE_START;
    if (at < 0) continue;
    const float x0 = columns[i], x1 = columns[i + 1];
    columns[i] = rotated_first(x0, x1, rotation[at / 2]);
    columns[i + 1] = rotated_second(x0, x1, rotation[at / 2]);
  }
}

// Rotates pairs that lie half of the rotary columns apart. row: float32 [HEAD_DIM], not rotated.
__device__ __forceinline__ void rotate_half(float (&columns)[8], const float2* rotation,
                                            const float* row, int first_column) {
  constexpr int HALF = ROPE_DIMS / 2;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int at = first_column + i - ROPE_START;
    if (at < 0) continue;
    if (at < HALF)
      columns[i] = rotated_first(columns[i], row[first_column + i + HALF], rotation[at]);
    else
      columns[i] = rotated_second(row[first_column + i - HALF], columns[i], rotation[at - HALF]);
  }
}

// Rounds and stores o, 16 bytes a store. stage: float32 [HEAD_TILE / 2, HEAD_DIM] of shared memory
// that nothing else uses. All threads of the block take part.
__device__ __forceinline__ void store_output(const float (&o)[WARP_BLOCKS][4][4], float* stage,
                                             const float2* rotation, const Query& query) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_block = warp % 2 * WARP_BLOCKS;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int head = warp / 2 * 16 + lane / 4 + 8 * half;
    float* staged = stage + (warp / 2 * 8 + lane / 4) * HEAD_DIM;
    if (ROPE_DIMS > 0 && !ROPE_ADJACENT) {
      // Half of the heads at a time, because their float32 columns fill the key buffers.
      __syncthreads();
#pragma unroll
      for (int b = 0; b < WARP_BLOCKS; b++) {
        if (first_block + b >= NUM_BLOCKS) break;
        const int first_column = (first_block + b) * MX_BLOCK + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) staged[first_column + i] = o[b][i / 2][2 * half + i % 2];
      }
      __syncthreads();
    }
#pragma unroll
    for (int b = 0; b < WARP_BLOCKS; b++) {
      if (first_block + b >= NUM_BLOCKS || head >= query.num_heads) break;
      const int first_column = (first_block + b) * MX_BLOCK + lane % 4 * 8;
      float columns[8];
#pragma unroll
      for (int i = 0; i < 8; i++) columns[i] = o[b][i / 2][2 * half + i % 2];
      if (ROPE_DIMS > 0 && ROPE_ADJACENT) rotate_adjacent(columns, rotation, first_column);
      if (ROPE_DIMS > 0 && !ROPE_ADJACENT) rotate_half(columns, rotation, staged, first_column);
      *reinterpret_cast<uint4*>(query.out + head * HEAD_DIM + first_column) =
          make_uint4(pack_bf16(columns[0], columns[1]), pack_bf16(columns[2], columns[3]),
                     pack_bf16(columns[4], columns[5]), pack_bf16(columns[6], columns[7]));
    }
  }
}
