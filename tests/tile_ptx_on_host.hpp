// tile_ptx.cuh on the CPU, beside cuda_on_host.hpp. A copy lands at a moment that chance chooses
// between its start and the wait for its group, so that a missing wait shows as a wrong result, and
// so does a copy into what another warp still reads.
#pragma once
#include "cuda_on_host.hpp"

struct PendingCopy { uint8_t* to; const void* from; bool exists; };
struct CopyGroups { std::vector<std::vector<PendingCopy>> closed; std::vector<PendingCopy> open; };
inline CopyGroups copies[MAX_THREADS];
inline std::mt19937 copy_random(1);

inline void land(const PendingCopy& copy) {
  if (copy.exists)
    std::memcpy(copy.to, copy.from, 16);
  else
    std::memset(copy.to, 0, 16);
}
inline void copy_async_16(uint32_t to, const void* from, bool exists) {
  CHECK(to % 16 == 0 && to + 16 <= sizeof shared_bytes);
  CHECK(!exists || reinterpret_cast<uintptr_t>(from) % 16 == 0);
  const PendingCopy copy = {shared_bytes + to, from, exists};
  if (copy_random() % 4 == 0)
    land(copy);
  else
    copies[threadIdx.x].open.push_back(copy);
}
inline void commit_copies() {
  CopyGroups& mine = copies[threadIdx.x];
  mine.closed.push_back(std::move(mine.open));
  mine.open.clear();
}
template <int PENDING>
inline void wait_copies() {
  CopyGroups& mine = copies[threadIdx.x];
  while (mine.closed.size() > PENDING) {
    for (const PendingCopy& copy : mine.closed.front()) land(copy);
    mine.closed.erase(mine.closed.begin());
  }
}

// ---- float16, whose C++ type this compiler may not have

inline float fp16_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31)
    value = mantissa ? NAN : INFINITY;
  else
    value = std::ldexp(float(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
  return bits & 0x8000 ? -value : value;
}
inline uint16_t float_fp16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return 0x7FFF;
  const float a = std::fabs(x);
  if (a >= 65520.0f) return sign | 0x7C00;
  const int exponent = std::max(std::ilogb(std::max(a, 1e-30f)), -14);
  const float steps = std::nearbyint(std::ldexp(a, 10 - exponent));  // ties to even
  return sign | uint16_t(int(steps) + (exponent + 14) * 1024);  // a carry becomes an exponent
}
inline uint32_t pack_fp16(float low, float high) {
  return float_fp16(low) | uint32_t(float_fp16(high)) << 16;
}
inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments(d, a, b0, b1,
                     [](uint32_t word, int upper) { return fp16_float(word >> 16 * upper); });
}

inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void __syncwarp() { sync_warp(); }
template <typename T>
inline T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
