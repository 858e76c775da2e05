// window_decode: query tokens against the newest keys of their sequences' rings, latent heads.
// grid (num_tokens * head_tiles); block NUM_THREADS: 2, 4 or 8 warps for HEAD_TILE 16, 32 or 64
// in   slab uint8 [num_state_slots * slot_bytes], flat; q bf16 [num_tokens, num_q_heads, HEAD_DIM]
//      offset_len int32 [num_tokens, 2]; positions int32 [num_tokens], read where ROPE_DIMS > 0
// out  out bf16 [num_tokens, num_q_heads, HEAD_DIM]; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream; sm_80 or later; no visible key gives out 0 and
//      lse -inf, and so does an offset_len that points outside the slab
// bound by shared memory: each tile of 32 keys is read once a product by each row of warps
#include "attention_tile.cuh"
#include "window_decode_params.cuh"

static_assert(sizeof(WindowDecodeParams) == PARAMS_BYTES, "the launcher packs another struct");

// The keys of a token: `length` records from row `offset` on, wrapping at the end of their ring.
__device__ __forceinline__ KeyRuns ring_runs(const WindowDecodeParams& p, int token) {
  const int offset = p.offset_len[2 * static_cast<int64_t>(token)];
  int length = p.offset_len[2 * static_cast<int64_t>(token) + 1];
  KeyRuns runs = {};
  if (length <= 0 || offset < 0 || offset >= p.num_rows) return runs;
  if (length > p.ring_len) length = p.ring_len;

  const int first = offset % p.ring_len;
  const uint8_t* slot = p.slab + offset / p.ring_len * p.slot_bytes;
  const uint8_t* values = slot + p.value_offset;
  const uint8_t* scales = slot + p.scale_offset;
  runs.values[0] = values + first * int64_t(VALUE_STRIDE);
  runs.scales[0] = scales + first * int64_t(SCALE_STRIDE);
  runs.values[1] = values;
  runs.scales[1] = scales;
  runs.first_length = p.ring_len - first;
  runs.length = length;
  return runs;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
window_decode(const __grid_constant__ WindowDecodeParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int token = blockIdx.x / p.head_tiles;
  const int first_head = blockIdx.x % p.head_tiles * HEAD_TILE;
  if (threadIdx.x == 0) shared.runs = ring_runs(p, token);
  attend(shared, query_of(p, token, first_head), p.scale_log2);
}
