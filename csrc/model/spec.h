// spec.h: the configuration of a model. A spec is checked when it is created and never changes; everything else takes a view of it.
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "kernels.h"

typedef struct rm_layer_spec {
  int is_moe;
  int64_t window;               // sliding window in positions, 0: full attention
} rm_layer_spec;

// Fill with the values of the config, then rm_spec_create copies what it points to.
typedef struct rm_spec {
  int64_t vocab_size, hidden_size, intermediate_size;
  int64_t n_layers, n_heads, n_kv_heads, head_dim;
  int64_t n_experts, top_k, moe_intermediate_size;   // 0, 0, 0 in a dense model
  int norm_topk_prob, attention_bias, tie_word_embeddings;
  int router_bias;              // every version has one; 0: it may be absent
  float rms_norm_eps;
  float rope_scale;             // attention_scaling of the rope type, 1 by default
  const float *inv_freq;        // [head_dim/2]
  const rm_layer_spec *layers;  // [n_layers]
  int64_t n_moe_layers;         // derived
} rm_spec;

// Checks every rule (RM_E_CONFIG names the broken one) and copies. Owned: rm_spec_destroy, safe on NULL.
rm_code rm_spec_create(const rm_spec *values, rm_spec **out, rm_error *err);
void rm_spec_destroy(rm_spec *spec);
