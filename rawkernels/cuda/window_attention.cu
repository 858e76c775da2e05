// window_attention: causal attention of ragged sequences over grouped heads, in a window or over
// all keys, aligned at the last key.
// grid (num_kv_heads * head_tiles * num_tiles); block 128 threads: 4 warps of 16 rows
// in   q [num_q_rows, num_q_heads, HEAD_DIM], k, v [num_k_rows, num_kv_heads, HEAD_DIM], bf16 or
//      float16; cu_seqlens_q, cu_seqlens_k int32 [num_seqs + 1]; sink f32 [num_q_heads]
// out  out like q; lse f32 [num_q_rows, num_q_heads]
// needs sm_80 or later; num_tiles = num_q_rows / QUERY_TILE + num_seqs, so that no length is known
//      to the host; a query before all keys gives out 0 and lse -inf; sequences whose ends leave
//      their arrays are skipped
// bound by shared memory: a warp reads each key and value of its tile once for 16 rows
#include "grouped_tile.cuh"
#include "window_attention_params.cuh"

static_assert(sizeof(WindowAttentionParams) == PARAMS_BYTES, "the launcher packs another struct");

// What one block computes.
struct Work {
  int64_t q_row, k_row;  // of q: the tile's first query; of k: key 0 of the sequence
  int kv_head, first_head, num_heads;  // query heads first_head .. + num_heads - 1
  int num_queries;                     // 0: nothing to do
  int first_position, seqlen_k;        // of the first query; keys of the sequence
};

// Sequence i owns QUERY_TILE-sized tiles from cu_seqlens_q[i] / QUERY_TILE + i on: at least as many
// as its queries need, whatever their start.
__device__ __forceinline__ Work find_work(const WindowAttentionParams& p) {
  Work work = {};
  const int pair = blockIdx.x / p.num_tiles;
  // Last tiles first: they see most keys, and the short ones fill the gaps at the end.
  const int tile = p.num_tiles - 1 - static_cast<int>(blockIdx.x % p.num_tiles);
  int sequence = 0, behind = p.num_seqs;
  while (behind - sequence > 1) {
    const int middle = (sequence + behind) / 2;
    if (p.cu_seqlens_q[middle] / QUERY_TILE + middle <= tile)
      sequence = middle;
    else
      behind = middle;
  }
  const int q_start = p.cu_seqlens_q[sequence], q_end = p.cu_seqlens_q[sequence + 1];
  const int k_start = p.cu_seqlens_k[sequence], k_end = p.cu_seqlens_k[sequence + 1];
  if (q_start < 0 || q_end < q_start || q_end > p.num_q_rows) return work;
  if (k_start < 0 || k_end < k_start || k_end > p.num_k_rows) return work;
  const int first = (tile - (q_start / QUERY_TILE + sequence)) * QUERY_TILE;
  if (first < 0 || first >= q_end - q_start) return work;

  const int group = p.num_q_heads / p.num_kv_heads, part = pair % p.head_tiles * PACK;
  work.q_row = q_start + first;
  work.k_row = k_start;
  work.kv_head = pair / p.head_tiles;
  work.first_head = work.kv_head * group + part;
  work.num_heads = min(group - part, PACK);
  work.num_queries = min(q_end - q_start - first, QUERY_TILE);
  work.seqlen_k = k_end - k_start;
  work.first_position = work.seqlen_k - (q_end - q_start) + first;
  return work;
}

__device__ __forceinline__ bool row_exists(const Work& work, int row) {
  return row / PACK < work.num_queries && row % PACK < work.num_heads;
}
// Element offset of a row of the tile in q and out.
__device__ __forceinline__ int64_t row_offset(const WindowAttentionParams& p, const Work& work,
                                              int row) {
  return ((work.q_row + row / PACK) * p.num_q_heads + work.first_head + row % PACK) * HEAD_DIM;
}

