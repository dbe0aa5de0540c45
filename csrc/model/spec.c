// spec.c: the rules of a model's configuration, each checked once, here. Upper limits are far
// beyond any model and keep every product of sizes within 63 bits.
#include "model/spec.h"

#include <math.h>
#include <string.h>

#include "base/memory.h"

enum {
  MAX_VOCAB = 1 << 26,
  MAX_WIDTH = 1 << 22,
  MAX_LAYERS = 1024,
  MAX_HEADS = 1 << 14,
  MAX_HEAD_DIM = 1024,
  MAX_EXPERTS = 16384,
  MAX_KERNEL = 64
};
_Static_assert(MAX_EXPERTS <= INT16_MAX, "routing is recorded as int16");

typedef struct bound {
  const char *name;
  int64_t value, least, most;
} bound;

static rm_code check_bounds(const bound list[], size_t n, rm_error *err) {
  for (size_t i = 0; i < n; i++)
    RM_TRY(
        rm_check_range(err, RM_E_CONFIG, list[i].name, list[i].value, list[i].least, list[i].most));
  return RM_OK;
}

static rm_code check_even(const char *name, int64_t value, rm_error *err) {
  RM_FAIL_IF(value % 2 != 0, RM_E_CONFIG,
             "%s: expected an even number (rope rotates pairs), got %ld", name, value);
  return RM_OK;
}

static rm_code check_positive(const char *name, float value, rm_error *err) {
  if (isfinite(value) && value > 0) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "%s: expected a finite number > 0, got %g", name, (double)value);
}

static rm_code check_attention(const rm_spec *s, rm_error *err) {
  RM_FAIL_IF(s->n_heads % s->n_kv_heads, RM_E_CONFIG,
             "num_key_value_heads: expected a divisor of num_attention_heads=%ld, got %ld",
             s->n_heads, s->n_kv_heads);
  RM_TRY(check_even("head_dim", s->head_dim, err));
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "rotary_dim", s->rotary_dim, 0, s->head_dim));
  RM_TRY(check_even("rotary_dim", s->rotary_dim, err));
  RM_FAIL_IF(s->n_heads * s->head_dim > MAX_WIDTH, RM_E_CONFIG,
             "num_attention_heads·head_dim: expected at most %d, got %ld", MAX_WIDTH,
             s->n_heads * s->head_dim);
  return RM_OK;
}

static rm_code check_tiles(const char *name, int64_t value, rm_error *err) {
  if (value > 0 && value % RM_N_TILE == 0) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "%s: expected a multiple of %d, got %ld", name, RM_N_TILE,
                 value);
}

// Latent attention is in all layers: pages of all layers have parts of the same sizes. The matrices
// of heads are views of packed tiles.
static rm_code check_latent(const rm_spec *s, rm_error *err) {
  const int is_latent = s->kv_lora_rank > 0;
  for (int64_t i = 0; i < s->n_layers; i++)
    RM_FAIL_IF((s->layers[i].kind == RM_LAYER_LATENT) != is_latent ||
                   (is_latent && s->layers[i].rotates != 1),
               RM_E_CONFIG,
               "layer_kinds: expected latent and rope in all layers with kv_lora_rank > 0, "
               "else no latent, got another layer %ld with kv_lora_rank=%ld",
               i, s->kv_lora_rank);
  if (!is_latent) return RM_OK;
  const int64_t of_cache = s->kv_lora_rank + s->rotary_dim;
  const bound bounds[] = {
      {"q_lora_rank", s->q_lora_rank, 0, MAX_WIDTH},
      {"qk_nope_head_dim", s->qk_nope_head_dim, 1, MAX_HEAD_DIM},
      {"qk_rope_head_dim", s->rotary_dim, 2, MAX_HEAD_DIM},
      {"v_head_dim", s->v_head_dim, 1, MAX_HEAD_DIM},
      {"head_dim (kv_lora_rank + qk_rope_head_dim)", s->head_dim, of_cache, of_cache},
      {"num_key_value_heads of latent attention", s->n_kv_heads, 1, 1},
  };
  RM_TRY(check_tiles("kv_lora_rank", s->kv_lora_rank, err));
  RM_TRY(check_tiles("v_head_dim", s->v_head_dim, err));
  RM_TRY(check_bounds(bounds, sizeof bounds / sizeof *bounds, err));
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "num_attention_heads·(elements of a head)",
                        s->n_heads * rm_max64(rm_q_dim(s), s->v_head_dim), 1, MAX_WIDTH));
  RM_FAIL_IF(s->attention_bias || s->qk_norm || s->attention_gate || s->sinks ||
                 s->zero_centered_norms,
             RM_E_CONFIG,
             "attention_bias, qk_norm, attention_gate, sinks, zero_centered_norms: expected "
             "none of them with latent attention");
  return RM_OK;
}

