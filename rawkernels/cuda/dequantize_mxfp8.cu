// dequantize_mxfp8: E4M3 elements times the E8M0 scale of their block, as float32.
// grid (div_ceil(num_blocks, 32 * WARPS)); RAGGED: (div_ceil(num_blocks, WARPS)); block 256 threads
// in   values uint8 [num_rows, width]; scales uint8 [num_rows, blocks_per_row]
// out  out float32 [num_rows, width]; NaN for scale 0xFF and for elements 0x7F, 0xFF
// needs width % 32 == 0, values at a multiple of 4 and out of 16 bytes, unless RAGGED
// bound by memory: 5.03 B an element, four fifths of them written; about 10 instructions an element
//       against 34 that fit in the memory time
#include "dequantize_mxfp8_params.cuh"
#include "memory.cuh"
#include "mxfp8.cuh"

static_assert(RAGGED == 0 || RAGGED == 1, "RAGGED is a switch");
static_assert(sizeof(DequantizeParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int WARPS = 8;

#if RAGGED

// One warp a block, one lane an element; the last block of a row may be short.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
dequantize_mxfp8(const __grid_constant__ DequantizeParams p) {
  int lane = threadIdx.x % 32;
  int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  if (block >= p.num_blocks) return;
  int64_t row = block / p.blocks_per_row;
  int64_t column = (block - row * p.blocks_per_row) * MX_BLOCK + lane;
  int64_t at = row * p.width + column;
  if (column < p.width) p.out[at] = e4m3_decode(p.values[at]) * scale_value(p.scales[block]);
}

#else

constexpr int WORD = 4;                         // elements of a lane in one round: one word in
constexpr int ROUND_BLOCKS = 32 * WORD / MX_BLOCK;
constexpr int WARP_BLOCKS = 32;                 // so that each lane loads one scale
constexpr int ROUNDS = WARP_BLOCKS / ROUND_BLOCKS;
static_assert(ROUND_BLOCKS * ROUNDS == WARP_BLOCKS, "whole rounds");

// Rows are whole blocks, so the array is one run of blocks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
dequantize_mxfp8(const __grid_constant__ DequantizeParams p) {
  int lane = threadIdx.x % 32;
  int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_BLOCKS;
  if (first >= p.num_blocks) return;
  int left = (int)min(p.num_blocks - first, (int64_t)WARP_BLOCKS);  // blocks of this warp
  int64_t at = first * MX_BLOCK + lane * WORD;
  int block_of_lane = lane * WORD / MX_BLOCK;

  uint32_t words[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    words[r] = 0;
    if (r * ROUND_BLOCKS + block_of_lane < left)
      words[r] = load_once((const uint32_t*)(p.values + at + r * 32 * WORD));
  }
  uint32_t code = lane < left ? p.scales[first + lane] : 0;

#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int block = r * ROUND_BLOCKS + block_of_lane;
    float scale = scale_value(__shfl_sync(0xFFFFFFFFu, code, block));
    if (block >= left) continue;
    float4 y;
    y.x = e4m3_decode(words[r] & 0xFF) * scale;
    y.y = e4m3_decode((words[r] >> 8) & 0xFF) * scale;
    y.z = e4m3_decode((words[r] >> 16) & 0xFF) * scale;
    y.w = e4m3_decode(words[r] >> 24) * scale;
    *(float4*)(p.out + at + r * 32 * WORD) = y;
  }
}

#endif
