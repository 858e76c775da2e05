// One thread block of a CUDA kernel on the CPU: every thread is a fiber, and what a warp or the
// block does together (barriers, shuffles, ldmatrix, mma) waits until all of its threads have come.
// Semantics of ldmatrix and mma are written from the PTX ISA, apart from the kernels. A warp runs
// as far as it can before the next one moves, in an order that the caller seeds, so that a missing
// barrier shows as a wrong result.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "common.cuh"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

struct Index { unsigned x; };
inline Index threadIdx, blockIdx;
#ifndef HOST_SHARED_BYTES
#define HOST_SHARED_BYTES (1 << 17)
#endif
alignas(1024) uint8_t shared_bytes[HOST_SHARED_BYTES];
using std::max;
using std::min;

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      std::fprintf(stderr, "%s:%d: %s (thread %u)\n", __FILE__, __LINE__, #condition, \
                   threadIdx.x); \
      std::abort(); \
    } \
  } while (0)

// ---- fibers

#ifndef HOST_THREADS
#define HOST_THREADS 256
#endif
constexpr int MAX_THREADS = HOST_THREADS, FIBER_BYTES = 256 << 10;
struct Barrier { int waiting = 0, turn = 0; };
inline ucontext_t scheduler, fibers[MAX_THREADS];
inline bool finished[MAX_THREADS];
inline Barrier block_barriers[16], warp_barriers[MAX_THREADS / 32];
inline int num_threads;
inline long arrivals;  // at barriers, and at the end: what a warp's progress is seen by

inline void wait_at(Barrier& barrier, int threads) {
  const int turn = barrier.turn;
  arrivals++;
  if (++barrier.waiting == threads) {
    barrier.waiting = 0, barrier.turn++;
    return;
  }
  const unsigned self = threadIdx.x;
  while (barrier.turn == turn) swapcontext(&fibers[self], &scheduler);
}
inline void __syncthreads() { wait_at(block_barriers[0], num_threads); }
inline void sync_warp() { wait_at(warp_barriers[threadIdx.x / 32], 32); }

inline void (*body)();
inline void (*after_round)(bool stuck);  // may be null; what else moves, such as copies
inline void run_fiber() {
  body();
  finished[threadIdx.x] = true;
  arrivals++;
}

// Runs `kernel` once as block `block` of `threads` threads; shared memory starts as NaN.
inline void run_block(void (*kernel)(), unsigned block, int threads, unsigned seed) {
  // Not zeroed: what no thread reaches takes no memory, of a library for each kernel of a test.
  static std::unique_ptr<char[]> stacks(new char[size_t(MAX_THREADS) * FIBER_BYTES]);
  std::memset(shared_bytes, 0xFF, sizeof shared_bytes);
  body = kernel, num_threads = threads, blockIdx.x = block;
  std::vector<int> warps(threads / 32);
  for (int w = 0; w < threads / 32; w++) warps[w] = w;
  for (int i = 0; i < threads; i++) {
    finished[i] = false;
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks.get() + size_t(i) * FIBER_BYTES;
    fibers[i].uc_stack.ss_size = FIBER_BYTES;
    fibers[i].uc_link = &scheduler;
    makecontext(&fibers[i], run_fiber, 0);
  }
  std::mt19937 random(seed);
  for (int left = threads; left > 0;) {
    const long before_round = arrivals;
    std::shuffle(warps.begin(), warps.end(), random);
    for (int w : warps) {
      for (long before = -1; before != arrivals;) {
        before = arrivals;
        for (int i = 32 * w; i < 32 * w + 32; i++) {
          if (finished[i]) continue;
          threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i]);
          left -= finished[i];
        }
      }
    }
    if (after_round) after_round(arrivals == before_round);
    CHECK(arrivals != before_round);  // else all wait for a barrier that some thread never reaches
  }
}

// ---- what lanes of a warp do together

struct WarpBoard { uint32_t words[32][6]; };
inline WarpBoard boards[MAX_THREADS / 32];