__device__ __forceinline__ void request_query(const WindowAttentionParams& p, const Work& work,
                                              Shared& shared) {
#pragma unroll
  for (int turn = 0; turn < BLOCK_ROWS * CHUNKS / NUM_THREADS; turn++) {
    const int i = turn * NUM_THREADS + threadIdx.x;
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool exists = row_exists(work, row);
    const uint16_t* from = p.q + (exists ? row_offset(p, work, row) + chunk * 8 : 0);
    copy_async_16(shared_address(&shared.q[row][chunk]), from, exists);
  }
}

// Requests the keys (or values) of a tile. Keys that no query of the tile sees are zeros, so that
// nothing of them, or of the next sequence, meets a probability of 0.
__device__ __forceinline__ void request_tile(uint4 (&to)[KEY_TILE][ROW_BYTES / 16],
                                             const uint16_t* from, const WindowAttentionParams& p,
                                             const Work& work, int first_key, int oldest,
                                             int last_position) {
  const int64_t stride = int64_t(p.num_kv_heads) * HEAD_DIM;
  const uint16_t* keys = from + (work.k_row + first_key) * stride + work.kv_head * HEAD_DIM;
#pragma unroll
  for (int turn = 0; turn < div_ceil(KEY_TILE * CHUNKS, NUM_THREADS); turn++) {
    const int i = turn * NUM_THREADS + threadIdx.x;
    const int row = i / CHUNKS, chunk = i % CHUNKS, key = first_key + row;
    if (KEY_TILE * CHUNKS % NUM_THREADS != 0 && row >= KEY_TILE) break;
    const bool exists = key <= last_position && (key >= oldest || key < p.sink_tokens);
    const uint16_t* place = exists ? keys + row * stride + chunk * 8 : from;
    copy_async_16(shared_address(&to[row][chunk]), place, exists);
  }
}

#if COUNT_TILES
// Adds one visited tile to counts [5]: full, partial, empty, without mask, visible pairs. Pairs are
// counted as the rows of this block find them, not by the rule that chose the mask.
__device__ __forceinline__ void count_tile(const WindowAttentionParams& p, const Work& work,
                                           const Rows& rows, Shared& shared, int first_key,
                                           bool masked) {
  uint32_t& visible = shared.visible.x;
  if (threadIdx.x == 0) visible = 0;
  __syncthreads();
  const int keys = min(KEY_TILE, work.seqlen_k - first_key);
  for (int half = 0; half < 2; half++) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    if (!row_exists(work, row) || threadIdx.x % 4 != 0) continue;
    const int position = rows.position[half];
    for (int key = first_key; key < first_key + KEY_TILE; key++) {
      const bool sees = key <= position && (position - key < p.window || key < p.sink_tokens);
      if (sees || !masked) atomicAdd(&visible, 1u);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t all = uint32_t(work.num_queries) * work.num_heads * keys;
    const int kind = visible == all ? 0 : visible > 0 ? 1 : 2;
    atomicAdd(p.counts + kind, uint64_t(1));
    if (!masked) atomicAdd(p.counts + 3, uint64_t(1));
    atomicAdd(p.counts + 4, uint64_t(visible));
  }
  __syncthreads();
}
#endif

// Divides, rounds and stores the rows of this warp; o is staged in the warp's own rows of q.
__device__ __forceinline__ void store_rows(const WindowAttentionParams& p, const Work& work,
                                           Shared& shared, float (&o)[CHUNKS][4],
                                           const Rows& rows) {
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + lane / 4 + 8 * half;
    const bool exists = row_exists(work, row);
    const int head = work.first_head + row % PACK;
    const float sink = p.sink != nullptr && exists ? p.sink[head] : minus_infinity();
    float lse;
    const float factor = finish_row(rows, half, sink, lse);
    if (exists && lane % 4 == 0)
      p.lse[(work.q_row + row / PACK) * p.num_q_heads + head] = lse;
    uint8_t* staged = reinterpret_cast<uint8_t*>(shared.q[row]) + lane % 4 * 4;
    const bool none = rows.position[half] < 0;  // its tile may hold NaN that it does not see
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const float low = none ? 0.0f : __fmul_rn(o[chunk][2 * half], factor);
      const float high = none ? 0.0f : __fmul_rn(o[chunk][2 * half + 1], factor);
      *reinterpret_cast<uint32_t*>(staged + chunk * 16) = pack_values(low, high);
    }
  }
  __syncwarp();
