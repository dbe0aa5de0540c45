// lockstep.c: max-reduces the status of the ranks of a lockstep group before a forward. Replicas
// that share experts step together: a replica without requests steps with an empty batch, and the
// step runs as a captured graph only if this is possible on all ranks. Without a lockstep group a
// rank decides alone.
#include "step/runner.h"

enum { CAPTURED = 1, WITH_TOKEN_RANKS = 2, RESET = 4 };

typedef struct rank_status {
  int32_t rows;
  int16_t progress, flags;
} rank_status;

rm_code rm_lockstep_agree(rm_runner *runner, rm_progress *progress, rm_error *err) {
  const rm_rank *rank = &runner->rank;
  const rm_plan *plan = runner->plan;
  rm_step_shape *shape = &runner->shape;
  rank_status all[RM_MAX_WORLD];
  size_t bytes[RM_MAX_WORLD];
  int flags = 0; // or of the flags of all ranks
  shape->is_captured = rm_graphs_serve(runner, &shape->with_token_ranks);
  shape->most_rows = plan->n_rows;
  if (!rm_rank_spans_dp(rank)) return RM_OK;
  const rank_status own = {
      .rows = (int32_t)plan->n_rows,
      .progress = (int16_t)*progress,
      .flags =
          (int16_t)(shape->is_captured * CAPTURED + shape->with_token_ranks * WITH_TOKEN_RANKS +
                    runner->graphs.was_reset * RESET),
  };
  for (int r = 0; r < rm_comm_size(rank->ep); r++) bytes[r] = sizeof own;
  const rm_code code = rm_comm_all_gather(rank->ep, &own, all, bytes, err);
  if (code) return code;
  for (int r = 0; r < rm_comm_size(rank->ep); r++) {
    if (all[r].progress > (int16_t)*progress) *progress = (rm_progress)all[r].progress;
    shape->most_rows = rm_max64(shape->most_rows, all[r].rows);
    shape->is_captured &= (all[r].flags & CAPTURED) != 0;
    flags |= all[r].flags;
  }
  shape->with_token_ranks = (flags & WITH_TOKEN_RANKS) != 0;
  // A rank that slept has no graphs, so all ranks capture again.
  if (flags & RESET) rm_graphs_clear(runner);
  runner->graphs.was_reset = 0;
  return RM_OK;
}
