// lockstep.c: max-reduces the status of the ranks of a lockstep group before a forward. Replicas
// that share experts step together: a replica without requests steps with an empty batch, and the
// step runs as a captured graph only if this is possible on all ranks. Without a lockstep group a
// rank decides alone.
#include "step/runner.h"

typedef struct rank_status {
  int32_t rows;
  int16_t progress, flags;
} rank_status;

rm_code rm_lockstep_agree(rm_runner *runner, rm_progress *progress, rm_error *err) {
  const rm_rank *rank = &runner->rank;
  const rm_plan *plan = runner->plan;
  rm_step_shape *shape = &runner->shape;
  rank_status all[RM_MAX_WORLD];
  int flags = rm_graphs_flags(runner->graphs, plan);
  const rank_status own = {
      .rows = (int32_t)plan->n_rows, .progress = (int16_t)*progress, .flags = (int16_t)flags};
  const int n = rm_rank_spans_dp(rank) ? rm_comm_size(rank->ep) : 0;
  shape->most_rows = plan->n_rows;
  RM_TRY(n ? rm_comm_all_gather(rank->ep, &own, all, sizeof own, err) : RM_OK);
  for (int r = 0; r < n; r++) {
    if (all[r].progress > (int16_t)*progress) *progress = (rm_progress)all[r].progress;
    shape->most_rows = rm_max64(shape->most_rows, all[r].rows);
    flags |= all[r].flags;
  }
  shape->padded = rm_graphs_agree(runner->graphs, flags, shape->most_rows);
  shape->with_token_ranks = shape->padded && flags & RM_GRAPHS_TOKEN_RANKS;
  return RM_OK;
}
