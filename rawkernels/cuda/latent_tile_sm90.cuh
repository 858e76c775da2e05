// A tile in the Hopper kernels of window attention: S = Q K^T, scores to weights, O = P V, inverse
// rotation, stores.
#pragma once
#include "latent_window_sm90.cuh"
#include "memory.cuh"

constexpr int SCORES = KEY_ROWS / 2;       // registers of S a thread: 2 heads x 34 rows of keys
constexpr int OUT_PART_COLUMNS = 128;      // columns of O at a time
constexpr int OUT_PARTS = HEAD_DIM / OUT_PART_COLUMNS;
constexpr int OUT_REGISTERS = OUT_PART_COLUMNS / 2;
constexpr int ROPE_COLUMNS = 64, ROPE_PAIRS = ROPE_COLUMNS / 2;
static_assert(ROPE_PAIRS == 32, "a lane holds one pair's rotation");
static_assert(ROPE_COLUMNS == SLAB_COLUMNS, "the last slab stored is the one that is rotated");

// A query token, as its consumers need it. position: read where the output is rotated.
struct Token {
  int2 keys;  // window row of the oldest visible key, number of visible keys; they wrap
  int position;
};
struct Tile {
  int first_row;  // of q, out and lse: token * num_q_heads + first head
  int2 keys;
  float sink[2];  // of this thread's heads; -inf without a sink
};

// What a tile needs beside its queries. Nothing is computed from the loads here, so that S does not
// wait for them.
__device__ __forceinline__ Tile load_tile(const Params& p, int tile, int2 keys, int head) {
  const int first_head = tile % p.head_tiles * HEAD_TILE;
  const float none = minus_infinity();
  Tile t = {tile * HEAD_TILE, keys, {none, none}};
  if (p.sink != nullptr) {
    t.sink[0] = __ldg(p.sink + first_head + head);
    t.sink[1] = __ldg(p.sink + first_head + head + 8);
  }
  return t;
}
// The rotation at a token's position, pair `lane`; 1 where nothing is rotated.
__device__ __forceinline__ RotationDigits load_rotation(const Params& p, int position, int lane) {
  RotationDigits digits;
  if (p.rope_table != nullptr) digits = load_digits(p.rope_table, ROPE_PAIRS, position, lane);
  return digits;
}
// Asks for the rows of that table to be brought into L2, by all lanes of a warp: where memory is
// busy, a consumer that had to fetch them would wait longer than S takes.
__device__ __forceinline__ void prefetch_rotation(const Params& p, int position, int lane) {
  constexpr int LINE_BYTES = 128, LINES = ROPE_PAIRS * sizeof(double2) / LINE_BYTES;
  static_assert(3 * LINES <= 32, "a line a lane");
  if (p.rope_table == nullptr || lane >= 3 * LINES) return;
  const DigitRows rows = digit_rows(position);
  const uint32_t row = lane < LINES ? rows.coarse : lane < 2 * LINES ? rows.middle : rows.fine;
  prefetch_line(reinterpret_cast<const uint8_t*>(p.rope_table + int64_t(row) * ROPE_PAIRS) +
                lane % LINES * LINE_BYTES);
}

// S = Q K^T of one tile; each slot of queries is released as soon as its products are done.
__device__ __forceinline__ void scores_of_tile(float (&s)[SCORES], TileShared& shared,
                                               SlotReader& reader, int consumer) {
  const uint32_t queries = descriptor(shared_address(shared.slots));
  const uint32_t keys = descriptor(shared_address(shared.window));
  int before = 0;
#pragma unroll
  for (int slab = 0; slab < NUM_SLABS; slab++) {
    reader.wait(shared, consumer);
    products_begin();
    const uint32_t a = queries + reader.slot * descriptor_step(SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < SLAB_COLUMNS / 16; i++)
      product_qk(s, a + i * descriptor_step(32),
                 keys + slab * descriptor_step(SLAB_BYTES) + i * descriptor_step(32),
                 slab != 0 || i != 0);
    products_commit();
    if (slab > 0) {
      products_wait<1>();
      barrier_arrive(shared_address(shared.empty + before));
    }
    before = reader.slot;
    reader.advance(1);
  }
  products_wait<0>();
  barrier_arrive(shared_address(shared.empty + before));
  products_ready(s);
}