template <typename T>
inline T __shfl_xor_sync(uint32_t, T value, int mask) {
  WarpBoard& board = boards[threadIdx.x / 32];
  std::memcpy(board.words[threadIdx.x % 32], &value, sizeof value);
  sync_warp();
  T other;
  std::memcpy(&other, board.words[(threadIdx.x % 32) ^ mask], sizeof other);
  sync_warp();
  return other;
}
inline bool __any_sync(uint32_t, bool here) {
  WarpBoard& board = boards[threadIdx.x / 32];
  board.words[threadIdx.x % 32][0] = here;
  sync_warp();
  bool any = false;
  for (auto& lane : board.words) any |= lane[0] != 0;
  sync_warp();
  return any;
}

inline uint32_t shared_address(const void* object) {
  return uint32_t(static_cast<const uint8_t*>(object) - shared_bytes);
}
inline void named_barrier(int id, int threads) {
  CHECK(id >= 1 && id < 16 && threads % 32 == 0);
  wait_at(block_barriers[id], threads);
}

// Fills `rows` with the addresses of the 32 rows; checks what the hardware asks for, and that the 8
// rows of a matrix lie in 8 groups of banks, without which ldmatrix takes several passes.
inline void gather_rows(uint32_t address, const uint8_t* (&rows)[32]) {
  WarpBoard& board = boards[threadIdx.x / 32];
  CHECK(address % 16 == 0 && address + 16 <= sizeof shared_bytes);
  board.words[threadIdx.x % 32][0] = address;
  sync_warp();
  for (int i = 0; i < 32; i++) rows[i] = shared_bytes + board.words[i][0];
  for (int i = 0; i < 32; i++)
    for (int j = i + 1; j < (i / 8 + 1) * 8; j++)
      CHECK((board.words[i][0] / 16 - board.words[j][0] / 16) % 8 != 0);
  sync_warp();
}
inline uint16_t element(const uint8_t* row, int i) {
  uint16_t bits;
  std::memcpy(&bits, row + 2 * i, 2);
  return bits;
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const uint8_t* rows[32];
  gather_rows(address, rows);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int m = 0; m < 4; m++)
    r[m] = element(rows[8 * m + g], 2 * t) | uint32_t(element(rows[8 * m + g], 2 * t + 1)) << 16;
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const uint8_t* rows[32];
  gather_rows(address, rows);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int m = 0; m < 4; m++)
    r[m] = element(rows[8 * m + 2 * t], g) | uint32_t(element(rows[8 * m + 2 * t + 1], g)) << 16;
}

inline float half_of(uint32_t word, int upper) {
  return bf16_float(uint16_t(upper ? word >> 16 : word));
}
// d += a b, fragments as in mma.cuh; value(word, upper) is an element of a pair.
template <typename Value>
inline void multiply_fragments(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                               Value value) {
  WarpBoard& board = boards[threadIdx.x / 32];
  uint32_t* own = board.words[threadIdx.x % 32];
  for (int i = 0; i < 4; i++) own[i] = a[i];
  own[4] = b0, own[5] = b1;
  sync_warp();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const uint32_t from_a = board.words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const uint32_t from_b = board.words[column * 4 + k % 8 / 2][4 + k / 8];
      sum += double(value(from_a, k % 2)) * value(from_b, k % 2);
    }
    d[i] = float(sum);
  }
  sync_warp();
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments(d, a, b0, b1, half_of);
}
inline float fp16_value(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}
inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments(d, a, b0, b1,
                     [](uint32_t word, int upper) { return fp16_value(word >> 16 * upper); });
}

// ---- arithmetic and memory of one lane

inline uint32_t pack_bf16(float low, float high) {
  return float_bf16(low) | uint32_t(float_bf16(high)) << 16;
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
inline uint32_t pack_fp16(float low, float high) {
  const _Float16 halves[2] = {_Float16(low), _Float16(high)};
  uint32_t word;
  std::memcpy(&word, halves, 4);
  return word;
}
template <int HALF>
inline uint32_t sign_extend_bytes(uint32_t word) {
  const int low = int8_t(word >> (16 * HALF)), high = int8_t(word >> (16 * HALF + 8));
  return uint32_t(uint16_t(low)) | uint32_t(uint16_t(high)) << 16;
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
template <typename T>
inline T __ldg(const T* from) {
  CHECK(reinterpret_cast<uintptr_t>(from) % sizeof(T) == 0);
  return *from;
}
inline float __int_as_float(int32_t bits) { return bits_float(uint32_t(bits)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __double2float_rn(double a) { return float(a); }
