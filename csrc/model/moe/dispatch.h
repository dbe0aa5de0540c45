// dispatch.h: moves rows between the ranks that own them (their home) and the ranks of their
// experts. Only bytes are copied.
//
//   plan   expert ids of the home rows → the number of rows from each rank to each expert, known to
//          all ranks
//   out    home rows → rows sorted by expert, on the experts' ranks; one copy for each choice
//   back   rows by expert, on the experts' ranks → rows by choice, on the home rank, sorted by
//          expert; plan->place is their index
//
// The two backends (model/rank.h) send different bytes and give the same rows. One expert's rows are
// ordered by rank, then row:
//
//   alltoall                  each row goes to the ranks of its experts, once for each choice
//   allgather_reducescatter   all rows and ids go to all ranks, and each rank picks the rows for
//                             its experts
//
// All ranks of the group make the same calls in the same order, with or without rows. A call that
// fails on one rank ends the group (comm/comm.h). All memory is allocated at creation. One call at a
// time on a dispatch.
#pragma once

#include "comm/comm.h"
#include "kernels.h"
#include "model/placement.h"
#include "model/rank.h"

typedef struct rm_dispatch rm_dispatch;

typedef struct rm_dispatch_options {
  rm_comm *ep; // view, of at least two ranks
  const rm_range *experts; // [ranks] of each rank, ascending and without gaps; copied
  int64_t n_experts, top_k;
  int64_t max_rows; // home rows of a rank
  size_t row_bytes;
  rm_dispatcher backend; // one of the two above
} rm_dispatch_options;

// RM_E_LIMIT: a number of rows that an int32 cannot count.
rm_code rm_dispatch_create(const rm_dispatch_options *options, rm_dispatch **out, rm_error *err);
void rm_dispatch_destroy(rm_dispatch *dispatch); // safe on NULL; does not destroy the comm
size_t rm_dispatch_bytes(const rm_dispatch *dispatch);
// Most rows that this rank can receive in one call.
int64_t rm_dispatch_max_arrive(const rm_dispatch *dispatch);

// Where the rows of one batch go. A view, valid until the next plan of the dispatch.
typedef struct rm_dispatch_plan {
  int64_t n_choices; // rows that back returns: top_k for each home row
  int64_t n_arrive; // rows that out returns
  int32_t *place; // [n_choices] index of a choice in the rows that back returns
  // [local experts + 1] first row of each expert in the rows that out returns
  int32_t *group_rows;
} rm_dispatch_plan;

// ids: [n_rows][top_k], each in 0 … n_experts − 1 and distinct within a row; n_rows ≤ max_rows.
rm_code rm_dispatch_plan_rows(rm_dispatch *dispatch, const int32_t *ids, int64_t n_rows,
                              const rm_dispatch_plan **plan, rm_error *err);

// The two moves, by the latest plan. `ctx`: threads to copy with. Results are views until the next
// call on the dispatch; they may be written to, and what out returned may be passed to back.
rm_code rm_dispatch_out(rm_dispatch *dispatch, const rm_ctx *ctx, const void *x, char **rows,
                        rm_error *err);
rm_code rm_dispatch_back(rm_dispatch *dispatch, const rm_ctx *ctx, const void *rows, char **choices,
                         rm_error *err);
