// spec.h: the configuration of a model. A spec is checked when it is created and never changes;
// everything else takes a view of it.
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "kernels.h"

// clang-format off
typedef enum rm_param_kind {
  RM_P_EMBED, RM_P_LM_HEAD, RM_P_FINAL_NORM,
  RM_P_INPUT_NORM, RM_P_POST_ATTN_NORM, RM_P_PRE_MLP_NORM, RM_P_POST_MLP_NORM,
  RM_P_Q, RM_P_K, RM_P_V, RM_P_O,
  RM_P_Q_BIAS, RM_P_K_BIAS, RM_P_V_BIAS, RM_P_O_BIAS,
  RM_P_Q_NORM, RM_P_K_NORM,
  RM_P_GATE, RM_P_UP, RM_P_DOWN,
  RM_P_ROUTER, RM_P_ROUTER_BIAS,
  RM_P_SHARED_GATE, RM_P_SHARED_UP, RM_P_SHARED_DOWN, RM_P_SHARED_SWITCH,
  RM_P_EXPERT_GATE, RM_P_EXPERT_UP, RM_P_EXPERT_DOWN,
  RM_N_PARAM_KIND
} rm_param_kind;
// clang-format on

enum { RM_MAX_PARAM_NAME = 80 };

typedef enum rm_qk_norm { RM_QK_NORM_NONE, RM_QK_NORM_HEAD, RM_QK_NORM_WHOLE } rm_qk_norm;

// The rows of tensors with the names wq and wk: there are none, rope turns halves of a head, or
// neighbours.
typedef enum rm_wq_rows { RM_WQ_NONE, RM_WQ_HALVES, RM_WQ_NEIGHBOURS } rm_wq_rows;

typedef struct rm_layer_spec {
  int is_moe;
  int rotates; // rope turns its q and k
  int64_t window; // sliding window in positions, 0: full attention
} rm_layer_spec;

// Fill with the values of the config, then rm_spec_create copies what it points to.
typedef struct rm_spec {
  int64_t vocab_size, hidden_size, intermediate_size;
  int64_t n_layers, n_heads, n_kv_heads, head_dim;
  int64_t rotary_dim; // elements of a head that rope turns, the first ones
  int64_t n_experts, top_k, moe_intermediate_size; // 0, 0, 0 in a dense model
  int norm_topk_prob, tie_word_embeddings;
  rm_qk_norm qk_norm; // how q and k are normed: each head, or all heads of q, of k, together
  int norm_before, norm_after; // norms of a block's input; of its output, before it is added
  int attention_bias, o_bias; // of q, k and v; of o
  int router_bias; // every version has one; 0: it may be absent
  rm_activation activation; // of MLPs and experts
  int ungated; // dense MLPs have no gate: down(activation(up(x)))
  float rms_norm_eps;
  float rope_scale; // attention_scaling of the rope type, 1 by default
  const float *inv_freq; // [rotary_dim/2]
  const rm_layer_spec *layers; // [n_layers]
  int64_t n_moe_layers; // derived
  int64_t shared_intermediate_size; // of the expert of every MoE layer that all rows pass; 0: none
  int shared_switch; // a row's sigmoid, of a matrix [1][hidden], scales what the shared expert adds
  int sigmoid_scores; // of the router; else softmax
  int64_t n_groups, top_groups; // of experts that a row may choose from; 1, 1: all
  float route_scale; // of gates
  rm_wq_rows wq_rows;
  // rows of q and k under all other names: rope turns neighbours; else halves of a head
  int rope_neighbours;
  const char *names
      // a family's own: as rm_param_name's, with # for the expert; NULL: the usual one
      [RM_N_PARAM_KIND];
} rm_spec;

// Checks every rule (RM_E_CONFIG names the broken one) and copies. Owned: rm_spec_destroy, safe on
// NULL.
rm_code rm_spec_create(const rm_spec *values, rm_spec **out, rm_error *err);
void rm_spec_destroy(rm_spec *spec);
