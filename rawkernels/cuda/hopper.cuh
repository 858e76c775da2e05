// The instructions that only sm_90a has: barriers that count bytes, bulk and tensor copies,
// products of a whole warpgroup, the split of registers, dependent launch. The inline PTX of the
// Hopper kernels is here and in mma.cuh and nowhere else.
//
// A barrier is given by the shared-memory address of its 8 bytes, a tile by that of its first byte.
// Copies read and write shared memory through another path than ordinary loads and stores (the
// async proxy), and so do the warpgroup products: what ordinary stores wrote is seen by them after
// `fence_async_proxy` in the storing threads and a barrier.
#pragma once
#include "mma.cuh"

constexpr int WARPGROUP_THREADS = 128;

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init and before the __syncthreads behind which the barriers are used.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival that also announces `bytes` of copies (0 is allowed).
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity is complete. A waiter may be at most one phase behind.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred done;\nWAIT:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra WAIT;\n}\n" ::"r"(barrier), "r"(parity)
               : "memory");
}

// A __syncwarp that the assembler moves no stores across: it keeps the order that is written.
__device__ __forceinline__ void warp_barrier() {
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}

// ---- copies

// A CUtensorMap, made by the driver; kernels take it by value in a __grid_constant__ struct.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// `bytes`, a multiple of 16, from global to shared memory; both addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Asks for `bytes`, a multiple of 16, to be brought into L2.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// The map's box at column x, row y, from global to shared memory.
__device__ __forceinline__ void copy_tile(uint32_t to, const TensorMap* map, int x, int y,
                                          uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(x), "r"(y), "r"(barrier)
               : "memory");
}
// The other way; `commit_stores` closes the group that the wait functions below count.
__device__ __forceinline__ void store_tile(const TensorMap* map, int x, int y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                   map),
               "r"(x), "r"(y), "r"(from)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// This thread's stores have left shared memory, so that it may be written again.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// This thread's stores are in global memory.
__device__ __forceinline__ void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- ordinary shared memory, by address

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
// Four 8 x 8 matrices of 16-bit elements, as ldmatrix_x4 reads them.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// ---- products of a warpgroup: bf16 operands, float32 sums
//
// Accumulators of a 64 x n product, with warp w of the warpgroup, g = lane / 4, t = lane % 4:
// d[4j], d[4j + 1] are row 16w + g, columns 8j + 2t, 8j + 2t + 1; d[4j + 2], d[4j + 3] row 16w + g
// + 8. An A operand in registers is laid out as mma.m16n8k16's, row 16w + g.
//
// Operands in shared memory are slabs of 64 columns, `rows` of 128 bytes each, 1024-byte aligned,
// the 16-byte chunk c of row r at chunk c ^ (r % 8). A slab address may be moved on by 32 bytes for
// the next 16 columns, or by whole rows.

// Low word of an operand's descriptor. `next_slab`: bytes to the next 64 columns, for operands
// whose columns are the product's columns; the others do not use it. Opaque, so that the compiler
// does not keep dozens of descriptors in registers.
__device__ __forceinline__ uint32_t descriptor(uint32_t address, uint32_t next_slab = 16) {
  uint32_t low = ((address & 0x3FFFF) >> 4) | ((next_slab >> 4) << 16);
  asm volatile("" : "+r"(low));
  return low;
}
__device__ constexpr uint32_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the newest PENDING groups are complete.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Accumulators may be read from here on, and not before.
template <int N>
__device__ __forceinline__ void products_ready(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// High word of every descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows.
#define DESCRIPTOR_HIGH "0x40000040"
#define D8(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),     \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define D64 D8(0), D8(8), D8(16), D8(24), D8(32), D8(40), D8(48), D8(56)
#define D68 D64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define NAMES_64                                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "    \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "    \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "    \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_68 NAMES_64 ", %64, %65, %66, %67"

// d (+)= A B^T, 64 x 136 x 16: A and B in shared memory, rows of both along the contraction.
__device__ __forceinline__ void product_qk(float (&d)[68], uint32_t a, uint32_t b, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %70, 0;\n"
               "mov.b64 a, {%68, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%69, " DESCRIPTOR_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n136k16.f32.bf16.bf16 {" NAMES_68
               "}, a, b, p, 1, 1, 0, 0;\n}\n"
               : D68
               : "r"(a), "r"(b), "r"(add));
}
// The same with A in registers.
__device__ __forceinline__ void product_qk(float (&d)[68], const uint32_t (&a)[4], uint32_t b,
                                           int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %73, 0;\n"
               "mov.b64 b, {%72, " DESCRIPTOR_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n136k16.f32.bf16.bf16 {" NAMES_68
               "}, {%68, %69, %70, %71}, b, p, 1, 1, 0;\n}\n"
               : D68
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));
}
// d (+)= A B, 64 x 128 x 16: A in registers; B in shared memory, its rows are the contraction.
__device__ __forceinline__ void product_pv(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\n"
               "mov.b64 b, {%68, " DESCRIPTOR_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64
               "}, {%64, %65, %66, %67}, b, p, 1, 1, 1;\n}\n"
               : D64
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(add));
}
#undef D8
#undef D64
#undef D68
#undef NAMES_64
#undef NAMES_68

// ---- registers and launch order

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// Where a launch may start before the kernel ahead of it has ended: returns once that kernel's
// writes are there. Elsewhere it returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next kernel may start on what this one leaves free. Only after wait_for_previous_kernel: then
// whatever starts early can rely on all kernels but this one.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