// Scores that the token does not see become -inf; of those it sees, the ones of rows that are not
// finite become NaN. Returns the largest of each of the thread's two heads in `largest`.
__device__ __forceinline__ void mask_scores(float (&s)[SCORES], float (&largest)[2], int2 keys,
                                            int ring_len, const NanRows& nan_rows, int quad) {
  if (nan_rows.any != 0) {
#pragma unroll
    for (int j = 0; j < SCORES / 4; j++) {
      const uint32_t bits = nan_rows.words[j / 4] >> (j % 4 * 8 + 2 * quad);
      if (bits & 1) s[4 * j] = s[4 * j + 2] = __int_as_float(0x7FC00000);
      if (bits & 2) s[4 * j + 1] = s[4 * j + 3] = __int_as_float(0x7FC00000);
    }
  }
  const float none = minus_infinity();
  const int to_wrap = min(keys.y, ring_len - keys.x), wrapped = keys.y - to_wrap;
  const int from_first = 2 * quad - keys.x, from_wrap = 2 * quad - wrapped;
  largest[0] = largest[1] = none;
#pragma unroll
  for (int j = 0; j < SCORES / 4; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int row = 8 * j + e;  // + 2 * quad
      const bool seen = (uint32_t)(from_first + row) < (uint32_t)to_wrap || from_wrap < -row;
#pragma unroll
      for (int head = 0; head < 2; head++) {
        float& score = s[4 * j + 2 * head + e];
        score = seen ? score : none;
        largest[head] = fmaxf(largest[head], score);
      }
    }
  }
  largest[0] = quad_max(largest[0]);
  largest[1] = quad_max(largest[1]);
}

// Rotates the last 64 columns, which are in registers 32 .. 63 of the last part. rotation: of pair
// `lane`, (cos, -sin).
__device__ __forceinline__ void rotate_back(float (&o)[OUT_REGISTERS], float2 rotation,
                                            int adjacent, int quad) {
  constexpr int FIRST = OUT_REGISTERS - ROPE_COLUMNS / 2;
#pragma unroll
  for (int i = 0; i < ROPE_COLUMNS / 8; i++) {
    // Adjacent: columns 8i + 2 quad and the next. Half: columns 8 (i / 2) + 2 quad + i % 2 and +
    // 32.
    const int pair = adjacent ? 4 * i + quad : i / 2 * 8 + 2 * quad + i % 2;
    const float2 turn = make_float2(__shfl_sync(~0u, rotation.x, pair),
                                    __shfl_sync(~0u, rotation.y, pair));
#pragma unroll
    for (int head = 0; head < 2; head++) {
      if (adjacent) {
        float &a = o[FIRST + 4 * i + 2 * head], &b = o[FIRST + 4 * i + 2 * head + 1];
        const float x0 = a, x1 = b;
        a = rotated_first(x0, x1, turn);
        b = rotated_second(x0, x1, turn);
      } else {
        const int at = FIRST + i / 2 * 4 + 2 * head + i % 2;
        float &a = o[at], &b = o[at + ROPE_COLUMNS / 4];
        const float x0 = a, x1 = b;
        a = rotated_first(x0, x1, turn);
        b = rotated_second(x0, x1, turn);
      }
    }
  }
}

// Columns `column` .. + 63 of the warp's 16 heads: rounded, staged, and sent off. x: their
// accumulators, inverse: 1 / the sums of the thread's two heads.
__device__ __forceinline__ void store_columns(const Params& p, const float* x,
                                              const float (&inverse)[2], uint32_t stage, int column,
                                              int row, int lane) {
  if (lane == 0) wait_stores_read();
  __syncwarp();
  const int stage_row = lane % 16, half = lane / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // The sum with +0 makes a zero positive, whatever signs the products of zero weights had.
    uint32_t packed[4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const float* pair = x + 8 * i + 2 * m;
      packed[m] = pack_bf16(fmaf(pair[0], inverse[m % 2], 0.0f),
                            fmaf(pair[1], inverse[m % 2], 0.0f));
    }
    const int piece = (2 * i + half) ^ (stage_row % 8);
    stmatrix_x4(stage + stage_row * SLAB_ROW_BYTES + piece * 16, packed[0], packed[1], packed[2],
                packed[3]);
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
    store_tile(&p.out_map, column, row, stage);
    commit_stores();
  }
}

