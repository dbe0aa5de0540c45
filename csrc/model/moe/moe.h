// moe.h: the mixture-of-experts block of one layer, in four steps: route (which experts, with what gates), dispatch (rows to where
// their experts are, sorted by expert), experts (two grouped gemms with SwiGLU between), combine (gate-weighted tree sum at the
// token's home). On one rank dispatch is a permutation in memory. Between ranks a token dispatcher moves rows, one of two ways:
//
//   stay     every rank of the tp group has all rows; outputs are exchanged. `disabled` (each expert is cut over tp by columns) and
//            `local_allreduce` (each rank has experts of its own, and gives every rank only that one's columns of their outputs).
//   travel   a rank has the rows it is home of; inputs go to the experts' ranks and outputs come back. `allgather_reducescatter`
//            and `alltoall` differ in what they send out (dispatch.h).
//
// Whichever way, an expert's output is one row of bits, and the home adds the rows of a token up in the contract's tree, so that
// all ways give the bits of one rank.
#pragma once

#include "base/devices.h"
#include "base/fields.h"
#include "model/moe/dispatch.h"
#include "model/params.h"
#include "model/shard.h"

// What travels, on the host as well: the dispatcher is the host's. Rows are T [hidden].
typedef struct rm_moe_stage {
  rm_mirror mirror;             // owned: the block of all that follows, the host's addresses
  char *x;                      // [home rows] inputs
  int32_t *ids;                 // [home rows][top_k]
  char *here;                   // [rows at this rank's experts] inputs, then outputs
  int32_t *group_rows;          // [experts here + 1]
  char *choices;                // [home rows·top_k] outputs
  int32_t *place;               // [home rows][top_k]
} rm_moe_stage;

// Scratch of the block, sized for max_rows rows a step on every rank; reused by every layer.
typedef struct rm_moe {
  const rm_spec *spec;          // view
  const rm_placement *here;     // view
  const rm_device *device;      // view
  const rm_rank *rank;          // view
  const rm_kernels *kernels;    // its
  rm_dtype dtype;
  rm_dispatcher dispatcher;
  int64_t max_rows;
  int32_t *ids;                 // [rows][top_k], best first
  float *gates;                 // [rows][top_k]
  char *inner;                  // T [rows at this rank's experts][moe_intermediate]
  rm_comm *ep;                  // view; NULL: ep = 1. Of blocks in the device's memory
  // where rows stay
  int32_t *place;               // [rows][top_k]
  rm_mirror groups;             // owned: of the next alone
  int32_t *group_rows;          // [n_experts + 1] the host's address
  char *sorted;                 // T [rows·top_k][hidden] inputs by expert, then outputs by expert
  char *part;                   // T [rows·top_k][hidden columns of this rank]; where tp > 1
  rm_range *experts;            // [ep] of each rank
  rm_block *send, *recv;        // [ep]
  // where rows travel
  rm_dispatch *dispatch;        // owned; NULL where rows stay
  rm_dispatch_plan *plan;       // owned
  rm_moe_stage stage;           // owned; where the host cannot touch the device's memory
} rm_moe;

enum { RM_MOE_FIELDS = 6 };
rm_code rm_moe_create(rm_moe *moe, const rm_params *params, const rm_device *device, const rm_rank *rank, int64_t max_rows, rm_error *err);
void rm_moe_destroy(rm_moe *moe);
size_t rm_moe_fields(rm_moe *moe, rm_field fields[RM_MOE_FIELDS]);   // returns how many
size_t rm_moe_bytes(const rm_moe *moe);                              // of what it holds beside its fields

// Whether rows travel: the block then takes and gives home rows.
static inline int rm_moe_takes_home_rows(const rm_moe *moe) { return moe->dispatch != NULL; }

// x ← block(x), T [rows][hidden]; of the output this rank's columns alone, in their place. routed: the chosen ids, row r's at
// routed + r·routed_stride.
rm_code rm_moe_stay(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard, const rm_layer_params *layer, const char *weights, char *x,
                    int64_t rows, int16_t *routed, int64_t routed_stride, rm_error *err);
// out ← block(x) of this rank's home rows, T [rows][hidden] both; they may be the same. rows may be 0: the rank still takes part.
rm_code rm_moe_travel(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const char *x, char *out,
                      int64_t rows, int16_t *routed, int64_t routed_stride, rm_error *err);

// ---------------------------------------------------------------------------------------------- shared by moe.c and travel.c
rm_code rm_moe_stage_create(rm_moe *moe, int64_t home_rows, rm_error *err);   // nothing where the memory is one
void rm_moe_route(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const void *x, int64_t rows,
                  int16_t *routed, int64_t routed_stride);
// The two grouped gemms of the experts here. group_rows: [experts here + 1] rows of x and y, of which there are m; x and y are whole
// rows, of whose columns a rank may compute its own alone (ep = 1).
rm_gemm_args rm_moe_up(const rm_moe *moe, const rm_layer_params *layer, const char *weights, const int32_t *group_rows, int64_t m);
rm_gemm_args rm_moe_down(const rm_moe *moe, const rm_layer_params *layer, const char *weights, const int32_t *group_rows, int64_t m);
// out: T [rows][hidden]; y: T [rows·top_k][hidden] by place, [rows][top_k].
void rm_moe_combine(const rm_moe *moe, const rm_ctx *ctx, void *out, const void *y, const int32_t *place, int64_t hidden, int64_t rows);
