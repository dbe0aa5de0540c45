// moe.h: the mixture-of-experts block of one layer, in four steps: route (experts and gates of each
// row), dispatch (rows to the ranks of their experts, sorted by expert), experts (two grouped gemms
// with the activation between), combine (gate-weighted sum on the token's home rank). On one rank
// dispatch is a permutation in memory. Several ranks use one of two forms:
//
//   replicated   every rank of the tp group has all rows; outputs are exchanged. `disabled` (each
//                expert is sharded over tp by columns) and `local_allreduce` (a rank has whole
//                experts, and sends each rank only that rank's columns of their outputs).
//   dispatched   a rank has its home rows; inputs go to the ranks of their experts and outputs come
//                back. `allgather_reducescatter` and `alltoall` differ in what they send
//                (dispatch.h).
//
// On the CPU exchanges have the sizes of what is chosen. On a device with ep > 1 each form has a
// static variant, whose exchanges have sizes that depend on the number of rows alone
// (static_dispatch.c), so that the host does not wait for the device. Long steps are split into
// passes over some of the rows, which bounds the memory for any number of experts.
//
// In all forms the home rank adds the experts' outputs for a token in the contract's tree, so all
// are bit-identical to one rank. The thread that uses the model calls these functions.
#pragma once

#include "base/fields.h"
#include "device/devices.h"
#include "model/moe/dispatch.h"
#include "model/params.h"
#include "model/shard.h"

// Sizes of the static form for a step of a given number of rows.
typedef struct rm_static_sizes {
  int64_t home_rows; // of each rank; some are padding
  int64_t pitch; // rows, including the space of the expert ids that follow them
  int64_t each; // outputs that a rank returns for each row
} rm_static_sizes;

// Buffers of the static form.
typedef struct rm_moe_static {
  rm_mirrored_buffer none; // owned: [home_rows][top_k] −1, the expert ids of padding rows
  char *all; // [ep][pitch] rows and expert ids of all ranks; dispatched only
  // [homes][pitch][each] choices among this rank's experts; replicated: homes = 1, all rows.
  int32_t *own;
  int32_t *from; // [homes][pitch][each] index of each choice's output in `sorted`
  int32_t *group_rows; // [local experts + 1] on the device only
  char *back; // T [homes][pitch][each][hidden] outputs
} rm_moe_static;

// Scratch of the block, sized for max_rows rows per step on every rank; every layer uses it.
typedef struct rm_moe {
  const rm_params *params; // view, like the next seven
  const rm_spec *spec;
  const rm_placement *here;
  const rm_device *device;
  const rm_kernels *kernels; // the device's op table
  const rm_rank *rank;
  rm_shard *shard;
  const rm_ctx *ctx;
  rm_dtype dtype;
  int dispatches; // input and output are home rows
  int is_static; // uses the static form
  int64_t max_rows; // of a pass
  int32_t *ids; // [rows][top_k], best first
  float *gates; // [rows][top_k]
  char *inner; // T [rows of this rank's experts][moe_intermediate]
  rm_comm *ep; // view, for device memory; NULL: ep = 1
  // [rows][top_k] index of each choice's output; static and dispatched: for all ranks' rows.
  int32_t *place;
  char *sorted; // T [rows·top_k][hidden] inputs by expert, then outputs by expert; sized as `place`
  rm_range *experts; // owned, [ep] experts of each rank
  rm_moe_static fixed; // owned
  // replicated
  int32_t *group_rows; // [n_experts + 1]
  char *part; // T [rows·top_k][hidden columns of this rank]; where tp > 1
  rm_dispatch dispatch; // owned; dispatched, on the CPU
} rm_moe;

// Rows of one layer.
typedef struct rm_moe_rows {
  const rm_layer_params *layer;
  const char *weights;
  const char *x; // T [rows][hidden]
  char *out; // T [rows][hidden], may be x
  int64_t rows; // may be 0: the rank still takes part
  int64_t most; // the rows of the step, on the rank that has most; of a pass: its home rows there
  int16_t *routed; // [rows][n_moe_layers][top_k], out: the chosen ids of this layer
} rm_moe_rows;

