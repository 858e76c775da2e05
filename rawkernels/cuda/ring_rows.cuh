// Which tokens of a call are stored in their ring, and where.
#pragma once
#include "common.cuh"

// Positions below sink_tokens stay where they are; the others share the rest of the ring.
__device__ __forceinline__ int64_t ring_index(int32_t position, int32_t ring_len,
                                              int32_t sink_tokens) {
  if (position < sink_tokens) return position;
  return sink_tokens + (position - sink_tokens) % (ring_len - sink_tokens);
}

// False for padding and ids of no slot, for negative positions, and for a token whose row a later
// token of the same call takes (a chunk longer than the ring): two writers of one row would race.
__device__ __forceinline__ bool is_stored(const int32_t* state_ids, const int32_t* positions,
                                          int64_t token, int64_t num_tokens, int32_t ring_len,
                                          int32_t sink_tokens, int32_t num_state_slots) {
  int32_t state_id = __ldg(state_ids + token), position = __ldg(positions + token);
  if (state_id < 0 || state_id >= num_state_slots || position < 0) return false;
  int32_t turn = ring_len - sink_tokens;
  int64_t later = token + turn;
  if (later >= num_tokens || position < sink_tokens) return true;
  bool same = __ldg(state_ids + later) == state_id &&
              __ldg(positions + later) == (int64_t)position + turn;
  return !same;
}
