// The records of grouped-query layers: where the parts of a record lie, in memory and in a stage of
// shared memory, and the copies between them.
//
// A record is K values of all KV heads, K scales, V values, V scales (no scales but for MXFP8). A
// thread block serves HEADS of the NUM_KV_HEADS heads, so it needs two runs of values; scales are
// few and come whole. A block that serves all heads of 16-byte aligned records copies them whole.
#pragma once
#include "async_copy.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM: columns of a key, a multiple of 16 (32 for MXFP8) up to 256"
#endif
#ifndef NUM_KV_HEADS
#error "NUM_KV_HEADS: KV heads of a record"
#endif
#ifndef HEADS
#error "HEADS: KV heads of a thread block, a divisor of NUM_KV_HEADS; one warp each"
#endif
#ifndef RECORD_TYPE
#error "RECORD_TYPE: 0 for bf16, 1 for fp16, 2 for E4M3 values with E8M0 scales"
#endif
#ifndef COPY_ALIGN
#error "COPY_ALIGN: what all runs of a record begin and end at a multiple of: 1, 2, 4, 8 or 16"
#endif
#ifndef BULK_COPY
#error "BULK_COPY: 1 for copies of whole runs where the device has them (sm_90) and COPY_ALIGN 16"
#endif
#ifndef FETCHERS
#error "FETCHERS: warps that fetch records, each every FETCHERS-th key"
#endif
#ifndef NUM_STAGES
#error "NUM_STAGES: tiles of keys in shared memory"
#endif
#ifndef KEY_TILE
#error "KEY_TILE: keys of a stage and of a step of the online softmax, 16 or 32; decides bits"
#endif
static_assert(KEY_TILE == 16 || KEY_TILE == 32, "a lane fetches a key, a product has 16");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 32 && HEAD_DIM <= 256, "a product has 16 columns");
static_assert(RECORD_TYPE != 2 || HEAD_DIM % MX_BLOCK == 0, "scales are of 32 columns");
static_assert(NUM_KV_HEADS % HEADS == 0 && HEADS <= 8, "8 warps and one more fit 2 blocks an SM");
static_assert(COPY_ALIGN >= 1 && COPY_ALIGN <= 16, "no copy moves more than 16 bytes a lane");
static_assert(16 % COPY_ALIGN == 0, "COPY_ALIGN is a power of two");
static_assert(FETCHERS == 1 || FETCHERS == 2 || FETCHERS == 4, "they divide a tile's keys");
static_assert(NUM_STAGES >= 2, "a stage is filled while another is read");

constexpr bool MXFP8 = RECORD_TYPE == 2;

constexpr int NUM_BLOCKS = HEAD_DIM / MX_BLOCK;
constexpr int HEAD_BYTES = HEAD_DIM * (MXFP8 ? 1 : 2);
constexpr int SCALES_BYTES = MXFP8 ? NUM_KV_HEADS * NUM_BLOCKS : 0;
constexpr int RECORD_BYTES = 2 * (NUM_KV_HEADS * HEAD_BYTES + SCALES_BYTES);
static_assert(COPY_ALIGN == 1 || RECORD_BYTES % COPY_ALIGN == 0, "records follow one another");

// In shared memory, from a key's start: the same parts at multiples of 16. The distance of two keys
// is an odd multiple of 16, so that ldmatrix finds 8 keys in 8 groups of banks.
constexpr int ROUNDED_SCALES = (SCALES_BYTES + 15) / 16 * 16;
constexpr int VALUES_BYTES = HEADS * HEAD_BYTES;
constexpr int K_SCALES_AT = VALUES_BYTES;
constexpr int V_AT = K_SCALES_AT + ROUNDED_SCALES;
constexpr int V_SCALES_AT = V_AT + VALUES_BYTES;
constexpr int KEY_STRIDE = ((V_SCALES_AT + ROUNDED_SCALES) / 16 | 1) * 16;
constexpr int STAGE_BYTES = KEY_TILE * KEY_STRIDE;

#if BULK_COPY && (__CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__))
constexpr bool BULK = true;
static_assert(COPY_ALIGN == 16, "bulk copies move multiples of 16 bytes");
#else
constexpr bool BULK = false;
#endif
constexpr bool WHOLE = HEADS == NUM_KV_HEADS && COPY_ALIGN == 16;
constexpr int FILL_ARRIVALS = FETCHERS * (BULK ? 1 : 32);  // at the barrier of a filled stage

