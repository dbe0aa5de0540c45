// dispatch.h: moves rows between the ranks that own them (their home) and the ranks of their
// experts, in the memory of the CPU. Only bytes are copied.
//
//   plan   expert ids of the home rows → the number of rows from each rank to each expert, known to
//          all ranks
//   out    home rows → rows sorted by expert, on the experts' ranks; one copy for each choice
//   back   rows by expert, on the experts' ranks → rows by choice, on the home rank, sorted by
//          expert; plan->place is their index
//
// The two backends (model/rank.h) send different bytes and give the same rows. One expert's rows
// are ordered by rank, then row:
//
//   alltoall                  each row goes to the ranks of its experts, once for each choice
//   allgather_reducescatter   all rows and ids go to all ranks, and each rank picks the rows for
//                             its experts
//
// All ranks of the group make the same calls in the same order, with or without rows. A call that
// fails on one rank ends the group (comm/comm.h). All memory is allocated at creation.
#pragma once

#include "comm/comm.h"
#include "kernels.h"
#include "model/placement.h"

struct rm_moe;

typedef struct rm_dispatch {
  rm_comm *ep; // view: for host memory, of at least two ranks
  int n_ranks, me;
  int64_t n_experts, top_k;
  int64_t max_rows; // home rows of a rank
  int64_t max_arrive; // rows that this rank can receive in one call
  size_t row_bytes;
  int sees_all; // all rows go to all ranks
  const rm_range *experts; // view: [n_ranks] of each rank, ascending and without gaps
  rm_range here; // experts of this rank
  // The plan: where the rows of one batch go.
  int64_t n_choices; // rows that back returns: top_k for each home row
  int64_t n_arrive; // rows that out returns
  int32_t *place; // [n_choices] index of a choice in the rows that back returns
  int32_t *group_rows; // [local experts + 1] first row of each expert in the rows that out returns
  // dispatch.c
  int32_t *cursor; // [n_experts]
  int32_t *starts; // [n_ranks][n_experts + 1] first choice of each expert among a rank's choices
  int64_t *home_rows; // [n_ranks]; sees_all
  const int32_t *ids; // view: the home rows' of the plan
  int32_t *all_ids; // [n_ranks·max_rows][top_k]; sees_all
  char *choices; // rows [max_rows·top_k] of the home by expert
  char *arrived; // rows [max_arrive] by rank, then expert
  char *work; // rows [max_arrive] by expert, then rank
  char *all_rows; // rows [n_ranks·max_rows]; sees_all
  void *block; // owned: all of these arrays
  size_t block_bytes;
} rm_dispatch;

// For up to max_rows home rows of the block, whose `rank` and `experts` are set. RM_E_LIMIT: a
// number of rows that an int32 cannot count.
rm_code rm_dispatch_create(const struct rm_moe *moe, int64_t max_rows, rm_dispatch *out,
                           rm_error *err);