static rm_code check_frequencies(const char *name, const float *inv_freq, int64_t n,
                                 rm_error *err) {
  RM_FAIL_IF(!inv_freq, RM_E_CONFIG, "%s: expected rotary_dim/2=%ld values, got none", name, n);
  for (int64_t i = 0; i < n; i++)
    RM_FAIL_IF(!(isfinite(inv_freq[i]) && inv_freq[i] >= 0), RM_E_CONFIG,
               "%s[%ld]: expected a finite number ≥ 0, got %g", name, i, (double)inv_freq[i]);
  return RM_OK;
}

static rm_code check_rope(const rm_spec *s, rm_error *err) {
  RM_TRY(check_positive("rope_scale", s->rope_scale, err));
  RM_TRY(check_frequencies("inv_freq", s->inv_freq, s->rotary_dim / 2, err));
  if (!s->local_inv_freq) return RM_OK;
  RM_TRY(check_positive("local_rope_scale", s->local_rope_scale, err));
  return check_frequencies("local_inv_freq", s->local_inv_freq, s->rotary_dim / 2, err);
}

static rm_code check_factors(const rm_spec *s, rm_error *err) {
  const struct {
    const char *name;
    float value;
  } factors[] = {
      {"attention_scale", s->attention_scale},   {"attention_softcap", s->attention_softcap},
      {"logits_softcap", s->logits_softcap},     {"embed_scale", s->embed_scale},
      {"embed_scale_bf16", s->embed_scale_bf16}, {"residual_scale", s->residual_scale},
      {"logits_scale", s->logits_scale}};
  for (size_t i = 0; i < sizeof factors / sizeof *factors; i++)
    if (factors[i].value != 0) RM_TRY(check_positive(factors[i].name, factors[i].value, err));
  RM_FAIL_IF(s->qk_norm_last && s->qk_norm == RM_QK_NORM_WHOLE, RM_E_CONFIG,
             "qk_norm_last: expected false with norms over all heads, got true");
  return RM_OK;
}

static rm_code check_experts(const rm_spec *s, rm_error *err) {
  if (s->n_experts == 0) {
    RM_FAIL_IF(
        s->top_k || s->moe_intermediate_size, RM_E_CONFIG,
        "num_experts_per_tok, moe_intermediate_size: expected 0 and 0 with num_experts=0, got "
        "%ld and %ld",
        s->top_k, s->moe_intermediate_size);
    return RM_OK;
  }
  RM_FAIL_IF(s->top_k > s->n_experts, RM_E_CONFIG,
             "num_experts_per_tok: expected at most num_experts=%ld, got %ld", s->n_experts,
             s->top_k);
  const bound bounds[] = {
      {"num_experts_per_tok", s->top_k, 1, RM_MAX_TOP_K},
      {"n_group", s->n_groups, 1, RM_MAX_EXPERT_GROUPS},
      {"topk_group", s->top_groups, 1, s->n_groups},
      {"moe_intermediate_size", s->moe_intermediate_size, 1, MAX_WIDTH},
      {"shared_intermediate_size", s->shared_intermediate_size, 0, MAX_WIDTH},
  };
  RM_TRY(check_bounds(bounds, sizeof bounds / sizeof *bounds, err));
  const int64_t each = s->n_experts / s->n_groups;
  RM_FAIL_IF(s->n_groups > 1 &&
                 (s->n_experts % s->n_groups || each < 2 || s->top_groups * each < s->top_k),
             RM_E_CONFIG,
             "n_group=%ld, topk_group=%ld: expected groups of equal size, at least 2 of "
             "num_experts=%ld in each, with num_experts_per_tok=%ld in topk_group of them",
             s->n_groups, s->top_groups, s->n_experts, s->top_k);
  return check_positive("routed_scaling_factor", s->route_scale, err);
}

static rm_code check_delta_net(const rm_spec *s, rm_error *err) {
  const bound bounds[] = {
      {"linear_num_key_heads", s->delta_k_heads, 1, MAX_HEADS},
      {"linear_num_value_heads", s->delta_v_heads, 1, MAX_HEADS},
      {"linear_key_head_dim", s->delta_k_dim, 1, RM_MAX_DELTA_DIM},
      {"linear_value_head_dim", s->delta_v_dim, 1, RM_MAX_DELTA_DIM},
      {"linear_conv_kernel_dim", s->delta_kernel, 1, MAX_KERNEL},
  };
  RM_TRY(check_bounds(bounds, sizeof bounds / sizeof *bounds, err));
  RM_FAIL_IF(s->delta_v_heads % s->delta_k_heads, RM_E_CONFIG,
             "linear_num_value_heads: expected a multiple of linear_num_key_heads=%ld, got %ld",
             s->delta_k_heads, s->delta_v_heads);
  return RM_OK;
}

