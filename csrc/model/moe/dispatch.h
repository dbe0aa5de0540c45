// dispatch.h: rows between the ranks that have them (their home) and the ranks of their experts. Bytes move, nothing is computed, and
// a row may be of any element type: the engine and a trainer's autograd function are callers of the same three moves.
//
//   plan      ids of the home's rows → who gives how many rows for which expert to whom, known to all; a row whose ids are negative is
//             padding and goes nowhere
//   out       rows of the home → rows sorted by expert, at the experts; one copy for each choice
//   back      rows by expert, at the experts → rows by choice, at the home: sorted by expert, each at its plan's place
//   out_each  back turned round: a row for each choice, as back gives them → rows by expert, at the experts. A trainer's gradients of
//             what back gave go this way, those of what out gave go by back.
//
// Backends differ in what goes out (model/rank.h); all give the same bytes, but that the order of one expert's rows is by rank, then row:
//
//   alltoall                  each row goes to the ranks of its experts, once for each choice
//   allgather_reducescatter   all rows go to all ranks with their ids, and each rank picks those that it has experts for
//   local_allreduce           every rank has all rows already, the same with the same ids, and takes those for its experts; all
//                             outputs go back to every rank
//   disabled                  one rank; with one rank every backend is this
//
// All ranks of the group make the same calls in the same order, those without rows too. A call that fails on one rank ends the group
// (comm/comm.h). Nothing is allocated after creation. One call at a time on a dispatch; plans of it may be many.
#pragma once

#include "comm/comm.h"
#include "kernels.h"
#include "model/placement.h"
#include "model/rank.h"

typedef struct rm_dispatch rm_dispatch;

typedef struct rm_dispatch_options {
  rm_comm *ep;                  // view; NULL: one rank
  const rm_range *experts;      // [ranks] of each rank, ascending, all of them together; copied
  int64_t n_experts, top_k;     // top_k in 1 … RM_MAX_TOP_K
  int64_t max_rows;             // that any rank is home of in one plan, padding included
  size_t max_row_bytes;
  rm_dispatcher backend;
} rm_dispatch_options;

// RM_E_CONFIG names the option that is wrong, RM_E_LIMIT a number of rows that an int32 cannot count.
rm_code rm_dispatch_create(const rm_dispatch_options *options, rm_dispatch **out, rm_error *err);
void rm_dispatch_destroy(rm_dispatch *dispatch);   // safe on NULL; the comm is left as it is
size_t rm_dispatch_bytes(const rm_dispatch *dispatch);
int64_t rm_dispatch_max_arrive(const rm_dispatch *dispatch);   // rows by expert that can come to this rank in one call

// Where the rows of one batch go. Owned by the caller, and filled as often as is wanted.
typedef struct rm_dispatch_plan {
  int64_t n_rows;               // of the home, padding included
  int64_t n_choices;            // top_k for each row that is no padding: rows that back gives
  int64_t n_arrive;             // rows that out gives
  int32_t *place;               // [n_rows][top_k] of a choice in what back gives; −1: padding
  int32_t *ids;                 // [n_choices] of the rows that are no padding
  int32_t *group_rows;          // [experts here + 1] where in what out gives the rows of an expert begin
  int32_t *starts;              // [ranks][n_experts + 3] where in a rank's choices those of an expert begin; then a digest of its ids
} rm_dispatch_plan;

rm_code rm_dispatch_plan_create(const rm_dispatch *dispatch, rm_dispatch_plan **out, rm_error *err);
void rm_dispatch_plan_destroy(rm_dispatch_plan *plan);   // safe on NULL
// ids: [n_rows][top_k], those of a row distinct, or all negative. RM_E_REQUEST where they are not.
rm_code rm_dispatch_plan_fill(rm_dispatch *dispatch, rm_dispatch_plan *plan, const int32_t *ids, int64_t n_rows, rm_error *err);

// For a caller that knows more of a move than its sizes, before it: all ranks say the same of it, at most RM_DISPATCH_SAID − 1 bytes, or
// RM_E_COLLECTIVE_MISMATCH quotes two that do not. row_bytes is checked first.
enum { RM_DISPATCH_SAID = 128 };
rm_code rm_dispatch_agree(rm_dispatch *dispatch, const char *what, size_t row_bytes, rm_error *err);

// The three moves. row_bytes is the same on all ranks, up to max_row_bytes. `ctx` lends its threads; NULL: the caller alone. What they
// give is the dispatch's, a view until the next call on it; it may be written to, and out's may be what back takes.
rm_code rm_dispatch_out(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan, const void *x, size_t row_bytes,
                        char **rows, rm_error *err);
rm_code rm_dispatch_back(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan, const void *rows, size_t row_bytes,
                         char **choices, rm_error *err);
rm_code rm_dispatch_out_each(rm_dispatch *dispatch, const rm_ctx *ctx, const rm_dispatch_plan *plan, const void *choices, size_t row_bytes,
                             char **rows, rm_error *err);