// shard and ctx may be set up later. max_rows: of a step.
enum { RM_STATIC_FIELDS = 5, RM_MOE_FIELDS = 7 + RM_STATIC_FIELDS };
rm_code rm_moe_create(rm_moe *moe, const rm_params *params, const rm_device *device,
                      const rm_rank *rank, rm_shard *shard, const rm_ctx *ctx, int64_t max_rows,
                      rm_error *err);
void rm_moe_destroy(rm_moe *moe);
size_t rm_moe_fields(rm_moe *moe, rm_field fields[RM_MOE_FIELDS]); // returns how many
size_t rm_moe_bytes(const rm_moe *moe); // memory besides its fields

// Max rows of a pass of the static form: RM_STATIC_ROWS of each rank's own, or as many as make
// exchanges of RM_STATIC_BYTES, whichever is less, but at least one. Buffers take about 2.5 times
// those bytes. Examples: Qwen3-30B-A3B (top 8 of 128 experts) on 8 ranks exchanges 128 MiB for 512
// rows; a model with hidden size 7168 and 256 experts on 64 ranks has passes of 73 rows.
enum { RM_STATIC_ROWS = 512, RM_STATIC_BYTES = 256 << 20 };
int64_t rm_static_run_rows(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows);
// Max bytes that an exchange of the static form sends or receives, in passes of so many rows.
size_t rm_static_exchanged(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows);

// out ← block(x). Replicated: rows and their x are the tp group's, and only this rank's columns of
// out are written. Dispatched: this rank's home rows.
rm_code rm_moe_forward(rm_moe *moe, const rm_moe_rows *rows, rm_error *err);

// ------------------------------------------------------------- shared by the files of this folder
static inline size_t rm_moe_row_bytes(const rm_moe *moe) {
  return (size_t)moe->spec->hidden_size * rm_dtype_bytes(moe->dtype);
}
rm_static_sizes rm_static_sizes_of(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype,
                                   int64_t rows); // rows: of the step
// The sizes of the largest pass; zeros in the counted form.
rm_static_sizes rm_moe_static_most(const rm_moe *moe);
rm_code rm_moe_static_create(rm_moe *moe, rm_error *err); // sets max_rows to that of a pass
void rm_moe_static_fields(rm_moe *moe, rm_field fields[RM_STATIC_FIELDS]);
// One pass of each form. static_replicated is called after rm_moe_route: it computes this rank's
// experts and exchanges outputs, into `part`.
rm_code rm_moe_static_replicated(rm_moe *moe, const rm_moe_rows *at, rm_error *err);
rm_code rm_moe_static_dispatched(rm_moe *moe, const rm_moe_rows *at, rm_error *err);
rm_code rm_moe_counted_dispatched(rm_moe *moe, const rm_moe_rows *at, rm_error *err);
// Sends each rank its columns of this rank's outputs, T [rows][hidden], and receives this rank's
// columns of all ranks' outputs, in the order of ranks, into `part`. counts: rows of each rank.
rm_code rm_moe_exchange_columns(rm_moe *moe, char *outputs, const int64_t counts[], rm_error *err);
// ids: [rows][top_k], out.
void rm_moe_route(rm_moe *moe, const rm_moe_rows *at, int32_t *ids);
// out ← this rank's experts of x, T [m][hidden] by expert; out may be x. group_rows: [local
// experts + 1] in rows of x. With ep = 1 the tp group exchanges `inner`, and out has this rank's
// columns only.
rm_code rm_moe_experts(rm_moe *moe, const rm_moe_rows *at, const int32_t *group_rows, int64_t m,
                       const char *x, char *out, rm_error *err);
// out: T [rows][hidden]; y: T [rows·top_k][hidden], indexed by place [rows][top_k].
void rm_moe_combine(const rm_moe *moe, void *out, const void *y, const int32_t *ids,
                    const int32_t *place, int64_t hidden, int64_t rows);
