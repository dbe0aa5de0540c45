// spec.h: the configuration of a model. rm_spec_create checks a spec, which then never changes: any
// thread may read it. Everything else takes a view of it.
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "kernels.h"

// clang-format off
typedef enum rm_param_kind {
  RM_P_EMBED, RM_P_LM_HEAD, RM_P_FINAL_NORM,
  RM_P_INPUT_NORM, RM_P_POST_ATTN_NORM, RM_P_PRE_MLP_NORM, RM_P_POST_MLP_NORM,
  RM_P_Q, RM_P_K, RM_P_V, RM_P_O, RM_P_ATTN_GATE,
  RM_P_Q_BIAS, RM_P_K_BIAS, RM_P_V_BIAS, RM_P_O_BIAS,
  RM_P_Q_NORM, RM_P_K_NORM, RM_P_SINKS,
  RM_P_Q_A, RM_P_Q_A_NORM, RM_P_Q_B, RM_P_KV_A, RM_P_KV_A_NORM, RM_P_K_B, RM_P_V_B,
  RM_P_DELTA_Q, RM_P_DELTA_K, RM_P_DELTA_V, RM_P_DELTA_Z, RM_P_DELTA_B, RM_P_DELTA_A, RM_P_DELTA_OUT,
  RM_P_CONV_Q, RM_P_CONV_K, RM_P_CONV_V, RM_P_A_LOG, RM_P_DT_BIAS, RM_P_DELTA_NORM,
  RM_P_GATE, RM_P_UP, RM_P_DOWN,
  RM_P_ROUTER, RM_P_ROUTER_BIAS, RM_P_ROUTER_LOGIT_BIAS,
  RM_P_SHARED_GATE, RM_P_SHARED_UP, RM_P_SHARED_DOWN, RM_P_SHARED_SWITCH,
  RM_P_EXPERT_GATE, RM_P_EXPERT_UP, RM_P_EXPERT_DOWN,
  RM_P_EXPERT_GATE_BIAS, RM_P_EXPERT_UP_BIAS, RM_P_EXPERT_DOWN_BIAS,
  RM_N_PARAM_KIND
} rm_param_kind;
// clang-format on

enum { RM_MAX_PARAM_NAME = 80 };

typedef enum rm_qk_norm { RM_QK_NORM_NONE, RM_QK_NORM_HEAD, RM_QK_NORM_WHOLE } rm_qk_norm;

// The row order of tensors named wq and wk: the model has none, rope rotates halves of a head, or
// rope rotates neighbouring elements.
typedef enum rm_wq_rows { RM_WQ_NONE, RM_WQ_HALVES, RM_WQ_NEIGHBOURS } rm_wq_rows;

// The kinds of a layer's first block (layer_kinds.h).
typedef enum rm_layer_kind {
  RM_LAYER_ATTENTION,
  RM_LAYER_LATENT,
  RM_LAYER_DELTA_NET,
  RM_N_LAYER_KIND
} rm_layer_kind;

typedef struct rm_layer_spec {
  rm_layer_kind kind;
  int is_moe;
  int rotates; // rope of its q and k: 0: none; 1: by inv_freq; 2: by local_inv_freq
  int64_t window; // sliding window in positions, 0: full attention
} rm_layer_spec;

