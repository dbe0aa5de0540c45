// params.h: the parameters of a model, one entry per tensor of the Hugging Face checkpoint, and
// their offsets in the allocation that holds a version of the weights. The manifest, syncs and the
// forward use this table. It never changes after creation: any thread may read it.
//
// On every rank of a mesh the table has the same entries, order and shapes; the rows that a rank
// holds differ (placement.h).
#pragma once

#include <stddef.h>

#include "model/placement.h"

typedef struct rm_param {
  rm_param_kind kind;
  int32_t layer, expert; // −1 where there is none
  int64_t rows, cols; // as in the checkpoint; a vector has rows = 1 and n_dims = 1
  int64_t first, held; // rows (elements of a vector) that this rank holds: [first, first + held)
  int n_dims;
  rm_dtype dtype; // of the stored parameter; the router bias is always float32
  rm_layout layout;
  size_t offset; // bytes from the start of the allocation to the matrix that holds the parameter
  int64_t dst_row0, dst_cols; // the row of that matrix that holds row `first`; its columns
  int required; // 0: a tied lm_head; the router bias unless spec->router_bias
} rm_param;

// Offsets of one layer's matrices, for the forward pass; SIZE_MAX for matrices that the layer does
// not have. Each matrix has the rows that the rank holds and all columns; the shapes below are
// those of a single rank.
typedef struct rm_layer_params {
  size_t input_norm, post_attn_norm; // [hidden], of attention's input and output
  size_t pre_mlp_norm, post_mlp_norm; // [hidden], of the MLP's input and output
  size_t q_norm, k_norm; // [head_dim], or [heads·head_dim], [kv·head_dim]
  size_t qkv, qkv_bias, o, o_bias; // qkv: packed [(heads + 2·kv)·head_dim]×[hidden]
  size_t gate_up; // dense: packed [gate_up_rows(I)]×[H], plain [2I][H]; ungated: up alone
  size_t down; // dense: packed [H]×[I], plain [H][I]
  size_t router, router_bias; // MoE: packed [E]×[H]; float32 [E]
  size_t shared_gate_up, shared_down; // MoE: packed, shapes of a dense layer's
  size_t shared_switch; // MoE: packed [1]×[H]
  size_t expert_gate_up, expert_down; // MoE: a matrix for each expert of the rank, strides below
  int64_t expert_gate_up_stride, expert_down_stride; // in elements
} rm_layer_params;

typedef struct rm_params {
  const rm_spec *spec; // view
  rm_placement placement; // what this rank holds
  rm_dtype dtype;
  // qkv, o, gate_up and down are plain rows, gate before up, for cuBLASLt (vendor_gemm.h).
  int plain;
  int64_t n;
  rm_param *list; // [n], ordered by layer, kind, expert
  rm_layer_params *layers; // [n_layers]
  size_t embed; // T [vocab held][hidden]; equal to lm_head, and packed, when tied
  size_t lm_head, final_norm;
  size_t bytes; // of one version
} rm_params;

// Computes the layout; the spec must outlive it. `placement` is copied; NULL: the whole model.
// Owned: rm_params_destroy, safe on NULL.
rm_code rm_params_create(const rm_spec *spec, const rm_placement *placement, rm_dtype dtype,
                         int plain, rm_params **out, rm_error *err);
void rm_params_destroy(rm_params *params);
// Index of a parameter, −1 if the model does not have it.
int64_t rm_params_find(const rm_params *params, rm_param_kind kind, int32_t layer, int32_t expert);
// Writes the Hugging Face name, always NUL-terminated; returns its length.
int rm_param_name(const rm_params *params, const rm_param *param, char *buffer, size_t capacity);
// Name of a kind, as a spec's `names` uses it: "router"; NULL beyond the last kind.
const char *rm_param_kind_name(int kind);
