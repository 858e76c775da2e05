// ring_load: what the queries of each prefill chunk see, decoded to contiguous rows of k and v: the
// history out of the rings, then the chunk's new records. JOINT: the history comes out of a joint
// buffer, which holds the new records too.
// grid (num_seqs * num_chunks); block 128 threads over the units of BLOCK_ROWS rows of a sequence
// in   slab uint8 [num_state_slots * slot_bytes]; records uint8 [num_records, record_bytes];
//      state_ids int32 [num_seqs]; cu_seqlens_q int32 [num_seqs + 1]; positions int32 [num_tokens];
//      pivots, pinned_pivots int32 [num_tokens, 4], of which a sequence's first query says how many
//      keys of history its queries see
// out  k, v bf16 or fp16 [num_rows, KV_HEADS, HEAD_DIM]; cu_seqlens_k int32 [num_seqs + 1].
//      JOINT: one end more, and q_ends int32 [num_seqs + 2]: a last sequence takes the tokens
//      behind the others, which see nothing
// needs k and v at multiples of 16 bytes, and what LOAD_BYTES says of the records. A sequence whose
//       state_id is -1 has no keys; of a state_id that is no slot it has zeros.
// bound by memory: 2112 B in and 4096 B out a row at 8 heads of 128
#include "ring_load_params.cuh"
#include "ring_rows.cuh"
#include "unpack_records.cuh"

static_assert(JOINT == 0 || JOINT == 1, "JOINT is a switch");
static_assert(sizeof(RingLoadParams) == PARAMS_BYTES, "the launcher's dtype");

// Keys of one sequence: pinned ones and others of its history, new ones.
struct Keys {
  int32_t first, pinned, recent, fresh;  // `first` is its first token
  __device__ int32_t history() const { return pinned + recent; }
  __device__ int32_t total() const { return pinned + recent + fresh; }
};

__device__ __forceinline__ Keys keys_of(const RingLoadParams& p, int32_t seq) {
  int32_t first = __ldg(p.cu_seqlens_q + seq), end = __ldg(p.cu_seqlens_q + seq + 1);
  Keys keys = {first, 0, 0, 0};
  if (end <= first || first < 0 || end > p.num_tokens || __ldg(p.state_ids + seq) < 0) return keys;
  keys.fresh = end - first;
  keys.recent = min(max(__ldg(p.pivots + 4 * (int64_t)first + 1), 0), p.window - 1);
  if (p.pinned_pivots != nullptr)
    keys.pinned = min(max(__ldg(p.pinned_pivots + 4 * (int64_t)first + 1), 0), p.sink_tokens);
  return keys;
}

// First row of a sequence: the keys of those before it. All threads of the block take part.
__device__ __forceinline__ int64_t first_row(const RingLoadParams& p, int32_t seq,
                                             int32_t (&sums)[THREADS / 32]) {
  uint32_t sum = 0;  // rows are int32
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < seq; i += THREADS) sum += keys_of(p, i).total();
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = (int32_t)sum;
  __syncthreads();
  int64_t row = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) row += sums[i];
  return row;
}

extern "C" __global__ void __launch_bounds__(THREADS)
ring_load(const __grid_constant__ RingLoadParams p) {
  __shared__ RecordSources from;
  __shared__ int32_t sums[THREADS / 32];
  int32_t seq = (int32_t)(blockIdx.x / p.num_chunks);
  int32_t begin = (int32_t)(blockIdx.x % p.num_chunks) * BLOCK_ROWS;
  Keys keys = keys_of(p, seq);
  if (begin > 0 && begin >= keys.total()) return;
  int64_t start = first_row(p, seq, sums);

  if (begin == 0 && threadIdx.x == 0) {
    p.cu_seqlens_k[seq] = (int32_t)start;
    bool is_last = seq == p.num_seqs - 1;
    if (is_last) p.cu_seqlens_k[p.num_seqs] = (int32_t)(start + keys.total());
    if constexpr (JOINT) {
      p.q_ends[seq] = __ldg(p.cu_seqlens_q + seq);
      if (is_last) {
        p.cu_seqlens_k[p.num_seqs + 1] = (int32_t)(start + keys.total());
        p.q_ends[p.num_seqs] = __ldg(p.cu_seqlens_q + p.num_seqs);
        p.q_ends[p.num_seqs + 1] = (int32_t)p.num_tokens;
      }
    }
  }

  int64_t room = p.num_rows - (start + begin);
  int rows = (int)min((int64_t)min(keys.total() - begin, BLOCK_ROWS), room);
  if (rows <= 0) return;
#pragma unroll 1
  for (int r = threadIdx.x; r < rows; r += THREADS) {
    int32_t j = begin + r, behind = j - keys.history();  // below 0 in the history
    int64_t row = p.first_new + keys.first + behind;     // of `records`, where it is there
    bool in_records = JOINT || behind >= 0;
    if (JOINT && behind < 0) {
      const int32_t* pivot = j < keys.pinned ? p.pinned_pivots : p.pivots;
      row = __ldg(pivot + 4 * (int64_t)keys.first) + (j < keys.pinned ? j : j - keys.pinned);
    }
    if (in_records) {
      bool is_there = row >= 0 && row < p.num_records;
      const uint8_t* record = is_there ? p.records + row * p.record_bytes : nullptr;
      set_source(from, r, record, record + p.value_bytes, p.part_bytes, p.part_bytes);
    } else {
      int32_t state_id = __ldg(p.state_ids + seq);
      int32_t position = j < keys.pinned ? j : __ldg(p.positions + keys.first) + behind;
      bool is_there = state_id < p.num_state_slots && position >= 0;
      int64_t index = ring_index(max(position, 0), p.ring_len, p.sink_tokens);
      const uint8_t* slot = p.slab + state_id * p.slot_bytes;
      set_source(from, r, is_there ? slot + p.value_offset + index * p.value_stride : nullptr,
                 slot + p.scale_offset + index * p.scale_stride, p.value_part_stride,
                 p.scale_part_stride);
    }
  }
  __syncthreads();
  unpack_rows(from, start + begin, rows, p.k, p.v);
}
