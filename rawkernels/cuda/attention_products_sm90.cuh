// Warpgroup products of 64 x n x 16 for any n that window_attention uses, bf16 or fp16 operands,
// float32 sums, and boxes of three-dimensional tensor maps. hopper.cuh says how accumulators and
// operands lie; the inline PTX here is its continuation.
//
// product_keys: A and B in shared memory, rows of both along the contraction (S = Q K^T).
// product_values: A in registers; B in shared memory, its rows are the contraction (O = P V).
#pragma once
#include "hopper.cuh"

#if FP16
#define OPERAND "f16"
#else
#define OPERAND "bf16"
#endif

#define D8(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),     \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define D_8 D8(0)
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define D_16 D_8, D8(8)
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define D_24 D_16, D8(16)
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define D_32 D_24, D8(24)
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define D_40 D_32, D8(32)
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define D_48 D_40, D8(40)
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define D_56 D_48, D8(48)
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define D_64 D_56, D8(56)
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define D_72 D_64, D8(64)
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define D_80 D_72, D8(72)
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define D_88 D_80, D8(80)
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define D_96 D_88, D8(88)
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define D_104 D_96, D8(96)
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define D_112 D_104, D8(104)
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define D_120 D_112, D8(112)
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define D_128 D_120, D8(120)

#define STRING(x) #x
#define SHAPE(n) "wgmma.mma_async.sync.aligned.m64n" STRING(n) "k16.f32." OPERAND "." OPERAND
// R accumulators, then the operands' numbers in the instruction's list.
#define PRODUCT_KEYS(n, R, i0, i1, i2)                                                            \
  __device__ __forceinline__ void product_keys(float(&d)[R], uint32_t a, uint32_t b, int add) {   \
    asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #i2 ", 0;\n"               \
                 "mov.b64 a, {%" #i0 ", " DESCRIPTOR_HIGH "};\n"                                  \
                 "mov.b64 b, {%" #i1 ", " DESCRIPTOR_HIGH "};\n" SHAPE(n)                         \
                 " {" NAMES_##R "}, a, b, p, 1, 1, 0, 0;\n}\n"                                    \
                 : D_##R                                                                          \
                 : "r"(a), "r"(b), "r"(add));                                                     \
  }
#define PRODUCT_VALUES(n, R, i0, i1, i2, i3, i4, i5)                                              \
  __device__ __forceinline__ void product_values(float(&d)[R], uint32_t a0, uint32_t a1,          \
                                                 uint32_t a2, uint32_t a3, uint32_t b, int add) { \
    asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                  \
                 "mov.b64 b, {%" #i4 ", " DESCRIPTOR_HIGH "};\n" SHAPE(n)                         \
                 " {" NAMES_##R "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3                         \
                 "}, b, p, 1, 1, 1;\n}\n"                                                         \
                 : D_##R                                                                          \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(add));                         \
  }
PRODUCT_KEYS(32, 16, 16, 17, 18)
PRODUCT_KEYS(48, 24, 24, 25, 26)
PRODUCT_KEYS(64, 32, 32, 33, 34)
PRODUCT_KEYS(80, 40, 40, 41, 42)
PRODUCT_KEYS(96, 48, 48, 49, 50)
PRODUCT_KEYS(112, 56, 56, 57, 58)
PRODUCT_KEYS(128, 64, 64, 65, 66)
PRODUCT_KEYS(144, 72, 72, 73, 74)
PRODUCT_KEYS(160, 80, 80, 81, 82)
PRODUCT_KEYS(176, 88, 88, 89, 90)
PRODUCT_KEYS(192, 96, 96, 97, 98)
PRODUCT_VALUES(64, 32, 32, 33, 34, 35, 36, 37)
PRODUCT_VALUES(96, 48, 48, 49, 50, 51, 52, 53)
PRODUCT_VALUES(128, 64, 64, 65, 66, 67, 68, 69)
PRODUCT_VALUES(256, 128, 128, 129, 130, 131, 132, 133)
#undef PRODUCT_KEYS
#undef PRODUCT_VALUES
#undef SHAPE
#undef STRING

// ---- boxes: x runs along a head's values, y along heads, z along tokens

__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap* map, int x, int y, int z,
                                          uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}

// ---- arithmetic

// Returns once phase `phase` of the barrier, counted from 0, is complete. The phase after it must
// not be.
__device__ __forceinline__ void barrier_wait_phase(uint32_t barrier, uint32_t phase) {
  barrier_wait(barrier, phase & 1);
}
// The same number, of which the compiler knows nothing: what follows from it is computed where it
// is used and not kept in registers across a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// tanh, about 2^-11 of relative error.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Two operands of products in one word, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_operands(float low, float high) {
#if FP16
  return pack_fp16(low, high);
#else
  return pack_bf16(low, high);
#endif
}
