// The instructions of async_copy.cuh on the CPU, on top of hopper_on_host.hpp: copies land some time
// between their request and the moment when nothing else can move, in an order that the seed
// chooses, and shared memory is NaN meanwhile.
#pragma once
#include <memory>

#include "hopper_on_host.hpp"

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __uint_as_float(uint32_t bits) { return bits_float(bits); }
inline void __threadfence() {}
inline float __ldcg(const float* from) { return *from; }
inline uint32_t atomicAdd(uint32_t* to, uint32_t x) {
  const uint32_t before = *to;
  *to += x;
  return before;
}

inline void wait_phase(uint32_t barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void arrive_phase(uint32_t barrier) { barrier_arrive(barrier); }
inline void publish_barriers() {}
inline void wait_for_kernel_ahead() {}
inline void let_kernel_behind_start() {}

// Copies of a thread that have not landed, since its last arrival.
struct Batch { int left = 0; uint32_t barrier = 0; bool closed = false; };
inline std::shared_ptr<Batch> batches[HOST_THREADS];
inline void end_batch(const Batch& batch) {
  if (batch.closed && batch.left == 0) barrier_arrive(batch.barrier);
}
inline std::shared_ptr<Batch>& own_batch() {
  auto& batch = batches[threadIdx.x];
  if (!batch) batch = std::make_shared<Batch>();
  return batch;
}
template <int BYTES>
inline void copy_async(uint32_t to, const uint8_t* from) {
  CHECK(to % BYTES == 0 && uintptr_t(from) % BYTES == 0);
  std::memset(shared_at(to, BYTES), 0xFF, BYTES);
  auto batch = own_batch();
  batch->left++;
  copies.push_back([=] {
    std::memcpy(shared_at(to, BYTES), from, BYTES);
    batch->left--;
    end_batch(*batch);
  });
}
inline void arrive_after_copies(uint32_t barrier) {
  own_batch()->barrier = barrier, own_batch()->closed = true;
  end_batch(*own_batch());
  own_batch().reset();
}
inline void store_shared_byte(uint32_t address, uint32_t byte) { *shared_at(address, 1) = byte; }
template <int BYTES>
inline uint32_t load_shared_word(uint32_t address) {
  CHECK(address % BYTES == 0);
  uint32_t word = 0;
  std::memcpy(&word, shared_at(address, BYTES), BYTES);
  return word;
}

inline const uint8_t* shuffle_address(const uint8_t* address, int lane) {
  const auto bits = reinterpret_cast<uint64_t>(address);
  const uint64_t low = __shfl_sync(~0u, uint32_t(bits), lane);
  return reinterpret_cast<const uint8_t*>(
      low | uint64_t(__shfl_sync(~0u, uint32_t(bits >> 32), lane)) << 32);
}
inline uint32_t transpose_8x8(uint32_t word) {
  const Gathered all = gather(word);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t low = all.lane[8 * t + g / 2], high = all.lane[8 * t + 4 + g / 2];
  return (low >> 16 * (g % 2) & 0xFFFFu) | (high >> 16 * (g % 2)) << 16;
}
template <int FIRST>
inline uint32_t sign_extend_every_second(uint32_t word) {
  const int low = int8_t(word >> (8 * FIRST)), high = int8_t(word >> (8 * FIRST + 16));
  return uint32_t(uint16_t(low)) | uint32_t(uint16_t(high)) << 16;
}

inline void run_gqa_block(void (*kernel)(), unsigned block, int threads, unsigned seed) {
  chance.seed(seed);
  counted.clear();
  after_round = between_rounds;
  run_block(kernel, block, threads, seed);
  CHECK(copies.empty());
}
