// paged_decode: query tokens against all keys of their sequences in a paged pool, grouped-query
// heads: bf16, fp16 or MXFP8 records.
// grid (num_tokens * splits * row_groups * head_groups); block 32 * (HEADS + FETCHERS)
// in   pool uint8 [num_pool_blocks * block_bytes], flat; q [num_tokens, num_q_heads, HEAD_DIM],
//      bf16, or fp16 for fp16 records; block_tables int32 [num_tables, max_blocks];
//      seq_ids, positions int32 [num_tokens]
// out  out like q; lse f32 [num_tokens, num_q_heads]
// needs records written earlier on the same stream, tables, ids and positions before the kernel
//      ahead; sm_80 or later; a seq_id or position outside its table gives out 0 and lse -inf, a
//      block outside the pool keys and values of 0
// bound by the records: each is read once by the blocks of a run of tokens of its sequence
#include "window_decode_gqa.cuh"
#include "paged_decode_params.cuh"

static_assert(sizeof(PagedDecodeParams) == PARAMS_BYTES, "the launcher packs another struct");
constexpr int MAX_RUN = 32;  // tokens that one block may take

struct PagedSource {
  static constexpr bool CAN_LOSE = true;
  const uint8_t* records;  // of the layer in block 0
  const int32_t* table;    // [max_blocks] of one sequence
  int64_t block_bytes;
  int block_size, num_pool_blocks;
  __device__ __forceinline__ const uint8_t* record(int index) const {
    const int column = index / block_size;
    const int block = __ldg(table + column);
    if (block < 0 || block >= num_pool_blocks) return nullptr;
    return records + block * block_bytes + int64_t(index - column * block_size) * RECORD_BYTES;
  }
};

// Tokens of one sequence that stand together are taken `run` at a time, counted from the first of
// them: how many tokens of such a group begin at `token`, 0 where it is not the group's first.
__device__ __forceinline__ int run_at(const PagedDecodeParams& p, int token) {
  const int lane = threadIdx.x % 32, seq_id = p.seq_ids[token];
  int before = 0;
  for (bool more = true; more;) {
    const int other = token - before - 1 - lane;
    const uint32_t differs = __ballot_sync(~0u, other < 0 || p.seq_ids[max(other, 0)] != seq_id);
    before += differs == 0 ? 32 : __ffs(differs) - 1;
    more = differs == 0;
  }
  if (before % p.run != 0) return 0;
  const int other = token + lane;
  const bool differs = lane >= p.run || other >= p.num_tokens ||
                       p.seq_ids[min(other, p.num_tokens - 1)] != seq_id;
  const uint32_t ends = __ballot_sync(~0u, differs);
  return ends == 0 ? MAX_RUN : __ffs(ends) - 1;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS)
paged_decode(const __grid_constant__ PagedDecodeParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  int left = blockIdx.x;
  const int head_group = left % p.head_groups;
  left /= p.head_groups;
  const int row_group = left % p.row_groups;
  left /= p.row_groups;
  const int split = left % p.splits, token = left / p.splits;
  const int run = p.run == 1 ? 1 : run_at(p, token);
  const Rows rows = take_rows(token, run, p.group, row_group);
  if (rows.num_rows <= 0) return;

  const int lane = threadIdx.x % 32, seq_id = p.seq_ids[token];
  const bool known = seq_id >= 0 && seq_id < p.num_tables;
  int length = 0;
  if (known && lane < rows.num_tokens) length = max(p.positions[rows.token + lane], -1) + 1;
  if (length > p.max_length) length = 0;
  const Keys keys = join_keys(shared.rows, rows, 0, length, 0, p.max_length, 0);

  const PagedSource source = {p.pool + p.layer_offset,
                              p.block_tables + int64_t(known ? seq_id : 0) * p.max_blocks,
                              p.block_bytes, p.block_size, p.num_pool_blocks};
  const int64_t unit = (int64_t(token) * p.row_groups + row_group) * p.head_groups + head_group;
  decode_rows(shared, p, rows, keys, source, head_group, split, unit);
}