// Consecutive bytes of a record, `from` and `to` from its starts. `first_head` of the block.
struct Run {
  int from, to, bytes;
};
constexpr int NUM_RUNS = WHOLE ? 1 : MXFP8 ? 4 : 2;
template <int RUN>
__device__ __forceinline__ Run record_run(int first_head) {
  constexpr int V_FROM = NUM_KV_HEADS * HEAD_BYTES + SCALES_BYTES;
  if (WHOLE) return {0, 0, RECORD_BYTES};
  if (RUN == 0) return {first_head * HEAD_BYTES, 0, VALUES_BYTES};
  if (RUN == 1) return {V_FROM + first_head * HEAD_BYTES, V_AT, VALUES_BYTES};
  if (RUN == 2) return {NUM_KV_HEADS * HEAD_BYTES, K_SCALES_AT, SCALES_BYTES};
  return {V_FROM + NUM_KV_HEADS * HEAD_BYTES, V_SCALES_AT, SCALES_BYTES};
}

// One lane's part of a run, every 32nd piece of COPY_ALIGN bytes.
template <int RUN>
__device__ __forceinline__ void copy_pieces(uint32_t to, const uint8_t* from, int first_head) {
  if constexpr (RUN < NUM_RUNS) {
    const Run run = record_run<RUN>(first_head);
#pragma unroll
    for (int i = threadIdx.x % 32 * COPY_ALIGN; i < run.bytes; i += 32 * COPY_ALIGN) {
      if constexpr (COPY_ALIGN >= 4) {
        copy_async<COPY_ALIGN>(to + run.to + i, from + run.from + i);
      } else {
#pragma unroll
        for (int b = 0; b < COPY_ALIGN; b++)
          store_shared_byte(to + run.to + i + b, __ldg(from + run.from + i + b));
      }
    }
  }
}
template <int RUN>
__device__ __forceinline__ void copy_run(uint32_t to, const uint8_t* from, int first_head,
                                         uint32_t barrier) {
  if constexpr (RUN < NUM_RUNS) {
    const Run run = record_run<RUN>(first_head);
    copy_bulk(to + run.to, from + run.from, run.bytes, barrier);
  }
}

// Zeros in place of the records of lost keys: lane i says whether key i is one.
__device__ __forceinline__ void clear_keys(uint32_t stage, bool lost) {
  const int lane = threadIdx.x % 32;
  const uint32_t keys = __ballot_sync(~0u, lost);
  for (int key = 0; key < KEY_TILE; key++) {
    if (!(keys >> key & 1)) continue;
    for (int i = lane * 16; i < KEY_STRIDE; i += 32 * 16)
      store_shared16(stage + key * KEY_STRIDE + i, make_uint4(0, 0, 0, 0));
  }
  if (BULK) fence_async_proxy();
  __syncwarp();
}

// Fills a stage: all lanes of each fetching warp. Lane i has the address of the record of key i,
// null for keys that nobody sees, whose bytes stay what they are, and for those of other fetchers.
// `filled` is the stage's barrier.
__device__ __forceinline__ void fill_stage(uint32_t stage, const uint8_t* record, int fetcher,
                                           int first_head, uint32_t filled) {
  const int lane = threadIdx.x % 32;
  if constexpr (BULK) {
    constexpr int BYTES = WHOLE ? RECORD_BYTES : 2 * (VALUES_BYTES + SCALES_BYTES);
    const uint32_t wanted = __ballot_sync(~0u, record != nullptr);
    if (lane == 0) barrier_expect(filled, __popc(wanted) * BYTES);
    __syncwarp();
    if (record == nullptr) return;
    const uint32_t to = stage + lane * KEY_STRIDE;
    copy_run<0>(to, record, first_head, filled);
    copy_run<1>(to, record, first_head, filled);
    copy_run<2>(to, record, first_head, filled);
    copy_run<3>(to, record, first_head, filled);
  } else {
    // Addresses of four keys at a time: each takes a shuffle, which is long to wait for alone.
    static_assert(KEY_TILE % (4 * FETCHERS) == 0, "a fetcher's keys come by the four");
#pragma unroll
    for (int first = 0; first < KEY_TILE; first += 4 * FETCHERS) {
      const uint8_t* from[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        from[i] = shuffle_address(record, first + i * FETCHERS + fetcher);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (from[i] == nullptr) continue;
        const uint32_t to = stage + (first + i * FETCHERS + fetcher) * KEY_STRIDE;
        copy_pieces<0>(to, from[i], first_head);
        copy_pieces<1>(to, from[i], first_head);
        copy_pieces<2>(to, from[i], first_head);
        copy_pieces<3>(to, from[i], first_head);
      }
    }
    if constexpr (COPY_ALIGN >= 4)
      arrive_after_copies(filled);
    else
      arrive_phase(filled);
  }
}
