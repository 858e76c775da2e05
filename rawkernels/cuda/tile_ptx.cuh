// Asynchronous copies to shared memory from sm_80 on, in groups, which attention over plain arrays
// needs beside mma.cuh.
#pragma once
#include "mma.cuh"

// Starts a copy of 16 bytes to shared memory, both aligned to 16; writes 16 zeros, and reads
// nothing, where `exists` is false. It belongs to the group that the thread commits next.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, bool exists) {
  const int size = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size)
               : "memory");
}

// Closes the group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's newest groups are under way; a barrier must follow
// before other threads' copies are read.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
