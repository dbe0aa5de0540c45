// moe.h: the mixture-of-experts block of one layer, in four steps: route (which experts, with what gates), dispatch (rows to where
// their experts are, sorted by expert), experts (two grouped gemms with SwiGLU between), combine (gate-weighted tree sum at the
// token's home). On one rank dispatch is a permutation in memory. Between ranks a token dispatcher moves rows, one of two ways:
//
//   stay     every rank of the tp group has all rows; outputs are exchanged. `disabled` (each expert is cut over tp by columns) and
//            `local_allreduce` (each rank has experts of its own, and gives every rank only that one's columns of their outputs).
//   travel   a rank has the rows it is home of; inputs go to the experts' ranks and outputs come back. `allgather_reducescatter`
//            and `alltoall` differ in what they send out (dispatch.h).
//
// Where the device's memory is not the host's, either way has a static form besides, whose exchanges have sizes that follow from the
// number of rows alone (slots.c): nothing in it waits for the device. It goes a run of rows after another, so that its memory is bounded
// whatever the experts. By way of the host (staged.h) steps of few rows have it; by NCCL all have, and the counting form's memory is
// left out.
//
// Whichever way, an expert's output is one row of bits, and the home adds the rows of a token up in the contract's tree, so that
// all ways give the bits of one rank.
#pragma once

#include "base/fields.h"
#include "device/devices.h"
#include "model/moe/dispatch.h"
#include "model/params.h"
#include "model/shard.h"

// What dispatches, on the host as well: the dispatcher is the host's. Rows are T [hidden].
typedef struct rm_moe_stage {
  rm_paired paired;             // owned: the block of all that follows, the host's addresses
  char *x;                      // [home rows] inputs
  int32_t *ids;                 // [home rows][top_k]
  char *here;                   // [rows at this rank's experts] inputs, then outputs
  int32_t *group_rows;          // [experts here + 1]
  char *choices;                // [home rows·top_k] outputs
  int32_t *place;               // [home rows][top_k]
} rm_moe_stage;

// Of a step in the static form: what follows from its rows.
typedef struct rm_static_sizes {
  int64_t home_rows;            // of each rank, some of them empty
  int64_t pitch;                // the same with their ids behind them, in rows
  int64_t each;                 // outputs that a rank gives back of each
} rm_static_sizes;

// What the static form has of its own; nothing where rows = 0.
typedef struct rm_moe_static {
  rm_mesh mesh;
  int64_t rows;                 // of a run at most
  int64_t most_rows;            // of a step that has this form, at most
  rm_paired none;               // owned: [home_rows][top_k] −1, ids of rows that are empty
  char *all;                    // [ep][pitch] rows of all homes and their ids; where rows travel
  int32_t *own;                 // [homes][pitch][each] choices of this rank's experts; where rows stay, one home of all rows
  int32_t *from;                // [homes][pitch][each] where their outputs are in `sorted`
  int32_t *group_rows;          // [experts here + 1] the device's alone
  char *back;                   // T [homes][pitch][each][hidden] outputs
} rm_moe_static;

// Scratch of the block, sized for max_rows rows a step on every rank; reused by every layer.
typedef struct rm_moe {
  const rm_spec *spec;          // view
  const rm_placement *here;     // view
  const rm_device *device;      // view
  const rm_rank *rank;          // view
  const rm_kernels *kernels;    // its
  rm_dtype dtype;
  rm_dispatcher dispatcher;
  int dispatches;                  // rows do: the block takes and gives home rows
  int64_t max_rows;             // of the block at a time; of a run where all steps have the static form
  int32_t *ids;                 // [rows][top_k], best first
  float *gates;                 // [rows][top_k]
  char *inner;                  // T [rows at this rank's experts][moe_intermediate]
  rm_comm *ep;                  // view; NULL: ep = 1. Of blocks in the device's memory
  int32_t *place;               // [rows][top_k]; of rows that travel those of all homes, in the static form
  char *sorted;                 // T [rows·top_k][hidden] inputs by expert, then outputs by expert; the same
  rm_block *send, *recv;        // [ep]
  rm_moe_static fixed;           // owned
  // where rows stay
  rm_paired groups;             // owned: of the next alone
  int32_t *group_rows;          // [n_experts + 1] the host's address
  char *part;                   // T [rows·top_k][hidden columns of this rank]; where tp > 1
  rm_range *experts;            // [ep] of each rank
  // where rows travel and are counted
  rm_dispatch *dispatch;        // owned; else NULL
  rm_dispatch_plan *plan;       // owned
  rm_moe_stage stage;           // owned; where the host cannot touch the device's memory
} rm_moe;

