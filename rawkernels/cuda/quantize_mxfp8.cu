// quantize_mxfp8: rows of float32 or bf16 to E4M3 elements and one E8M0 scale per 32 of them.
// grid (div_ceil(num_blocks, 32 * WARPS)); RAGGED: (div_ceil(num_blocks, WARPS)); block 64 threads
// in   x [num_rows, width] float32 or bf16 (X_BF16)
// out  values uint8 [num_rows, width]; scales uint8 [num_rows, blocks_per_row]
// needs width % 32 == 0 and x, values at multiples of 16 bytes, unless RAGGED
// bound by memory: 3.03 B an element from bf16, 5.03 B from float32. A warp has 2 or 4 KB of loads
//       in flight and about 10 instructions an element to issue, half of what the memory time
//       leaves. Small blocks keep the addresses in flight close together.
#include "memory.cuh"
#include "mxfp8.cuh"
#include "quantize_mxfp8_params.cuh"

static_assert(X_BF16 == 0 || X_BF16 == 1, "x is float32 or bf16");
static_assert(SCALE_CEIL == 0 || SCALE_CEIL == 1, "scale_rounding is floor or ceil");
static_assert(RAGGED == 0 || RAGGED == 1, "RAGGED is a switch");
static_assert(sizeof(QuantizeParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int WARPS = 2;

#if RAGGED

// One warp a block, one lane an element; the last block of a row may be short.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
quantize_mxfp8(const __grid_constant__ QuantizeParams p) {
  int lane = threadIdx.x % 32;
  int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (block >= p.num_blocks) return;
  int64_t row = block / p.blocks_per_row;
  int64_t column = (block - row * p.blocks_per_row) * MX_BLOCK + lane;
  int64_t at = row * p.width + column;
  bool inside = column < p.width;
  float x = 0.0f;
  if (inside) x = X_BF16 ? bf16_float(((const uint16_t*)p.x)[at]) : ((const float*)p.x)[at];

  uint32_t amax = max(float_bits(x) & ABS_MASK, __float_as_uint(p.amax_floor));
  amax = __reduce_max_sync(0xFFFFFFFFu, amax);
  uint32_t code = scale_code<SCALE_CEIL>(amax);
  bool is_nan = code == E8M0_NAN_BYTE;
  if (inside) p.values[at] = is_nan ? E4M3_NAN_BYTE : e4m3_encode(x * inverse_scale(code));
  if (lane == 0) p.scales[block] = (uint8_t)code;
}

#else

constexpr int ROUNDS = 4;                                  // chunks of 8 elements that a lane holds
constexpr int ROUND_BLOCKS = 32 / BLOCK_LANES;             // blocks of one round of a warp
constexpr int WARP_BLOCKS = ROUNDS * ROUND_BLOCKS;         // blocks of a warp
constexpr int CHUNK_UNITS = CHUNK * (X_BF16 ? 2 : 4) / 16;  // 16-byte loads of a chunk
static_assert(WARP_BLOCKS == 32, "each lane writes one scale");

__device__ __forceinline__ void unpack(const uint4 (&raw)[CHUNK_UNITS], float (&x)[CHUNK]) {
#pragma unroll
  for (int i = 0; i < CHUNK_UNITS; i++) {
    const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (X_BF16) {
        x[2 * j] = low_bf16(words[j]);
        x[2 * j + 1] = high_bf16(words[j]);
      } else {
        x[4 * i + j] = __uint_as_float(words[j]);
      }
    }
  }
}

// Rows are whole blocks, so the array is one run of blocks: block b is elements 32 b .. 32 b + 31.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
quantize_mxfp8(const __grid_constant__ QuantizeParams p) {
  int lane = threadIdx.x % 32;
  int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_BLOCKS;
  if (first >= p.num_blocks) return;
  int left = (int)min(p.num_blocks - first, (int64_t)WARP_BLOCKS);  // blocks of this warp
  int64_t at = first * MX_BLOCK + lane * CHUNK;  // element that this lane starts with

  // All loads first: the warp's whole share is in flight at once.
  uint4 raw[ROUNDS][CHUNK_UNITS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    bool inside = r * ROUND_BLOCKS + lane / BLOCK_LANES < left;
    const uint4* from = (const uint4*)p.x + (at + r * 32 * CHUNK) / CHUNK * CHUNK_UNITS;
#pragma unroll
    for (int i = 0; i < CHUNK_UNITS; i++) {
      raw[r][i] = make_uint4(0, 0, 0, 0);
      if (inside) raw[r][i] = load_early(from + i);
    }
  }

  uint32_t codes = 0;  // byte r: scale code of round r
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    float x[CHUNK];
    uint32_t words[2];
    unpack(raw[r], x);
    codes |= encode_chunk<SCALE_CEIL>(x, __float_as_uint(p.amax_floor), words) << (8 * r);
    if (r * ROUND_BLOCKS + lane / BLOCK_LANES < left)
      *(uint2*)(p.values + at + r * 32 * CHUNK) = make_uint2(words[0], words[1]);
  }

  // Lane l writes the scale of block l: byte l / 8 of the lanes that hold block l % 8 of a round.
  uint32_t packed = __shfl_sync(0xFFFFFFFFu, codes, lane % ROUND_BLOCKS * BLOCK_LANES);
  if (lane < left) p.scales[first + lane] = (uint8_t)(packed >> (8 * (lane / ROUND_BLOCKS)));
}

#endif
