// window_prefill: query tokens of prefill chunks against the joint buffer of a layer, latent heads.
// grid (num_tokens * head_tiles); block NUM_THREADS: 2, 4 or 8 warps for HEAD_TILE 16, 32 or 64
// in   records uint8 [num_records, RECORD_BYTES], whole records: history, then new tokens
//      q bf16 [num_tokens, num_q_heads, HEAD_DIM]; pivots int32 [num_tokens, 4]
//      positions int32 [num_tokens], read where ROPE_DIMS > 0
// out  out bf16 [num_tokens, num_q_heads, HEAD_DIM]; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream; sm_80 or later; no visible key gives out 0 and
//      lse -inf, and so do pivots that point outside the buffer
// bound by shared memory: each tile of 32 keys is read once a product by each row of warps
#include "attention_tile.cuh"
#include "window_prefill_params.cuh"

static_assert(sizeof(WindowPrefillParams) == PARAMS_BYTES, "the launcher packs another struct");
static_assert(!PLANAR, "records in a buffer are whole");

// The keys of a token: the run of history that its pivots name, then the run of new records.
__device__ __forceinline__ KeyRuns buffer_runs(const WindowPrefillParams& p, int token) {
  const int* pivots = p.pivots + 4 * static_cast<int64_t>(token);
  KeyRuns runs = {};
  int length[2];
  for (int run = 0; run < 2; run++) {
    const int64_t start = pivots[2 * run];
    length[run] = pivots[2 * run + 1];
    if (length[run] < 0 || start < 0 || start + length[run] > p.num_records) return runs;
    runs.values[run] = p.records + start * RECORD_BYTES;
    runs.scales[run] = runs.values[run] + VALUE_BYTES;
  }
  runs.first_length = length[0];
  runs.length = length[0] + length[1];
  return runs;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
window_prefill(const __grid_constant__ WindowPrefillParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int token = blockIdx.x / p.head_tiles;
  const int first_head = blockIdx.x % p.head_tiles * HEAD_TILE;
  if (threadIdx.x == 0) shared.runs = buffer_runs(p, token);
  attend(shared, query_of(p, token, first_head), p.scale_log2);
}