// static_rows: of a step in the static form at most, where ep > 1 and the experts' group is by way of the host; by NCCL all steps have
// it. 0: there is none.
enum { RM_STATIC_FIELDS = 5, RM_MOE_FIELDS = 6 + RM_STATIC_FIELDS };
rm_code rm_moe_create(rm_moe *moe, const rm_params *params, const rm_device *device, const rm_rank *rank, int64_t max_rows,
                      int64_t static_rows, rm_error *err);
void rm_moe_destroy(rm_moe *moe);
size_t rm_moe_fields(rm_moe *moe, rm_field fields[RM_MOE_FIELDS]);   // returns how many
size_t rm_moe_bytes(const rm_moe *moe);                              // of what it holds beside its fields

// Whether a step has the static form, in which the rank with most rows has so many. All ranks that exchange say the same number.
static inline int rm_moe_is_static(const rm_moe *moe, int64_t most_rows) {
  return moe->fixed.rows > 0 && most_rows <= moe->fixed.most_rows;
}
// Rows of a run of the static form, of steps of so many at most: 512 of each rank's own, or as many as have RM_STATIC_BYTES in one
// exchange, whichever is less, but one. Scratch is about two and a half times that, and a step of more rows goes run after run: 30 B of
// parameters with 128 experts, 8 of them chosen, over 8 ranks exchange 128 MiB of 512 rows; a model with 7168 hidden and 256 experts over
// 64 ranks has runs of 73 rows.
enum { RM_STATIC_ROWS = 512, RM_STATIC_BYTES = 256 << 20 };
int64_t rm_static_run_rows(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows);
// Bytes that an exchange of the static form sends or receives at most, in runs of up to so many rows.
size_t rm_static_exchanged(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows);

// x ← block(x), T [rows][hidden]; of the output this rank's columns alone, in their place. routed: the chosen ids, row r's at
// routed + r·routed_stride.
rm_code rm_moe_replicated(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard, const rm_layer_params *layer, const char *weights, char *x,
                          int64_t rows, int16_t *routed, int64_t routed_stride, rm_error *err);
// out ← block(x) of this rank's home rows, T [rows][hidden] both; they may be the same. rows may be 0: the rank still takes part.
// most_rows: of the step on the rank that has most, not home rows alone.
rm_code rm_moe_dispatched(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const char *x, char *out,
                          int64_t rows, int64_t most_rows, int16_t *routed, int64_t routed_stride, rm_error *err);

// ---------------------------------------------------------------------------------------------- shared by moe.c, travel.c and slots.c
static inline size_t rm_moe_row_bytes(const rm_moe *moe) { return (size_t)moe->spec->hidden_size * rm_dtype_bytes(moe->dtype); }
rm_static_sizes rm_static_sizes_of(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows);   // rows: of the step
static inline rm_static_sizes rm_moe_static_most(const rm_moe *moe) {
  return moe->fixed.rows ? rm_static_sizes_of(moe->spec, &moe->fixed.mesh, moe->dtype, moe->fixed.rows) : (rm_static_sizes){0};
}
// Where all steps have the static form max_rows becomes that of a run.
rm_code rm_moe_static_create(rm_moe *moe, const rm_mesh *mesh, int64_t static_rows, rm_error *err);
void rm_moe_static_fields(rm_moe *moe, rm_field fields[RM_STATIC_FIELDS]);
// Outputs of a run's rows, which were routed, to `part` by place.
rm_code rm_moe_static_replicated(rm_moe *moe, const rm_ctx *ctx, const rm_shard *shard, const rm_layer_params *layer, const char *weights,
                                 const char *x, int64_t rows, rm_error *err);
// rm_moe_dispatched in the static form.
rm_code rm_moe_static_dispatched(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const char *x,
                                 char *out, int64_t rows, int64_t most_rows, int16_t *routed, int64_t routed_stride, rm_error *err);
rm_code rm_moe_stage_create(rm_moe *moe, int64_t home_rows, rm_error *err);   // nothing where the memory is one
// ids: [rows][top_k] of the experts, for combine too.
void rm_moe_route(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const void *x, int32_t *ids,
                  int64_t rows, int16_t *routed, int64_t routed_stride);
// The two grouped gemms of the experts here. group_rows: [experts here + 1] rows of x and y, of which there are m; x and y are whole
// rows, of whose columns a rank may compute its own alone (ep = 1).
rm_gemm_args rm_moe_up(const rm_moe *moe, const rm_layer_params *layer, const char *weights, const int32_t *group_rows, int64_t m);
rm_gemm_args rm_moe_down(const rm_moe *moe, const rm_layer_params *layer, const char *weights, const int32_t *group_rows, int64_t m);
// out: T [rows][hidden]; y: T [rows·top_k][hidden] by place, [rows][top_k].
void rm_moe_combine(const rm_moe *moe, const rm_ctx *ctx, void *out, const void *y, const int32_t *ids, const int32_t *place,
                    int64_t hidden, int64_t rows);
