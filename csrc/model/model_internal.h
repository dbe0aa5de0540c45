// model_internal.h: the struct of a model, shared by create.c, model.c (the forward), the kinds of
// layers (layer_kinds.h), linear.c (linear layers), host_indices.c (indices computed on the host)
// and head.c (lm_head).
#pragma once

#include "model/model.h"
#include "model/moe/moe.h"
#include "model/shard.h"

enum { RM_PAGE_PARTS = 2 }; // parts of a KV page in one layer

struct rm_model {
  const rm_params *params; // view
  const rm_spec *spec; // view
  const rm_device *device; // view
  const rm_kernels *kernels; // view: the device's op table
  rm_model_options options;
  int sequence_parallel; // requested, and tp > 1
  rm_ctx ctx;
  rm_shard shard; // owned
  void *block; // owned, device memory: holds the device arrays below
  size_t block_bytes;
  float *cos, *sin; // [max_positions][rotary_dim/2]; then the local table, if there is one
  char *residual, *x; // T [max_rows][hidden]
  // T [max_rows][rm_qkv_width]: q, k and v of this rank; then attention's output. Or
  // [max_rows][rm_delta_width]: the inputs of a delta net.
  char *qkv;
  // Only for RM_QK_NORM_WHOLE: sums of squares of q's heads, then of k's.
  float *squares; // [max_rows][heads + kv_heads] of this rank
  float *all_squares; // [max_rows][all heads + all kv heads]; where tp > 1
  char *q; // T [max_rows][heads·head_dim] of this rank; or a delta net's output
  char *latents; // T [max_rows][heads·kv_lora_rank], or the output of q_a_proj; of latent attention
  char *attn_gate; // T [max_rows][heads·head_dim] of this rank, with attention_gate
  char *out_residual; // T [max_rows][hidden] residual of the batch's out_rows
  char *inner; // T [max_rows][intermediate], of dense layers and shared experts
  char *shared; // T [max_rows][hidden] a shared expert's output
  char *shared_home; // T [max_rows][hidden] its home rows, with sequence parallelism
  char *shared_switch; // T [max_rows]
  rm_moe moe; // of MoE layers
  rm_vendor_gemm vendor_gemm; // owned; open where params are plain
  char *vendor_gemm_workspace;
  // Only where tp > 1:
  char *attended; // T [max_rows][heads·head_dim], or [max_rows][value heads·v_dim]
  // T [max_rows][hidden] home rows of a block's output; in a step of fixed sizes also the gathered
  // embeddings [tp][rows][hidden].
  char *home;
  float *pairs; // [vocabulary blocks][max_out_rows][2]
  float *target_logits; // [tp][max_out_rows]
  float *own_logits; // [max_out_rows] of each target, from the rank that holds it
  // Indices computed on the host (host_indices.c).
  rm_mirrored_buffer indices; // owned: holds the arrays below
  int32_t *embed_ids; // [max_rows] rows of the embedding table that this rank looks up
  int32_t *embed_rows; // [max_rows] index of each kept row in the gathered embeddings
  int32_t *own_out_rows; // [max_rows] out_rows among the kept rows, counted from the first kept row
  int64_t *embed_counts; // [tp] rows that each rank looks up; like out_counts on the host only
  int64_t *out_counts; // [tp] out_rows of each rank
  int32_t *local_targets; // [max_out_rows]
  int32_t *from_targets; // [max_out_rows] index of each target's logit in target_logits
};

// The rows among n that this rank keeps between blocks: its home rows with sequence parallelism,
// else all rows.
static inline rm_range rm_kept_rows(const rm_model *model, int64_t n) {
  return model->sequence_parallel ? rm_shard_home(&model->shard, n) : (rm_range){0, n};
}
// Whether the sizes of the tp group's exchanges depend on the number of rows alone.
static inline int rm_is_static(const rm_model *model, const rm_batch *batch) {
  return batch->n_rows <= model->options.static_rows;
}

// Waits until the device has read the previous indices. Called before the host writes new ones.
static inline rm_code rm_indices_begin(const rm_model *model, rm_error *err) {
  return rm_rank_wait(model->options.rank, model->device, RM_EVENT_INDICES, err);
}
// Copies n indices to the device and returns their device address.
static inline int32_t *rm_indices_copy_to_device(const rm_model *model, const int32_t *at,
                                                 int64_t n) {
  rm_mirrored_copy_to_device(&model->indices, at, (size_t)n * sizeof *at);
  model->device->record_event(model->device->self, RM_EVENT_INDICES);
  return rm_mirrored_on_device(&model->indices, at);
}

// One forward pass, and the layer that it is at.
typedef struct rm_pass {
  rm_model *model;
  const char *weights;
  const rm_batch *batch;
  int64_t rows; // of the batch
  int64_t index, moe_index; // of the layer; among the MoE layers
  const rm_layer_params *layer;
  rm_error *err;
} rm_pass;

// Elements of the cos or sin of one rope table.
static inline int64_t rm_rope_elems(const rm_model *model) {
  return model->options.max_positions * (model->spec->rotary_dim / 2);
}
static inline size_t rm_row_bytes(const rm_model *model) {
  return (size_t)model->spec->hidden_size * rm_dtype_bytes(model->options.dtype);
}
static inline void *rm_on_device(const rm_pass *pass, const void *here) {
  return rm_mirrored_on_device(pass->batch->mirrored, here);
}

// model.c. Completes x: all rows on every rank.
rm_code rm_complete_rows(const rm_pass *pass);
// Completes a matrix of which each rank has its columns: all rows in place, or with sequence
// parallelism only the home rows, in `home`.
rm_code rm_complete_columns(const rm_pass *pass, char *matrix, char *home);

// linear.c. y ← x · the layer's matrix `kind`, for this rank's columns. y has room for the columns
// of all ranks. Only q, k and v (kind: q), attention's gate, the inputs of a delta net and those of
// latent attention have this rank's columns alone. For the gate of an MLP the matrix is gate and
// up, and y ← activation(gate) · up.
void rm_linear(const rm_pass *pass, rm_param_kind kind, const void *x, char *y);
// Elements of q, k and v of one token on this rank; in latent attention of q, the latent and the
// key.
static inline int64_t rm_qkv_width(const rm_params *params) {
  const int64_t heads = params->placement.heads.n, kv = params->placement.kv_heads.n;
  return heads * rm_q_dim(params->spec) +
         (params->spec->kv_lora_rank ? 1 : 2 * kv) * params->spec->head_dim;
}
// Columns of the inputs of a delta net on this rank; 0: the model has none.
static inline int64_t rm_delta_width(const rm_params *params) {
  return rm_delta_columns(params->placement.delta_k_heads.n, params->placement.delta_heads.n,
                          params->spec->delta_k_dim, params->spec->delta_v_dim);
}
// Bytes of vendor_gemm_workspace.
size_t rm_model_gemm_workspace(rm_model *model);
// Called after all buffers are allocated.
rm_code rm_open_vendor_gemm(rm_model *model, rm_error *err);

enum { RM_HEAD_FIELDS = 3 };
size_t rm_head_fields(rm_model *model, rm_field fields[RM_HEAD_FIELDS]);
