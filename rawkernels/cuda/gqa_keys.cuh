// Which keys a thread block's query rows see, and in which tiles and parts they lie.
#pragma once
#include "gqa_tile.cuh"

#ifndef PART_KEYS
#error "PART_KEYS: keys that are summed before parts are merged, a multiple of KEY_TILE"
#endif
#ifndef MULTI_PART
#error "MULTI_PART: 1 where a sequence can have more than one part"
#endif
static_assert(PART_KEYS % KEY_TILE == 0, "parts are whole tiles");
static_assert(8 * ROW_TILES <= 32, "a lane reads the keys of a token");
constexpr int ROWS = 8 * ROW_TILES;
constexpr int PART_TILES = PART_KEYS / KEY_TILE;

struct RowKeys {
  int start, length;  // the row's keys, counted from Keys::first
  int pinned;         // and its keys from index 0 on, below Keys::pinned
};
// The query rows of a thread block: rows `first_row` .. of token `token`, which has `group` rows a
// KV head, and of the tokens behind it.
struct Rows {
  int64_t token;
  int first_row, num_rows, num_tokens, group;
};
// The keys that some row sees: indices first, first + 1, .. of a ring that is indices pinned ..
// ring_len - 1, and indices 0 .. pinned_end - 1 of those below.
struct Keys {
  int first, length, ring_len, pinned, pinned_end;
  int common_start, common_end, common_pinned;  // what every row sees; start, end from `first` on
};
// Tiles of a part: three runs, in their order, that do not overlap.
struct Tiles {
  int first[3], count[3];
  __device__ __forceinline__ int total() const { return count[0] + count[1] + count[2]; }
  __device__ __forceinline__ int at(int i) const {
    if (i < count[0]) return first[0] + i;
    i -= count[0];
    return i < count[1] ? first[1] + i : first[2] + i - count[1];
  }
};

// Rows r, r + 1, .. of a sequence's num_tokens * group, as many as a block takes.
__device__ __forceinline__ Rows take_rows(int64_t token, int num_tokens, int group, int row_group) {
  const int first = row_group * ROWS;
  Rows rows;
  rows.num_rows = min(num_tokens * group - first, ROWS);
  rows.token = token + first / group;
  rows.first_row = first % group;
  rows.num_tokens = rows.num_rows <= 0 ? 0 : (rows.first_row + rows.num_rows - 1) / group + 1;
  rows.group = group;
  return rows;
}

// Distance of a ring's index from the oldest key.
__device__ __forceinline__ int from_first(const Keys& keys, int index) {
  const int distance = index - keys.first;
  return distance < 0 ? distance + keys.ring_len - keys.pinned : distance;
}

// All lanes: lane i has the index of the oldest key, the number of keys from there and of pinned
// keys of token i of `rows` (0 for none). Writes the block's `table` [ROWS] and returns the keys of
// all rows together.
__device__ __forceinline__ Keys join_keys(RowKeys* table, const Rows& rows, int oldest, int length,
                                          int num_pinned, int ring_len, int pinned) {
  const int lane = threadIdx.x % 32, turning = ring_len - pinned;
  const uint32_t seeing = __ballot_sync(~0u, length > 0);
  Keys keys = {pinned, 0, ring_len, pinned, 0, 0, 0, 0};
  if (seeing != 0) keys.first = __shfl_sync(~0u, oldest, __ffs(seeing) - 1);
  const int start = length > 0 ? from_first(keys, oldest) : 0;
  // A row whose keys wrap past `first` again (tokens out of order) counts as reaching all around.
  const int reach = length <= 0 ? 0 : start > turning - length ? turning : start + length;
  const bool counts = lane < rows.num_tokens;
  keys.length = __reduce_max_sync(~0u, reach);
  keys.pinned_end = __reduce_max_sync(~0u, num_pinned);
  keys.common_start = __reduce_max_sync(~0u, counts ? start : 0);
  keys.common_end = -__reduce_max_sync(~0u, counts ? -reach : -turning);
  keys.common_pinned = -__reduce_max_sync(~0u, counts ? -num_pinned : -pinned);
  for (int row = 0; row < ROWS; row++) {
    const int of = min((rows.first_row + row) / rows.group, 31);
    const RowKeys own = {__shfl_sync(~0u, start, of), __shfl_sync(~0u, length, of),
                         __shfl_sync(~0u, num_pinned, of)};
    if (threadIdx.x == row) table[row] = row < rows.num_rows ? own : RowKeys{0, 0, 0};
  }
  return keys;
}

// The tiles of a part that hold keys.
__device__ __forceinline__ Tiles tiles_of_part(const Keys& keys, int part) {
  const int begin = MULTI_PART ? part * PART_TILES : 0;
  const int end = MULTI_PART ? begin + PART_TILES : div_ceil(keys.ring_len, KEY_TILE);
  const int wrapped = max(keys.first + keys.length - keys.ring_len, 0);  // from `pinned` on
  const int from[3] = {0, keys.pinned, keys.first};
  const int count[3] = {keys.pinned_end, wrapped, keys.length - wrapped};
  Tiles tiles;
  int taken = begin;
#pragma unroll
  for (int i = 0; i < 3; i++) {
    tiles.first[i] = max(from[i] / KEY_TILE, taken);
    const int last = count[i] == 0 ? 0 : min(div_ceil(from[i] + count[i], KEY_TILE), end);
    tiles.count[i] = max(last - tiles.first[i], 0);
    taken = max(taken, last);
  }
  return tiles;
}
// Parts from 0 on, behind which no key lies.
__device__ __forceinline__ int parts_with_keys(const Keys& keys) {
  const int turning = keys.length == 0 ? 0 : min(keys.first + keys.length, keys.ring_len);
  const int end = max(keys.pinned_end, turning);
  return MULTI_PART ? div_ceil(end, PART_KEYS) : end > 0;
}

// Every row sees every key of a tile.
__device__ __forceinline__ bool is_full(const Keys& keys, int index) {
  const int last = index + KEY_TILE - 1;
  if (last < keys.pinned) return last < keys.common_pinned;
  return index >= keys.pinned && last < keys.ring_len &&
         (index < keys.first) == (last < keys.first) &&
         from_first(keys, index) >= keys.common_start && from_first(keys, last) < keys.common_end;
}
__device__ __forceinline__ bool is_present(const Keys& keys, int index) {
  if (index < keys.pinned) return index < keys.pinned_end;
  return index < keys.ring_len && from_first(keys, index) < keys.length;
}
__device__ __forceinline__ bool sees(const RowKeys& row, const Keys& keys, int index) {
  if (index < keys.pinned) return index < row.pinned;
  int distance = from_first(keys, index) - row.start;
  if (distance < 0) distance += keys.ring_len - keys.pinned;
  return index < keys.ring_len && distance < row.length;
}

// -inf for the keys that a row does not see. index: of the first of 16 keys; lane: keys g and
// g + 8, rows 2t and 2t + 1.
__device__ __forceinline__ void mask_keys(float (&s)[ROW_TILES][4], const RowKeys* rows,
                                          const Keys& keys, int index) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const RowKeys row = rows[8 * n + 2 * t + i % 2];
      if (!sees(row, keys, index + g + i / 2 * 8)) s[n][i] = minus_infinity();
    }
  }
}