#pragma unroll
  for (int turn = 0; turn < 16 * CHUNKS / 32; turn++) {
    const int i = turn * 32 + lane;
    const int row = first_row + i / CHUNKS, chunk = i % CHUNKS;
    if (row_exists(work, row))
      *reinterpret_cast<uint4*>(p.out + row_offset(p, work, row) + chunk * 8) =
          shared.q[row][chunk];
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
window_attention(const __grid_constant__ WindowAttentionParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Work work = find_work(p);
  if (work.num_queries == 0) return;

  // Loop bounds: tiles of first keys before the windows, then the windows' tiles (the same integers
  // as layouts/tiles.py).
  const int last_position = work.first_position + work.num_queries - 1;
  const int oldest = oldest_key(work.first_position, p.window);
  const int start = oldest / KEY_TILE, end = last_position < 0 ? 0 : last_position / KEY_TILE + 1;
  const int sink_end = min(p.sink_tokens / KEY_TILE + (p.sink_tokens % KEY_TILE > 0), start);
  const int num_visits = last_position < 0 ? 0 : sink_end + end - start;
  const int newest_oldest = oldest_key(last_position, p.window);  // of the last query's window

  Rows rows = {{-1, -1}, {minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
    if (row_exists(work, row)) rows.position[half] = work.first_position + row / PACK;
  }
  float o[CHUNKS][4];
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++)
    for (int i = 0; i < 4; i++) o[chunk][i] = 0.0f;

  uint32_t q[HEAD_DIM / 16][4];
  if (num_visits > 0) {
    request_query(p, work, shared);
    const int first_key = (sink_end > 0 ? 0 : start) * KEY_TILE;
    request_tile(shared.k, p.k, p, work, first_key, oldest, last_position);
    commit_copies();
  }
  for (int visit = 0; visit < num_visits; visit++) {
    const int first_key = (visit < sink_end ? visit : start + visit - sink_end) * KEY_TILE;
    wait_copies<0>();
    __syncthreads();  // this tile's keys are there, and nobody reads the last tile's values
    request_tile(shared.v, p.v, p, work, first_key, oldest, last_position);
    commit_copies();
    if (KEEP_QUERY && visit == 0) {
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; step++) load_query(q[step], shared, step);
    }
    float s[KEY_TILE / 8][4], correction[2];
    score_tile(s, q, shared);
    __syncthreads();  // nobody reads the keys any more
    if (visit + 1 < num_visits) {
      const int next = visit + 1 < sink_end ? visit + 1 : start + visit + 1 - sink_end;
      request_tile(shared.k, p.k, p, work, next * KEY_TILE, oldest, last_position);
    }
    commit_copies();

    // FULL: the first query sees the tile's last key, and the last query its first key that is
    // not one of the first keys. Rows past the last query are not stored.
    const int behind = first_key + KEY_TILE;
    const bool full = behind - 1 <= work.first_position &&
                      (behind <= p.sink_tokens || max(first_key, p.sink_tokens) >= newest_oldest);
    if (full)
      softmax_tile<false>(s, rows, correction, p.scale, p.cap_log2, 0, 0, 0);
    else
      softmax_tile<true>(s, rows, correction, p.scale, p.cap_log2, first_key, p.window,
                         p.sink_tokens);
#if COUNT_TILES
    count_tile(p, work, rows, shared, first_key, !full);
#endif
    // Multiplying by 1 changes no bit, so a warp whose maxima stood still may skip it.
    if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
        for (int i = 0; i < 4; i++) o[chunk][i] = __fmul_rn(o[chunk][i], correction[i / 2]);
    }
    wait_copies<1>();
    __syncthreads();  // this tile's values are there
    value_tile(o, s, shared);
  }
  store_rows(p, work, shared, o, rows);
}
