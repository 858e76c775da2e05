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

inline void __syncwarp() { sync_warp(); }
template <typename T>
inline T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
