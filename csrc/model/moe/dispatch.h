// dispatch.h: moves rows between their home ranks and the ranks of their experts. Only bytes are
// copied, so a row may have any element type: the engine uses it for activations, and an autograd
// function of a trainer for activations and gradients.
//
//   plan      expert ids of the home rows → the number of rows from each rank to each expert, on
//             all ranks. Rows with negative ids are padding and are not sent
//   out       home rows → rows sorted by expert, on the experts' ranks; one copy for each choice
//   back      rows by expert, on the experts' ranks → rows by choice, on the home rank, sorted by
//             expert; plan->place is their index
//   out_each  the reverse of back: one row for each choice → rows by expert, on the experts' ranks.
//             An autograd function sends gradients of back's results by out_each, and gradients of
//             out's results by back
//
// Backends (model/rank.h) send different bytes and return the same rows; one expert's rows are
// ordered by rank, then row:
//
//   alltoall                  each row goes to the ranks of its experts, once for each choice
//   allgather_reducescatter   all rows and ids go to all ranks, and each rank picks the rows for
//                             its experts
//   local_allreduce           every rank already has the same rows and ids, and picks the rows for
//                             its experts; all outputs go to every rank
//   disabled                  one rank; with one rank every backend does the same
//
// All ranks of the group make the same calls in the same order, with or without rows. A call that
// fails on one rank ends the group (comm/comm.h). All memory is allocated at creation. One thread
// at a time uses a dispatch, which may have many plans.
#pragma once

#include "comm/comm.h"
#include "kernels.h"
#include "model/placement.h"
#include "model/rank.h"

typedef struct rm_dispatch rm_dispatch;

typedef struct rm_dispatch_options {
  rm_comm *ep; // view; NULL: one rank
  const rm_range *experts; // [ranks] experts of each rank, ascending and without gaps; copied
  int64_t n_experts, top_k; // top_k in 1 … RM_MAX_TOP_K
  int64_t max_rows; // home rows of a rank in one plan, padding included
  size_t max_row_bytes;
  rm_dispatcher backend;
} rm_dispatch_options;

// RM_E_CONFIG names the wrong option; RM_E_LIMIT: more choices than an int32 can count.
rm_code rm_dispatch_create(const rm_dispatch_options *options, rm_dispatch **out, rm_error *err);
void rm_dispatch_destroy(rm_dispatch *dispatch); // safe on NULL; does not destroy the comm
size_t rm_dispatch_bytes(const rm_dispatch *dispatch);
// The most rows that this rank can receive in one call.
int64_t rm_dispatch_max_arrive(const rm_dispatch *dispatch);

// The destinations of one batch's rows. Owned by the caller, who may fill a plan again.
typedef struct rm_dispatch_plan {
  int64_t n_rows; // home rows, padding included
  int64_t n_choices; // rows that back returns: top_k for each row that is not padding
  int64_t n_arrive; // rows that out returns
  int32_t *place; // [n_rows][top_k] index of a choice in the rows that back returns; −1: padding
  int32_t *ids; // [n_choices] without padding
  int32_t *group_rows; // [local experts + 1] first row of each expert in the rows that out returns
  // [ranks][n_experts + 3] first choice of each expert among a rank's choices, then a digest of the
  // rank's ids.
  int32_t *starts;
} rm_dispatch_plan;

rm_code rm_dispatch_plan_create(const rm_dispatch *dispatch, rm_dispatch_plan **out, rm_error *err);
void rm_dispatch_plan_destroy(rm_dispatch_plan *plan); // safe on NULL
// ids: [n_rows][top_k], distinct within a row, or all negative; else RM_E_REQUEST.
rm_code rm_dispatch_plan_fill(rm_dispatch *dispatch, rm_dispatch_plan *plan, const int32_t *ids,
                              int64_t n_rows, rm_error *err);

// Called before a move: compares a description of it (at most RM_DISPATCH_TEXT − 1 bytes, such as
// op and dtype) over all ranks. RM_E_COLLECTIVE_MISMATCH quotes two that differ. Checks row_bytes
// first.
enum { RM_DISPATCH_TEXT = 128 };
rm_code rm_dispatch_agree(rm_dispatch *dispatch, const char *what, size_t row_bytes, rm_error *err);

// The three moves. row_bytes is the same on all ranks, at most max_row_bytes. `ctx`: threads to
// copy with; NULL: the calling thread only. Results are views until the next call on the dispatch;
// the caller may write to them and pass out's result to back.
rm_code rm_dispatch_out(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                        const void *x, size_t row_bytes, char **rows, rm_error *err);
rm_code rm_dispatch_back(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                         const void *rows, size_t row_bytes, char **choices, rm_error *err);
rm_code rm_dispatch_out_each(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                             const void *choices, size_t row_bytes, char **rows, rm_error *err);
