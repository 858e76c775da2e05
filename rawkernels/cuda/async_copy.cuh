// Barriers that count copies, and copies that pass by the registers, from sm_80 on; what else
// the grouped-query decode kernels need beside mma.cuh. What only sm_90 has is in hopper.cuh.
#pragma once
#include "hopper.cuh"

// Returns once the phase of this parity is complete. A waiter may be at most one phase behind.
__device__ __forceinline__ void wait_phase(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, parity);
#else
  asm volatile("{\n.reg .pred done;\nWAIT:\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra WAIT;\n}\n" ::"r"(barrier), "r"(parity)
               : "memory");
#endif
}
__device__ __forceinline__ void arrive_phase(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_arrive(barrier);
#else
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(
                   barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  fence_barrier_init();
#endif
}

// BYTES (4, 8 or 16) from global to shared memory; both addresses are multiples of it.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
}
// An arrival, once this thread's copies so far have landed; one of those that the barrier expects.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void store_shared_byte(uint32_t address, uint32_t byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}
// 1, 2 or 4 bytes of shared memory; the address is a multiple of it.
template <int BYTES>
__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t word;
  if constexpr (BYTES == 4)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  else if constexpr (BYTES == 2)
    asm volatile("{\n.reg .u16 h;\nld.shared.u16 h, [%1];\ncvt.u32.u16 %0, h;\n}\n"
                 : "=r"(word)
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// The address that a lane holds, to all lanes.
__device__ __forceinline__ const uint8_t* shuffle_address(const uint8_t* address, int lane) {
  return reinterpret_cast<const uint8_t*>(
      __shfl_sync(~0u, reinterpret_cast<uint64_t>(address), lane));
}
// An 8 x 8 matrix of 16-bit elements, row g, columns 2t, 2t + 1 in lane 4g + t, transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}
// Bytes FIRST and FIRST + 2 of a word, each sign-extended to 16 bits.
template <int FIRST>
__device__ __forceinline__ uint32_t sign_extend_every_second(uint32_t word) {
  uint32_t halves;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(halves) : "r"(word), "n"(FIRST ? 0xB391 : 0xA280));
  return halves;
}

// ---- launch order; on older devices kernels follow one another anyway

__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();
#endif
}
__device__ __forceinline__ void let_kernel_behind_start() {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();
#endif
}