// From the scores of a tile to its lse and PARTS parts of its output, from `first_part` on; one
// consumer warpgroup. `window_free`: the barrier to arrive at once the window is no longer read, 0
// for none.
template <int PARTS>
__device__ __forceinline__ void finish_tile(const Params& p, TileShared& shared,
                                            float (&s)[SCORES], const Tile& tile,
                                            const RotationDigits& digits,
                                            const NanRows& nan_rows, uint32_t window_free,
                                            int first_part, int tid) {
  static_assert(PARTS >= 1 && PARTS <= OUT_PARTS, "parts of the output");
  const int lane = tid % 32, quad = lane % 4, warp = tid / 32;
  const int warp_row = tile.first_row + warp % 4 * STAGE_ROWS;
  // ---- weights: softmax over the whole window, exact
  float largest[2];
  mask_scores(s, largest, tile.keys, p.ring_len, nan_rows, quad);
  // Without a visible key, or with NaN scores only, the base is 0: then weights are 0, or NaN.
  float base[2], sum[2], part[2] = {0.0f, 0.0f};
#pragma unroll
  for (int head = 0; head < 2; head++)
    base[head] = largest[head] == minus_infinity() ? 0.0f : largest[head] * p.scale_log2;
  uint32_t weights[KEY_STEPS * 4];  // bf16 pairs, as the A operand of O = P V
  weights[KEY_STEPS * 4 - 2] = weights[KEY_STEPS * 4 - 1] = 0;  // rows 136 .. 143
#pragma unroll
  for (int j = 0; j < SCORES / 4; j++) {
#pragma unroll
    for (int head = 0; head < 2; head++) {
      const float w0 = exp2_approx(fmaf(s[4 * j + 2 * head], p.scale_log2, -base[head]));
      const float w1 = exp2_approx(fmaf(s[4 * j + 2 * head + 1], p.scale_log2, -base[head]));
      weights[2 * j + head] = pack_bf16(w0, w1);
      part[head] += w0 + w1;
      // Summed in four parts, rows 0 .. 39, .. 71, .. 103, .. 135.
      if (j % 4 == 0 && j > 0) {
        sum[head] = j == 4 ? part[head] : sum[head] + part[head];
        part[head] = 0.0f;
      }
    }
  }
  float inverse[2];
#pragma unroll
  for (int head = 0; head < 2; head++) {
    sum[head] = quad_sum(sum[head]);
    if (quad == 0 && first_part == 0)
      p.lse[warp_row + lane / 4 + 8 * head] = (base[head] + __log2f(sum[head])) * LN_2;
    const float all = sum[head] + exp2_approx(fmaf(tile.sink[head], LOG2_E, -base[head]));
    inverse[head] = tile.keys.y > 0 ? reciprocal_approx(all) : 0.0f;
  }
  // ---- O = P V, a part of the columns at a time; the part before leaves between the products
  float o[2][OUT_REGISTERS];
  float2 rotation;
  const uint32_t stage = shared_address(shared.stage[warp]);
  const int first_column = first_part * OUT_PART_COLUMNS;
#pragma unroll
  for (int part_id = 0; part_id < PARTS; part_id++) {
    const int slab = (first_part + part_id) * (OUT_PART_COLUMNS / SLAB_COLUMNS);
    const uint32_t values = descriptor(shared_address(shared.window[slab]), SLAB_BYTES);
    products_begin();
#pragma unroll
    for (int k = 0; k < KEY_STEPS; k++) {
      product_pv(o[part_id % 2], weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                 weights[4 * k + 3], values + k * descriptor_step(16 * SLAB_ROW_BYTES), k != 0);
      if (part_id > 0 && k < KEY_STEPS - 1) {
        warp_barrier();  // keeps the stores where they are written
        if (k % 4 == 0)
          store_columns(p, o[(part_id - 1) % 2] + k * 8, inverse, stage,
                        first_column + (part_id - 1) * OUT_PART_COLUMNS + k * 16, warp_row, lane);
      }
    }
    products_commit();
    if (part_id == 0) rotation = rotation_of(digits);
    products_wait<0>();
    products_ready(o[part_id % 2]);
  }
  if (window_free != 0) barrier_arrive(window_free);
  constexpr int LAST = PARTS - 1;
  if (p.rope_table != nullptr && first_part + PARTS == OUT_PARTS)
    rotate_back(o[LAST % 2], make_float2(rotation.x, -rotation.y), p.rope_adjacent, quad);
#pragma unroll
  for (int half = 0; half < 2; half++)
    store_columns(p, o[LAST % 2] + half * 32, inverse, stage,
                  first_column + LAST * OUT_PART_COLUMNS + half * SLAB_COLUMNS, warp_row, lane);
}