// The values of a config. rm_spec_create copies the arrays and names.
typedef struct rm_spec {
  int64_t vocab_size, hidden_size, intermediate_size;
  int64_t n_layers, n_heads, n_kv_heads, head_dim;
  int64_t rotary_dim; // the first elements of a head, which rope rotates
  int64_t n_experts, top_k, moe_intermediate_size; // 0, 0, 0 in a dense model
  int norm_topk_prob, tie_word_embeddings;
  rm_qk_norm qk_norm; // norms of q and k: none, of each head, or of all heads of q or k together
  int norm_before, norm_after; // norms of a block's input; of its output, before it is added
  int attention_bias, o_bias; // of q, k and v; of o
  int router_bias; // every version must have one; 0: it may be absent
  int sinks; // attention has a sink for each head
  int moe_bias; // the router's logits and the experts have biases
  rm_activation activation; // of MLPs and experts
  float swiglu_alpha, swiglu_limit; // of RM_SWIGLU_OAI
  int ungated; // dense MLPs have no gate: down(activation(up(x)))
  float rms_norm_eps;
  float rope_scale; // attention_scaling of the rope type, 1 by default
  const float *inv_freq; // [rotary_dim/2]
  const rm_layer_spec *layers; // [n_layers]
  int64_t n_moe_layers, n_attention_layers; // derived: layers with experts; with KV pages
  int64_t shared_intermediate_size; // the shared expert of each MoE layer; 0: none
  int shared_switch; // the shared expert's output is scaled by sigmoid(x · w), w: [1][hidden]
  int sigmoid_scores; // the router uses sigmoid; else softmax
  int64_t n_groups, top_groups; // expert groups, and groups that a row may choose from; 1, 1: all
  float route_scale; // factor of all gates
  float min_sum; // with norm_topk_prob and softmax: lower bound of the divisor; 0: none
  // Factors and caps of numbers; 0: none.
  float attention_scale; // of scores; 0: 1/√head_dim
  float attention_softcap, logits_softcap; // x ← cap · tanh(x / cap) for scores and for logits
  float embed_scale, residual_scale, logits_scale; // of embeddings, blocks' outputs and logits
  float embed_scale_bf16; // embed_scale of a bfloat16 model
  int zero_centered_norms; // norms multiply by 1 + weight
  int attention_gate; // attention's output is multiplied by sigmoid(x · Wᵀ)
  int gate_in_q; // a tensor of q has the rows of the gate too, after those of q in each head
  // Heads of a delta net and their sizes; positions that its convolution reads.
  int64_t delta_k_heads, delta_v_heads, delta_k_dim, delta_v_dim, delta_kernel;
  int delta_alternates; // tensors of delta nets' inputs have the rows of one key head after another
  int qk_norm_last; // q and k are normed after rope; never with RM_QK_NORM_WHOLE
  // Latent attention is in all layers, or with kv_lora_rank 0 in none. The cache has one kv head:
  // the key (rotary_dim elements), then the latent, so head_dim = rotary_dim + kv_lora_rank.
  int64_t kv_lora_rank;
  int64_t q_lora_rank; // 0: q is computed from a layer's input
  // Elements of a head of q that rope does not rotate; elements of a head of attention's output.
  int64_t qk_nope_head_dim, v_head_dim;
  const float *local_inv_freq; // [rotary_dim/2] of layers that rotate by it; NULL: no such layer
  float local_rope_scale;
  rm_wq_rows wq_rows;
  // Rows of q and k under all other names: rope rotates neighbouring elements; else halves of a
  // head.
  int rope_neighbours;
  // A tensor of all experts is transposed, and rows of gate and up alternate in it.
  int experts_interleaved;
  // A family's own names, in the form of rm_param_name with # for the expert; NULL: the usual name.
  const char *names[RM_N_PARAM_KIND];
} rm_spec;

// Returns how many value heads read one key head, in a model with delta nets.
static inline int64_t rm_delta_group(const rm_spec *spec) {
  return spec->delta_v_heads / spec->delta_k_heads;
}

// Checks every rule (RM_E_CONFIG states the broken one) and copies. Owned: rm_spec_destroy, safe on
// NULL.
rm_code rm_spec_create(const rm_spec *values, rm_spec **out, rm_error *err);
void rm_spec_destroy(rm_spec *spec);
// Return the elements of a head of the q projection, and of a head of attention's output before
// o_proj.
static inline int64_t rm_q_dim(const rm_spec *spec) {
  return spec->kv_lora_rank ? spec->qk_nope_head_dim + spec->rotary_dim : spec->head_dim;
}
static inline int64_t rm_out_dim(const rm_spec *spec) {
  return spec->kv_lora_rank ? spec->v_head_dim : spec->head_dim;
}
