// window_decode_gqa: query tokens against the newest keys of their sequences' rings, grouped-query
// heads: bf16, fp16 or MXFP8 records.
// grid (num_seqs * splits * row_groups * head_groups); block 32 * (HEADS + FETCHERS)
// in   slab uint8 [num_state_slots * slot_bytes], flat; q [num_tokens, num_q_heads, HEAD_DIM],
//      bf16, or fp16 for fp16 records; offset_len int32 [num_tokens, 2]; cu_seqlens_q
//      [num_seqs + 1]; num_pinned int32 [num_tokens] for rings that pin first positions, else null
// out  out like q; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream, the plan before the kernel ahead; sm_80 or
//      later; no visible key gives out 0 and lse -inf; an offset_len outside the slab the same
// bound by the records: each is read once by the blocks of its sequence
#include "window_decode_gqa.cuh"
#include "window_decode_gqa_params.cuh"

static_assert(sizeof(WindowDecodeGqaParams) == PARAMS_BYTES, "the launcher packs another struct");

struct RingSource {
  static constexpr bool CAN_LOSE = false;
  const uint8_t* records;  // of one ring
  __device__ __forceinline__ const uint8_t* record(int index) const {
    return records + int64_t(index) * RECORD_BYTES;
  }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
window_decode_gqa(const __grid_constant__ WindowDecodeGqaParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  int left = blockIdx.x;
  const int head_group = left % p.head_groups;
  left /= p.head_groups;
  const int row_group = left % p.row_groups;
  left /= p.row_groups;
  const int split = left % p.splits, seq = left / p.splits;
  // Where every sequence has one token a read that others wait for is saved.
  const int first_token = p.one_token ? seq : p.cu_seqlens_q[seq];
  const int num_tokens = p.one_token ? 1 : p.cu_seqlens_q[seq + 1] - first_token;
  const Rows rows = take_rows(first_token, num_tokens, p.group, row_group);
  if (rows.num_rows <= 0) return;

  // Lane i reads the plan of token i. A token of another state slot than the first that sees
  // anything would be a broken plan; it sees nothing.
  const int lane = threadIdx.x % 32;
  int offset = 0, length = 0, num_pinned = 0;
  if (lane < rows.num_tokens) {
    offset = p.offset_len[2 * (rows.token + lane)];
    length = p.offset_len[2 * (rows.token + lane) + 1];
    if (p.num_pinned != nullptr) num_pinned = p.num_pinned[rows.token + lane];
  }
  const bool inside = offset >= 0 && offset < p.num_rows;
  length = inside ? min(max(length, 0), p.ring_len - p.pinned) : 0;
  num_pinned = inside ? min(max(num_pinned, 0), p.pinned) : 0;
  const int state = offset / p.ring_len, oldest = offset - state * p.ring_len;
  const uint32_t seeing = __ballot_sync(~0u, length > 0 || num_pinned > 0);
  const int first_state = __shfl_sync(~0u, state, seeing == 0 ? 0 : __ffs(seeing) - 1);
  if (state != first_state) length = num_pinned = 0;
  if (oldest < p.pinned) length = 0;
  const Keys keys = join_keys(shared.rows, rows, oldest, length, num_pinned, p.ring_len, p.pinned);

  const int64_t slot = seeing == 0 ? 0 : first_state;
  const RingSource source = {p.slab + slot * p.slot_bytes + p.ring_offset};
  const int64_t unit = (int64_t(seq) * p.row_groups + row_group) * p.head_groups + head_group;
  decode_rows(shared, p, rows, keys, source, head_group, split, unit);
}