static rm_code check_layers(const rm_spec *s, int64_t *n_moe, int64_t *n_attention, rm_error *err) {
  RM_FAIL_IF(!s->layers, RM_E_CONFIG, "layers: expected num_hidden_layers=%ld entries, got none",
             s->n_layers);
  for (int64_t i = 0; i < s->n_layers; i++) {
    RM_FAIL_IF(s->layers[i].window < 0, RM_E_CONFIG,
               "sliding_window of layer %ld: expected at least 0, got %ld", i, s->layers[i].window);
    RM_FAIL_IF(s->layers[i].kind < 0 || s->layers[i].kind >= RM_N_LAYER_KIND, RM_E_CONFIG,
               "kind of layer %ld: expected 0 to %d, got %d", i, RM_N_LAYER_KIND - 1,
               (int)s->layers[i].kind);
    RM_FAIL_IF(s->layers[i].rotates == 2 && !s->local_inv_freq, RM_E_CONFIG,
               "layer %ld: expected local_inv_freq, got none", i);
    RM_FAIL_IF(s->layers[i].is_moe && s->n_experts == 0, RM_E_CONFIG,
               "layer %ld: expected a dense MLP with num_experts=0, got experts", i);
    *n_moe += s->layers[i].is_moe != 0;
    *n_attention += s->layers[i].kind != RM_LAYER_DELTA_NET;
  }
  RM_FAIL_IF(!*n_attention, RM_E_CONFIG, "layer_types: expected a layer of attention, got none");
  RM_TRY(*n_attention < s->n_layers ? check_delta_net(s, err) : RM_OK);
  if (*n_moe < s->n_layers)
    return rm_check_range(err, RM_E_CONFIG, "intermediate_size", s->intermediate_size, 1,
                          MAX_WIDTH);
  return RM_OK;
}

// Copies `bytes` to *at, and moves it behind them. Returns the copy; NULL for NULL.
static void *append(char **at, const void *from, size_t bytes) {
  void *copy = from ? memcpy(*at, from, bytes) : NULL;
  *at += bytes;
  return copy;
}

rm_code rm_spec_create(const rm_spec *values, rm_spec **out, rm_error *err) {
  *out = NULL;
  int64_t n_moe = 0, n_attention = 0;
  const bound bounds[] = {
      {"vocab_size", values->vocab_size, 1, MAX_VOCAB},
      {"hidden_size", values->hidden_size, 1, MAX_WIDTH},
      {"num_attention_heads", values->n_heads, 1, MAX_HEADS},
      {"num_key_value_heads", values->n_kv_heads, 1, values->n_heads},
      {"head_dim", values->head_dim, 2, MAX_HEAD_DIM},
      {"num_experts", values->n_experts, 0, MAX_EXPERTS},
      {"num_hidden_layers", values->n_layers, 1, MAX_LAYERS},
  };
  RM_TRY(check_bounds(bounds, sizeof bounds / sizeof *bounds, err));
  RM_TRY(check_attention(values, err));
  RM_TRY(check_rope(values, err));
  RM_TRY(check_factors(values, err));
  RM_TRY(check_experts(values, err));
  RM_TRY(check_layers(values, &n_moe, &n_attention, err));
  RM_TRY(check_latent(values, err));
  RM_TRY(check_positive("rms_norm_eps", values->rms_norm_eps, err));
  if (values->activation == RM_SWIGLU_OAI) {
    RM_TRY(check_positive("swiglu_alpha", values->swiglu_alpha, err));
    RM_TRY(check_positive("swiglu_limit", values->swiglu_limit, err));
  }
  RM_FAIL_IF(values->ungated && values->activation == RM_SWIGLU_OAI, RM_E_CONFIG,
             "activation: expected one of MLPs without a gate, got swiglu_oai");
  RM_FAIL_IF(
      !values->norm_before && !values->norm_after, RM_E_CONFIG,
      "norm_before, norm_after: expected norms of a block's input, of its output, or of both, "
      "got neither");

  const size_t layers_bytes = (size_t)values->n_layers * sizeof *values->layers;
  size_t names_bytes = 0;
  for (int kind = 0; kind < RM_N_PARAM_KIND; kind++) {
    const char *name = values->names[kind];
    RM_FAIL_IF(name && strlen(name) > RM_MAX_PARAM_NAME, RM_E_CONFIG,
               "%.32s…: expected a parameter name of at most %d bytes, got %zu", name,
               RM_MAX_PARAM_NAME, strlen(name));
    names_bytes += name ? strlen(name) + 1 : 0;
  }
  const size_t freq_bytes = (size_t)(values->rotary_dim / 2) * sizeof *values->inv_freq;
  // One allocation: the spec, its layers, frequencies and names.
  rm_spec *spec = rm_alloc(1, sizeof *spec + layers_bytes + 2 * freq_bytes + names_bytes);
  if (!spec) return rm_no_memory(err, "a spec", 0);
  *spec = *values;
  spec->n_moe_layers = n_moe;
  spec->n_attention_layers = n_attention;
  char *at = (char *)(spec + 1);
  spec->layers = append(&at, values->layers, layers_bytes);
  spec->inv_freq = append(&at, values->inv_freq, freq_bytes);
  spec->local_inv_freq = append(&at, values->local_inv_freq, freq_bytes);
  for (int kind = 0; kind < RM_N_PARAM_KIND; kind++) {
    const char *name = values->names[kind];
    spec->names[kind] = append(&at, name, name ? strlen(name) + 1 : 0);
  }
  *out = spec;
  return RM_OK;
}

void rm_spec_destroy(rm_spec *spec) { rm_free(spec); }
