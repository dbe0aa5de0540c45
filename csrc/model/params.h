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
  rm_dtype dtype; // of the stored parameter
  rm_layout layout;
  size_t offset; // bytes from the start of the allocation to the matrix that holds the parameter
  int64_t dst_row0; // the row of that matrix that holds row `first`
  int required; // 0: a tied lm_head; the router bias unless spec->router_bias
} rm_param;

// Each kind of parameter: its names, and what its rows and columns are.
typedef struct rm_kind {
  const char *kind; // as in a spec's `names`: "router"
  const char *name; // in Hugging Face checkpoints, below the layer; # is the expert
  rm_dim rows, cols; // RM_DIM_ONE columns: a vector
} rm_kind;
extern const rm_kind rm_kinds[RM_N_PARAM_KIND];
// The rows of a kind in this model: a norm of q or k is of one head, or of all heads together.
rm_dim rm_kind_rows(const rm_spec *spec, rm_param_kind kind);

// Where the forward pass finds a matrix or vector of the version. q, k and v are one matrix, and
// so are gate and up, and the inputs of a delta net.
typedef struct rm_matrix {
  size_t offset; // SIZE_MAX: the layer does not have it
  int64_t elems; // of this rank's rows; of all experts here, whose matrices follow one another
  int is_rest; // a kind before this one has the same matrix
} rm_matrix;

typedef struct rm_layer_params {
  rm_matrix of[RM_N_PARAM_KIND];
} rm_layer_params;

typedef struct rm_params {
  const rm_spec *spec; // view
  rm_placement placement, whole; // what this rank holds; what a single rank holds
  rm_dtype dtype;
  // qkv, o, gate_up and down are plain rows, gate before up, for cuBLASLt (vendor_gemm.h).
  int plain;
  int64_t n;
  rm_param *list; // [n], ordered by layer, kind, expert
  rm_layer_params *layers; // [n_layers]
  // Embedding, lm_head and final norm. Tied, the first two are one packed matrix; else the
  // embedding is plain.
  rm_layer_params ends;
  size_t bytes; // of one version
} rm_params;

// Computes the layout; the spec must outlive it. `placement` is copied; NULL: the whole model.
// Owned: rm_params_destroy, safe on NULL.
rm_code rm_params_create(const rm_spec *spec, const rm_placement *placement, rm_dtype dtype,
                         int plain, rm_params **out, rm_error *err);
void rm_params_destroy(rm_params *params);
// Index of a parameter, −1 if the model does not have it.
int64_t rm_params_find(const rm_params *params, rm_param_kind kind, int32_t layer, int32_t expert);
// The Hugging Face name, as `.text` of the same expression or of a variable.
typedef struct rm_param_text {
  char text[32 + RM_MAX_PARAM_NAME];
} rm_param_text;
rm_param_text rm_param_name(const rm_params *params, const rm_param *param);
// The rows (elements of a vector) of a parameter that the rank of `placement` holds.
rm_range rm_param_rows_of(const rm_params *params, const rm_placement *placement,
                          const rm_param *param);
// The rows of a parameter on all ranks together; the elements of a vector.
static inline int64_t rm_param_extent(const rm_param *param) {
  return param->n_dims == 1 ? param->cols : param->rows;
}
// Whether a kind is multiplied by a dense gemm, which cuBLASLt may compute.
static inline int rm_kind_is_dense(rm_param_kind kind) {
  return (kind >= RM_P_Q && kind <= RM_P_ATTN_GATE) ||
         (kind >= RM_P_DELTA_Q && kind <= RM_P_DELTA_OUT) ||
         (kind >= RM_P_GATE && kind <= RM_P_DOWN);
}
// Whether a kind is stored in float32 in models of any dtype.
static inline int rm_kind_is_float32(rm_param_kind kind) {
  return kind == RM_P_ROUTER_BIAS || kind == RM_P_A_LOG || kind == RM_P_DT_BIAS;
}
// The address of a layer's matrix; NULL if the layer does not have it.
static inline const char *rm_weight(const char *weights, const rm_layer_params *layer,
                                    rm_param_kind kind) {
  return layer->of[kind].offset == SIZE_MAX ? NULL : weights + layer->of[kind].offset;
}
