// model_internal.h: the struct of a model, shared by model.c (the forward), linear.c (its linear layers), host_indices.c (indices that
// the host computes) and head.c (lm_head).
#pragma once

#include "model/model.h"
#include "model/moe/moe.h"
#include "model/shard.h"

struct rm_model {
  const rm_params *params; // view
  const rm_spec *spec; // view
  const rm_device *device; // view
  const rm_kernels *kernels; // its
  rm_model_options options;
  int sequence_parallel; // asked for, and tp > 1
  rm_ctx ctx;
  rm_shard shard; // owned
  void *block; // of the device, owned: all that follows but the host's
  size_t block_bytes;
  float *cos, *sin; // [max_positions][head_dim/2]
  char *residual, *x; // T [max_rows][hidden]
  char *qkv; // T [max_rows][(heads + 2·kv_heads)·head_dim] of this rank; then attention's output
  char *q; // T [max_rows][heads·head_dim] of this rank
  char *wanted; // T [max_rows][hidden] the stream's rows whose output is wanted
  char *inner; // T [max_rows][intermediate], where a layer is dense
  rm_moe moe; // where one is not
  rm_products products; // owned; open where params are plain
  char *products_workspace; // its
  // where tp > 1
  char *attended; // T [max_rows][heads·head_dim]
  char *home; // T [max_rows][hidden] home rows of a block's output; what arrives while rows are looked up, of
  // few rows [tp][rows][hidden]
  float *pairs; // [vocabulary blocks][max_out_rows][2]
  float *target_logits; // [tp][max_out_rows]
  float *own_logits; // [max_out_rows] of each target by its owner
  // and of the host: indices that it makes, which ops read
  rm_paired indices; // owned: the block of those
  int32_t *embed_ids; // [max_rows] what this rank looks up
  int32_t *embed_rows; // [max_rows] where of what all have looked up the rows are that are kept
  int32_t *wanted_rows; // [max_rows] those of the rows that are kept whose output is wanted
  int64_t *embed_counts; // [tp] of each rank, the host's alone, as is the next
  int64_t *wanted_counts; // [tp]
  int32_t *local_targets; // [max_out_rows]
  int32_t *from_targets; // [max_out_rows] where in target_logits a target's is
};

// Sequence parallel: the rows that this rank keeps of n; else all of them.
static inline rm_range rm_kept_rows(const rm_model *model, int64_t n) {
  return model->sequence_parallel ? rm_shard_home(&model->shard, n) : (rm_range){0, n};
}
// Whether what a tp group exchanges has sizes that the number of rows says.
static inline int rm_is_static(const rm_model *model, const rm_batch *batch) { return batch->n_rows <= model->options.static_rows; }

// Before the host writes words: what it wrote before was read.
static inline rm_code rm_indices_begin(const rm_model *model, rm_error *err) {
  return rm_rank_wait_event(model->options.rank, model->device, RM_EVENT_INDICES, err);
}
// After it: n of them, for ops; the device's address.
static inline int32_t *rm_indices_put(const rm_model *model, const int32_t *at, int64_t n) {
  rm_paired_put(&model->indices, at, (size_t)n * sizeof *at);
  model->device->record_event(model->device->self, RM_EVENT_INDICES);
  return rm_paired_on_device(&model->indices, at);
}

// linear.c: the arguments of a layer's dense products, this rank's columns of each. y of `back` and `down` is x, whole rows of the
// stream; m: rows.
rm_gemm_args rm_qkv_product(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m);
rm_gemm_args rm_back_product(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m);
rm_gemm_args rm_gate_up_product(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m);
rm_gemm_args rm_down_product(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m);
void rm_multiply(rm_model *model, const rm_gemm_args *args);
void rm_multiply_swiglu(rm_model *model, const rm_gemm_args *args);
size_t rm_products_bytes(const rm_model *model); // of products_workspace; before it is there
rm_code rm_open_products(rm_model *model, rm_error *err); // once all buffers are there

enum { RM_HEAD_FIELDS = 3 };
size_t rm_head_fields(rm_model *model, rm_field fields[RM_HEAD_FIELDS]);
