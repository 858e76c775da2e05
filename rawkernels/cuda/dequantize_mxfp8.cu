// dequantize_mxfp8: E4M3 elements times the E8M0 scale of their block, as float32 or bf16.
// grid (div_ceil(num_blocks, WARPS * WARP_BLOCKS)); RAGGED: (div_ceil(num_blocks, WARPS)); block
//       128 threads
// in   values uint8 [num_rows, width]; scales uint8 [num_rows, blocks_per_row]
// out  out float32 or bf16 (OUT_BF16) [num_rows, width]; NaN for scale 0xFF and elements 0x7F, 0xFF
// needs width % 32 == 0, values at a multiple of 8 and out of 16 bytes, unless RAGGED
// bound by memory: 5.03 B an element to float32, four fifths of them written; 3.03 B to bf16. About
//       10 instructions an element against 34 or 20 that fit in the memory time. Two rounds a warp:
//       fewer have too few loads in flight, more spread the stores.
#include "dequantize_mxfp8_params.cuh"
#include "memory.cuh"
#include "mxfp8.cuh"

static_assert(RAGGED == 0 || RAGGED == 1, "RAGGED is a switch");
static_assert(OUT_BF16 == 0 || OUT_BF16 == 1, "out is float32 or bf16");
static_assert(sizeof(DequantizeParams) == PARAMS_BYTES, "the launcher's dtype");

constexpr int WARPS = 4;

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
  if (column >= p.width) return;
  float y = e4m3_decode(p.values[at]) * scale_value(p.scales[block]);
  if constexpr (OUT_BF16) {
    ((uint16_t*)p.out)[at] = float_bf16(y);
  } else {
    ((float*)p.out)[at] = y;
  }
}

#else

constexpr int LANE_ELEMENTS = OUT_BF16 ? 8 : 4;  // of a lane in one round: 16 bytes of results
constexpr int ROUNDS = 2;
constexpr int ROUND_BLOCKS = 32 * LANE_ELEMENTS / MX_BLOCK;
constexpr int WARP_BLOCKS = ROUNDS * ROUND_BLOCKS;
static_assert(WARP_BLOCKS <= 32, "a lane loads at most one scale");
static_assert(WARP_BLOCKS == LAUNCH_WARP_BLOCKS, "the launcher's grid");

typedef UnitOf<LANE_ELEMENTS>::type Unit;  // the elements of a lane
__device__ __forceinline__ uint32_t word_of(uint32_t unit, int) { return unit; }
__device__ __forceinline__ uint32_t word_of(uint2 unit, int i) { return i == 0 ? unit.x : unit.y; }

// 16 bytes of results.
__device__ __forceinline__ void to_bits(const float (&y)[4], uint32_t (&bits)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(y[i]);
}
__device__ __forceinline__ void to_bits(const float (&y)[8], uint32_t (&bits)[4]) {
  float sum = 0.0f;  // NaN where an element is
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bits[i] = pack_bf16(y[2 * i], y[2 * i + 1]);
    sum += y[2 * i] + y[2 * i + 1];
  }
  if (sum == sum) return;  // else the NaNs have to be BF16_NAN, which the instruction's are not
#pragma unroll
  for (int i = 0; i < 4; i++)
    bits[i] = (uint32_t)float_bf16(y[2 * i]) | (uint32_t)float_bf16(y[2 * i + 1]) << 16;
}

// Rows are whole blocks, so the array is one run of blocks.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
dequantize_mxfp8(const __grid_constant__ DequantizeParams p) {
  int lane = threadIdx.x % 32;
  int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * WARP_BLOCKS;
  if (first >= p.num_blocks) return;
  int left = (int)min(p.num_blocks - first, (int64_t)WARP_BLOCKS);  // blocks of this warp
  int64_t at = first * MX_BLOCK + lane * LANE_ELEMENTS;
  int block_of_lane = lane * LANE_ELEMENTS / MX_BLOCK;

  Unit raw[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    raw[r] = Unit{};
    if (r * ROUND_BLOCKS + block_of_lane < left)
      raw[r] = load_early((const Unit*)(p.values + at + r * 32 * LANE_ELEMENTS));
  }
  uint32_t code = lane < left ? p.scales[first + lane] : 0;

#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int block = r * ROUND_BLOCKS + block_of_lane;
    float scale = scale_value(__shfl_sync(0xFFFFFFFFu, code, block));
    if (block >= left) continue;
    float y[LANE_ELEMENTS];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++)
      y[i] = e4m3_decode((word_of(raw[r], i / 4) >> (8 * (i % 4))) & 0xFF) * scale;
    uint32_t bits[4];
    to_bits(y, bits);
    int64_t to = at + r * 32 * LANE_ELEMENTS;  // element
    *(uint4*)(p.out + to * (16 / LANE_ELEMENTS)) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
  }
}

#endif
