// Which tokens of a call are stored in their ring.
#pragma once
#include "common.cuh"

// False for padding and ids of no slot, for negative positions, and for a token whose row a later
// token of the same call takes (a chunk longer than the ring): two writers of one row would race.
__device__ __forceinline__ bool is_stored(const int32_t* state_ids, const int32_t* positions,
                                          int64_t token, int64_t num_tokens, int32_t ring_len,
                                          int32_t num_state_slots) {
  int32_t state_id = __ldg(state_ids + token), position = __ldg(positions + token);
  if (state_id < 0 || state_id >= num_state_slots || position < 0) return false;
  int64_t later = token + ring_len;
  if (later >= num_tokens) return true;
  bool same = __ldg(state_ids + later) == state_id &&
              __ldg(positions + later) == (int64_t)position + ring_len;
  return !same;
}
