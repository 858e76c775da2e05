// The instructions of hopper.cuh on the CPU, on top of cuda_on_host.hpp. Copies land some time
// between their request and the moment when nothing else can move, in an order that the seed
// chooses; a warp's products happen some time between their commit and its own wait. What is to be
// written, and what has been sent off, is NaN meanwhile. So a slot released too early, a wait left
// out or a barrier's wrong count shows as a wrong result, a refused phase or a standstill.
// Not played: fences, bank conflicts, two threads' stores meeting in one place.
#pragma once
#ifndef HOST_THREADS
#define HOST_THREADS 384
#endif
#define HOST_SHARED_BYTES SHARED_BYTES
#include <functional>
#include <map>

#include "cuda_on_host.hpp"

constexpr int WARPGROUP_THREADS = 128;
inline Index gridDim;
struct int2 { int x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline std::mt19937 chance;

inline void yield() {
  const unsigned self = threadIdx.x;
  swapcontext(&fibers[self], &scheduler);
}

// ---- lanes of a warp

// What all 32 lanes bring, once they have all come.
struct Gathered { uint32_t lane[32]; };
inline Gathered gather(uint32_t value) {
  WarpBoard& board = boards[threadIdx.x / 32];
  board.words[threadIdx.x % 32][0] = value;
  sync_warp();
  Gathered all;
  for (int i = 0; i < 32; i++) all.lane[i] = board.words[i][0];
  sync_warp();
  return all;
}
template <typename T>
inline T __shfl_sync(uint32_t, T value, int lane) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = gather(bits).lane[lane % 32];
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __ballot_sync(uint32_t, bool here) {
  const Gathered all = gather(here);
  uint32_t votes = 0;
  for (int i = 0; i < 32; i++) votes |= all.lane[i] << i;
  return votes;
}
inline int __reduce_max_sync(uint32_t, int value) {
  const Gathered all = gather(uint32_t(value));
  for (uint32_t other : all.lane) value = max(value, int(other));
  return value;
}
inline void __syncwarp() { sync_warp(); }
inline void warp_barrier() { sync_warp(); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline uint32_t atomicOr(uint32_t* to, uint32_t bits) {
  const uint32_t before = *to;
  *to |= bits;
  return before;
}
inline uint32_t __float_as_uint(float x) { return float_bits(x); }
inline float __log2f(float x) { return std::log2(x); }

// ---- barriers

struct CountedBarrier {
  int expected = 0, pending = 0;
  long bytes = 0, phase = 0;
  std::map<unsigned, long> waits;  // by thread: phases it has seen end, less the barrier's
  void settle() {
    CHECK(pending >= 0);
    if (pending == 0 && bytes == 0) phase++, pending = expected, arrivals++;
  }
};
inline std::map<uint32_t, CountedBarrier> counted;
inline CountedBarrier& counted_at(uint32_t address) {
  CHECK(counted.count(address));
  return counted[address];
}
inline void barrier_init(uint32_t address, uint32_t count) {
  CHECK(address % 8 == 0 && !counted.count(address));
  counted[address].expected = counted[address].pending = int(count);
}
inline void fence_barrier_init() {}
inline void barrier_expect(uint32_t address, uint32_t bytes) {
  CountedBarrier& barrier = counted_at(address);
  barrier.bytes += bytes, barrier.pending--;
  barrier.settle();
}
inline void barrier_arrive(uint32_t address) {
  CountedBarrier& barrier = counted_at(address);
  barrier.pending--;
  barrier.settle();
}
inline void barrier_wait(uint32_t address, uint32_t parity) {
  CountedBarrier& barrier = counted_at(address);
  while ((barrier.phase & 1) == parity) yield();
  // Each thread waits once a phase, so the difference stays what it was at its first wait.
  const auto [seen, first] = barrier.waits.try_emplace(threadIdx.x, barrier.phase);
  CHECK(first || seen->second + 1 == barrier.phase);
  seen->second = barrier.phase;
}

// The same for a barrier of which not every thread sees every phase: `phase` counts from 0, and one
// more may be complete by now, but not two. ~0 is before the first.
inline void barrier_wait_phase(uint32_t address, uint32_t phase) {
  const CountedBarrier& barrier = counted_at(address);
  if (phase == ~0u) return;
  CHECK(barrier.phase == long(phase) || barrier.phase == long(phase) + 1);
  while (barrier.phase == long(phase)) yield();
  CHECK(barrier.phase == long(phase) + 1);
}

// ---- copies

// Here: address, rows, columns, rows of a box.
struct alignas(64) TensorMap { uint64_t words[16]; };
inline std::vector<std::function<void()>> copies;
inline int unread_stores[HOST_THREADS];
inline void deliver_one() {
  const size_t i = chance() % copies.size();
  const auto copy = copies[i];
  copies.erase(copies.begin() + long(i));
  copy();
  arrivals++;
}
inline int late_warps;  // lanes of warps whose products are late: they move again by themselves
inline void between_rounds(bool stuck) {
  if (late_warps > 0) arrivals++, stuck = false;
  while (!copies.empty() && (stuck || chance() % 4 == 0)) deliver_one(), stuck = false;
}
inline uint8_t* shared_at(uint32_t address, uint32_t bytes) {
  CHECK(address + bytes <= sizeof shared_bytes);
  return shared_bytes + address;
}
inline void complete(uint32_t barrier, uint32_t bytes) {
  counted_at(barrier).bytes -= bytes;
  counted_at(barrier).settle();
}
inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  CHECK(bytes > 0 && bytes % 16 == 0 && to % 16 == 0 && uintptr_t(from) % 16 == 0);
  std::memset(shared_at(to, bytes), 0xFF, bytes);
  copies.push_back([=] {
    std::memcpy(shared_at(to, bytes), from, bytes);
    complete(barrier, bytes);
  });
}
constexpr int BOX_ROW_BYTES = 128;
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
// Moves a box of a tensor map, 16 bytes at a time, one way or the other.
inline void move_box(const TensorMap& map, int x, int y, uint32_t shared, bool to_shared) {
  for (uint32_t at = 0; at < map.words[3] * BOX_ROW_BYTES; at += 16) {
    uint8_t* global = reinterpret_cast<uint8_t*>(map.words[0]);
    global += ((y + at / BOX_ROW_BYTES) * map.words[2] + x) * 2 + at % BOX_ROW_BYTES;
    uint8_t* local = shared_at(swizzled(shared + at), 16);
    std::memcpy(to_shared ? local : global, to_shared ? global : local, 16);
  }
}
inline void check_box(const TensorMap& map, int x, int y, uint32_t shared) {
  CHECK(shared % 1024 == 0 && x >= 0 && y >= 0);
  CHECK(x + BOX_ROW_BYTES / 2 <= long(map.words[2]) && y + map.words[3] <= map.words[1]);
}
inline void prefetch_tensor_map(const TensorMap*) {}
inline void copy_tile(uint32_t to, const TensorMap* given, int x, int y, uint32_t barrier) {
  const TensorMap map = *given;
  const uint32_t bytes = uint32_t(map.words[3]) * BOX_ROW_BYTES;
  check_box(map, x, y, to);
  std::memset(shared_at(to, bytes), 0xFF, bytes);
  copies.push_back([=] {
    move_box(map, x, y, to, true);
    complete(barrier, bytes);
  });
}
inline void store_tile(const TensorMap* given, int x, int y, uint32_t from) {
  const TensorMap map = *given;
  const unsigned thread = threadIdx.x;
  check_box(map, x, y, from);
  unread_stores[thread]++;
  copies.push_back([=] {
    move_box(map, x, y, from, false);
    std::memset(shared_at(from, uint32_t(map.words[3]) * BOX_ROW_BYTES), 0xFF, 128);
    unread_stores[thread]--;
  });
}
// Boxes of arrays [tokens, heads, columns]; here: address, columns, heads, tokens, heads and tokens
// of a box. What lies outside reads as zeros and is not written.
inline uint32_t box_bytes(const TensorMap& map) {
  return uint32_t(map.words[4] * map.words[5]) * BOX_ROW_BYTES;
}
inline void move_head_box(const TensorMap& map, int x, int y, int z, uint32_t shared,
                          bool to_shared) {
  const long columns = long(map.words[1]), heads = long(map.words[2]), box_heads = map.words[4];
  for (uint32_t at = 0; at < box_bytes(map); at += 16) {
    const long row = at / BOX_ROW_BYTES, column = x + at % BOX_ROW_BYTES / 2;
    const long head = y + row % box_heads, token = z + row / box_heads;
    const bool inside =
        column < columns && head < heads && token >= 0 && token < long(map.words[3]);
    uint8_t* global = reinterpret_cast<uint8_t*>(map.words[0]);
    global += ((token * heads + head) * columns + column) * 2;
    uint8_t* local = shared_at(swizzled(shared + at), 16);
    if (inside) std::memcpy(to_shared ? local : global, to_shared ? global : local, 16);
    else if (to_shared) std::memset(local, 0, 16);
  }
}
inline void copy_box(uint32_t to, const TensorMap* given, int x, int y, int z, uint32_t barrier) {
  const TensorMap map = *given;
  CHECK(to % 1024 == 0 && x >= 0 && y >= 0);
  std::memset(shared_at(to, box_bytes(map)), 0xFF, box_bytes(map));
  copies.push_back([=] {
    move_head_box(map, x, y, z, to, true);
    complete(barrier, box_bytes(map));
  });
}
inline void store_box(const TensorMap* given, int x, int y, int z, uint32_t from) {
  const TensorMap map = *given;
  const unsigned thread = threadIdx.x;
  CHECK(from % 1024 == 0 && x >= 0 && y >= 0 && z >= 0);
  unread_stores[thread]++;
  copies.push_back([=] {
    move_head_box(map, x, y, z, from, false);
    std::memset(shared_at(from, box_bytes(map)), 0xFF, box_bytes(map));
    unread_stores[thread]--;
  });
}
inline void commit_stores() {}
inline void wait_stores_read() { while (unread_stores[threadIdx.x] > 0) yield(); }
inline void wait_stores_done() { wait_stores_read(); }
inline void fence_async_proxy() {}

// ---- shared memory by address

inline uint4 load_shared16(uint32_t address) {
  CHECK(address % 16 == 0);
  uint4 value;
  std::memcpy(&value, shared_at(address, 16), 16);
  return value;
}
inline uint32_t load_shared_byte(uint32_t address) { return *shared_at(address, 1); }
inline void store_shared16(uint32_t address, uint4 value) {
  CHECK(address % 16 == 0);
  std::memcpy(shared_at(address, 16), &value, 16);
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint8_t* rows[32];
  gather_rows(address, rows);
  const uint32_t r[4] = {r0, r1, r2, r3};
  for (int m = 0; m < 4; m++)
    std::memcpy(const_cast<uint8_t*>(rows[8 * m + threadIdx.x % 32 / 4]) + threadIdx.x % 4 * 4,
                &r[m], 4);
}

// ---- products: each warp computes its own 16 rows

inline uint32_t descriptor(uint32_t address, uint32_t next_slab = 16) {
  return (address & 0x3FFFF) >> 4 | next_slab >> 4 << 16;
}
constexpr uint32_t descriptor_step(uint32_t bytes) { return bytes >> 4; }
struct Product {
  int columns, add;
  bool rows_are_keys;  // B's rows run along the contraction
  uint32_t a_shared, b;
  float* d[32];
  uint32_t a[32][4];
};
struct WarpProducts {
  Product next;
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;
};
inline WarpProducts warp_products[HOST_THREADS / 32];
// Operands are bf16, or fp16 in a build with FP16.
#if FP16
inline float operand_float(uint16_t bits) { return fp16_value(bits); }
inline uint32_t pack_operands(float low, float high) { return pack_fp16(low, high); }
#else
inline float operand_float(uint16_t bits) { return bf16_float(bits); }
inline uint32_t pack_operands(float low, float high) { return pack_bf16(low, high); }
#endif
inline float shared_operand(uint32_t address) {
  return operand_float(element(shared_at(swizzled(address), 2), 0));
}
inline int opaque(int x) { return x; }
inline float tanh_approx(float x) { return std::tanh(x); }
inline void compute(const Product& o, int warp) {
  static float a[16][16], b[16][256];
  const uint32_t slab = (o.b & 0x3FFF) << 4, next_slab = o.b >> 16 << 4;
  const uint32_t rows = ((o.a_shared & 0x3FFF) << 4) + warp % 4 * 16 * BOX_ROW_BYTES;
  for (int k = 0; k < 16; k++) {
    for (int m = 0; m < 16; m++)
      a[m][k] = o.a_shared ? shared_operand(rows + m * BOX_ROW_BYTES + 2 * k)
                           : operand_float(uint16_t(
                                 o.a[m % 8 * 4 + k % 8 / 2][m / 8 + 2 * (k / 8)] >> 16 * (k % 2)));
    for (int n = 0; n < o.columns; n++)
      b[k][n] = shared_operand(o.rows_are_keys
                                ? slab + n / 64 * next_slab + k * BOX_ROW_BYTES + n % 64 * 2
                                : slab + n * BOX_ROW_BYTES + 2 * k);
  }
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < o.columns / 2; i++) {
      const int m = lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      double sum = o.add ? o.d[lane][i] : 0.0;
      for (int k = 0; k < 16; k++) sum += double(a[m][k]) * b[k][n];
      o.d[lane][i] = float(sum);
    }
  }
}
inline void compute_oldest(WarpProducts& products, int warp) {
  for (const Product& o : products.groups.front()) compute(o, warp);
  products.groups.erase(products.groups.begin());
}
inline void issue(float* d, int columns, bool rows_are_keys, uint32_t a_shared,
                  const uint32_t (&a)[4], uint32_t b, int add) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Product& o = warp_products[warp].next;
  o.columns = columns, o.add = add, o.rows_are_keys = rows_are_keys, o.a_shared = a_shared, o.b = b;
  o.d[lane] = d;
  for (int i = 0; i < 4; i++) o.a[lane][i] = a[i];
  for (uint32_t other : gather(b).lane) CHECK(other == b);
  if (lane == 31) warp_products[warp].open.push_back(o);
  sync_warp();
}
inline void products_begin() {}
inline void products_commit() {
  WarpProducts& products = warp_products[threadIdx.x / 32];
  sync_warp();
  if (threadIdx.x % 32 == 0) {
    products.groups.push_back(products.open);
    products.open.clear();
    while (!products.groups.empty() && chance() % 2 == 0)
      compute_oldest(products, threadIdx.x / 32);
  }
  sync_warp();
}
template <size_t PENDING>
inline void products_wait() {
  WarpProducts& products = warp_products[threadIdx.x / 32];
  const int late = gather(chance() % 3).lane[0];
  late_warps++;
  for (int i = 0; i < late; i++) yield();
  late_warps--;
  while (threadIdx.x % 32 == 0 && products.groups.size() > PENDING)
    compute_oldest(products, threadIdx.x / 32);
  sync_warp();
}
template <int N>
inline void products_ready(float (&)[N]) {}
inline void product_qk(float (&d)[68], uint32_t a, uint32_t b, int add) {
  issue(d, 136, false, a, {0, 0, 0, 0}, b, add);
}
inline void product_qk(float (&d)[68], const uint32_t (&a)[4], uint32_t b, int add) {
  issue(d, 136, false, 0, a, b, add);
}
inline void product_pv(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                       uint32_t b, int add) {
  issue(d, 128, true, 0, {a0, a1, a2, a3}, b, add);
}
template <int R>
inline void product_keys(float (&d)[R], uint32_t a, uint32_t b, int add) {
  issue(d, 2 * R, false, a, {0, 0, 0, 0}, b, add);
}
template <int R>
inline void product_values(float (&d)[R], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b, int add) {
  issue(d, 2 * R, true, 0, {a0, a1, a2, a3}, b, add);
}

// ---- registers, launch order, a block

template <int REGISTERS>
inline void give_registers() {}
template <int REGISTERS>
inline void take_registers() {}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

inline void run_hopper_block(void (*kernel)(), unsigned block, unsigned blocks, unsigned seed) {
  chance.seed(seed);
  counted.clear();
  gridDim.x = blocks;
  after_round = between_rounds;
  run_block(kernel, block, HOST_THREADS, seed);
  CHECK(copies.empty());
}
