// params.c: the layout of a version. Matrices are in the order in which a forward pass reads them;
// each begins on a cache line. Parameters that are one matrix for the kernels (q|k|v, gate|up)
// share an offset and differ in dst_row0 or layout. Vectors that are one for the kernels differ in
// their offset.
//
// With tied embeddings both parameters share the packed lm_head, from which embed reads its rows.
#include "model/params.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

enum { MAX_PARAMS = 1 << 20, ALIGN = 64 };

typedef struct layout {
  rm_params *params; // its list is NULL while parameters are only counted
  size_t end; // bytes laid out so far
  int overflow;
} layout;

const rm_kind rm_kinds[RM_N_PARAM_KIND] = {
    [RM_P_EMBED] = {"embed", "model.embed_tokens.weight", RM_DIM_VOCAB, RM_DIM_HIDDEN},
    [RM_P_LM_HEAD] = {"lm_head", "lm_head.weight", RM_DIM_VOCAB, RM_DIM_HIDDEN},
    [RM_P_FINAL_NORM] = {"final_norm", "model.norm.weight", RM_DIM_HIDDEN},
    [RM_P_INPUT_NORM] = {"input_norm", "input_layernorm.weight", RM_DIM_HIDDEN},
    [RM_P_POST_ATTN_NORM] = {"post_attn_norm", "post_self_attn_layernorm.weight", RM_DIM_HIDDEN},
    [RM_P_PRE_MLP_NORM] = {"pre_mlp_norm", "post_attention_layernorm.weight", RM_DIM_HIDDEN},
    [RM_P_POST_MLP_NORM] = {"post_mlp_norm", "post_feedforward_layernorm.weight", RM_DIM_HIDDEN},
    [RM_P_Q] = {"q", "self_attn.q_proj.weight", RM_DIM_Q, RM_DIM_HIDDEN},
    [RM_P_K] = {"k", "self_attn.k_proj.weight", RM_DIM_KV, RM_DIM_HIDDEN},
    [RM_P_V] = {"v", "self_attn.v_proj.weight", RM_DIM_KV, RM_DIM_HIDDEN},
    [RM_P_O] = {"o", "self_attn.o_proj.weight", RM_DIM_OUT, RM_DIM_Q},
    [RM_P_ATTN_GATE] = {"attn_gate", "self_attn.gate_proj.weight", RM_DIM_Q, RM_DIM_HIDDEN},
    [RM_P_Q_BIAS] = {"q_bias", "self_attn.q_proj.bias", RM_DIM_Q},
    [RM_P_K_BIAS] = {"k_bias", "self_attn.k_proj.bias", RM_DIM_KV},
    [RM_P_V_BIAS] = {"v_bias", "self_attn.v_proj.bias", RM_DIM_KV},
    [RM_P_O_BIAS] = {"o_bias", "self_attn.o_proj.bias", RM_DIM_OUT},
    [RM_P_Q_NORM] = {"q_norm", "self_attn.q_norm.weight", RM_DIM_HEAD},
    [RM_P_K_NORM] = {"k_norm", "self_attn.k_norm.weight", RM_DIM_HEAD},
    [RM_P_SINKS] = {"sinks", "self_attn.sinks", RM_DIM_HEADS},
    [RM_P_Q_A] = {"q_a", "self_attn.q_a_proj.weight", RM_DIM_Q_RANK, RM_DIM_HIDDEN},
    [RM_P_Q_A_NORM] = {"q_a_norm", "self_attn.q_a_layernorm.weight", RM_DIM_Q_RANK},
    [RM_P_Q_B] = {"q_b", "self_attn.q_b_proj.weight", RM_DIM_Q_B, RM_DIM_Q_RANK},
    [RM_P_KV_A] = {"kv_a", "self_attn.kv_a_proj_with_mqa.weight", RM_DIM_KV_A, RM_DIM_HIDDEN},
    [RM_P_KV_A_NORM] = {"kv_a_norm", "self_attn.kv_a_layernorm.weight", RM_DIM_LATENT},
    // The two parts of kv_b_proj. The first is transposed in each head: rows are latent elements.
    [RM_P_K_B] = {"k_b", "self_attn.k_b_proj.weight", RM_DIM_K_B, RM_DIM_NOPE},
    [RM_P_V_B] = {"v_b", "self_attn.v_b_proj.weight", RM_DIM_Q, RM_DIM_LATENT},
    [RM_P_DELTA_Q] = {"delta_q", "linear_attn.in_proj_q.weight", RM_DIM_DELTA_K, RM_DIM_HIDDEN},
    [RM_P_DELTA_K] = {"delta_k", "linear_attn.in_proj_k.weight", RM_DIM_DELTA_K, RM_DIM_HIDDEN},
    [RM_P_DELTA_V] = {"delta_v", "linear_attn.in_proj_v.weight", RM_DIM_DELTA_V, RM_DIM_HIDDEN},
    [RM_P_DELTA_Z] = {"delta_z", "linear_attn.in_proj_z.weight", RM_DIM_DELTA_V, RM_DIM_HIDDEN},
    [RM_P_DELTA_B] = {"delta_b", "linear_attn.in_proj_b.weight", RM_DIM_DELTA_HEADS, RM_DIM_HIDDEN},
    [RM_P_DELTA_A] = {"delta_a", "linear_attn.in_proj_a.weight", RM_DIM_DELTA_HEADS, RM_DIM_HIDDEN},
    [RM_P_DELTA_OUT] = {"delta_out", "linear_attn.out_proj.weight", RM_DIM_OUT, RM_DIM_DELTA_V},
    [RM_P_CONV_Q] = {"conv_q", "linear_attn.conv1d_q.weight", RM_DIM_DELTA_K, RM_DIM_KERNEL},
    [RM_P_CONV_K] = {"conv_k", "linear_attn.conv1d_k.weight", RM_DIM_DELTA_K, RM_DIM_KERNEL},
    [RM_P_CONV_V] = {"conv_v", "linear_attn.conv1d_v.weight", RM_DIM_DELTA_V, RM_DIM_KERNEL},
    [RM_P_A_LOG] = {"a_log", "linear_attn.A_log", RM_DIM_DELTA_HEADS},
    [RM_P_DT_BIAS] = {"dt_bias", "linear_attn.dt_bias", RM_DIM_DELTA_HEADS},
    [RM_P_DELTA_NORM] = {"delta_norm", "linear_attn.norm.weight", RM_DIM_DELTA_HEAD},
    [RM_P_GATE] = {"gate", "mlp.gate_proj.weight", RM_DIM_INNER, RM_DIM_HIDDEN},
    [RM_P_UP] = {"up", "mlp.up_proj.weight", RM_DIM_INNER, RM_DIM_HIDDEN},
    [RM_P_DOWN] = {"down", "mlp.down_proj.weight", RM_DIM_OUT, RM_DIM_INNER},
    [RM_P_ROUTER] = {"router", "mlp.gate.weight", RM_DIM_EXPERTS, RM_DIM_HIDDEN},
    [RM_P_ROUTER_BIAS] = {"router_bias", "mlp.gate.e_score_correction_bias", RM_DIM_EXPERTS},
    [RM_P_ROUTER_LOGIT_BIAS] = {"router_logit_bias", "mlp.gate.bias", RM_DIM_EXPERTS},
    [RM_P_SHARED_GATE] = {"shared_gate", "mlp.shared_experts.gate_proj.weight", RM_DIM_SHARED_INNER,
                          RM_DIM_HIDDEN},
    [RM_P_SHARED_UP] = {"shared_up", "mlp.shared_experts.up_proj.weight", RM_DIM_SHARED_INNER,
                        RM_DIM_HIDDEN},
    [RM_P_SHARED_DOWN] = {"shared_down", "mlp.shared_experts.down_proj.weight", RM_DIM_OUT,
                          RM_DIM_SHARED_INNER},
    [RM_P_SHARED_SWITCH] = {"shared_switch", "mlp.shared_expert_gate.weight", RM_DIM_ONE,
                            RM_DIM_HIDDEN},
    [RM_P_EXPERT_GATE] = {"expert_gate", "mlp.experts.#.gate_proj.weight", RM_DIM_EXPERT_INNER,
                          RM_DIM_HIDDEN},
    [RM_P_EXPERT_UP] = {"expert_up", "mlp.experts.#.up_proj.weight", RM_DIM_EXPERT_INNER,
                        RM_DIM_HIDDEN},
    [RM_P_EXPERT_DOWN] = {"expert_down", "mlp.experts.#.down_proj.weight", RM_DIM_EXPERT_OUT,
                          RM_DIM_EXPERT_INNER},
    [RM_P_EXPERT_GATE_BIAS] = {"expert_gate_bias", "mlp.experts.#.gate_proj.bias",
                               RM_DIM_EXPERT_INNER},
    [RM_P_EXPERT_UP_BIAS] = {"expert_up_bias", "mlp.experts.#.up_proj.bias", RM_DIM_EXPERT_INNER},
    [RM_P_EXPERT_DOWN_BIAS] = {"expert_down_bias", "mlp.experts.#.down_proj.bias",
                               RM_DIM_EXPERT_OUT},
};

rm_dim rm_kind_rows(const rm_spec *spec, rm_param_kind kind) {
  if (spec->qk_norm == RM_QK_NORM_WHOLE && kind == RM_P_Q_NORM) return RM_DIM_Q;
  if (spec->qk_norm == RM_QK_NORM_WHOLE && kind == RM_P_K_NORM) return RM_DIM_KV;
  return rm_kinds[kind].rows;
}

rm_range rm_param_rows_of(const rm_params *params, const rm_placement *placement,
                          const rm_param *param) {
  const rm_range experts = placement->experts;
  if (param->expert >= 0 &&
      (param->expert < experts.first || param->expert >= experts.first + experts.n))
    return (rm_range){0, 0};
  return placement->dims[rm_kind_rows(params->spec, param->kind)];
}

// ----------------------------------------------------------------------------------------- layout
// Reserves n elements and returns their offset.
static size_t take(layout *l, int64_t n, rm_dtype dtype) {
  size_t bytes, end;
  const size_t start = l->end;
  if (!rm_mul_size((size_t)n, rm_dtype_bytes(dtype), &bytes) ||
      !rm_add_size(bytes, ALIGN - 1, &bytes) || !rm_add_size(start, bytes / ALIGN * ALIGN, &end) ||
      end > SIZE_MAX / 4) {
    l->overflow = 1;
    return start;
  }
  l->end = end;
  return start;
}

// Whether a layer (NULL: the model outside of layers) has parameters of this kind.
static int has_kind(const rm_spec *s, const rm_layer_spec *layer, rm_param_kind kind) {
  if (!layer) return kind <= RM_P_FINAL_NORM;
  if (kind >= RM_P_GATE && !layer->is_moe == (kind >= RM_P_ROUTER)) return 0;
  if (kind >= RM_P_Q && kind < RM_P_GATE) { // of the layer's first block
    const rm_layer_kind of = kind >= RM_P_DELTA_Q ? RM_LAYER_DELTA_NET
                             : kind >= RM_P_Q_A   ? RM_LAYER_LATENT
                                                  : RM_LAYER_ATTENTION;
    const int is_output = kind == RM_P_O || kind == RM_P_O_BIAS;
    if (layer->kind != of && !(is_output && layer->kind == RM_LAYER_LATENT)) return 0;
  }
  switch (kind) {
    case RM_P_INPUT_NORM:
    case RM_P_PRE_MLP_NORM: return s->norm_before;
    case RM_P_POST_ATTN_NORM:
    case RM_P_POST_MLP_NORM: return s->norm_after;
    case RM_P_Q_BIAS:
    case RM_P_K_BIAS:
    case RM_P_V_BIAS: return s->attention_bias;
    case RM_P_O_BIAS: return s->o_bias;
    case RM_P_ATTN_GATE: return s->attention_gate;
    case RM_P_Q_NORM:
    case RM_P_K_NORM: return s->qk_norm != RM_QK_NORM_NONE;
    case RM_P_SINKS: return s->sinks;
    case RM_P_Q_A:
    case RM_P_Q_A_NORM: return s->q_lora_rank > 0;
    case RM_P_ROUTER_LOGIT_BIAS:
    case RM_P_EXPERT_GATE_BIAS:
    case RM_P_EXPERT_UP_BIAS:
    case RM_P_EXPERT_DOWN_BIAS: return s->moe_bias;
    case RM_P_GATE: return !s->ungated;
    case RM_P_SHARED_GATE:
    case RM_P_SHARED_UP:
    case RM_P_SHARED_DOWN: return s->shared_intermediate_size > 0;
    case RM_P_SHARED_SWITCH: return s->shared_intermediate_size > 0 && s->shared_switch;
    default: return kind > RM_P_FINAL_NORM;
  }
}

// The number of kinds, from this one on, that share one matrix.
static int n_fused(rm_param_kind kind) {
  if (kind == RM_P_DELTA_Q) return 6;
  if (kind == RM_P_Q || kind == RM_P_Q_BIAS || kind == RM_P_CONV_Q) return 3;
  return kind == RM_P_GATE || kind == RM_P_SHARED_GATE || kind == RM_P_EXPERT_GATE ||
                 kind == RM_P_EXPERT_GATE_BIAS
             ? 2
             : 1;
}

// Adds a parameter, or one for each expert. The matrices of this rank's experts follow one another;
// the rank has no memory for the others.
static void add(layout *l, rm_param p, size_t expert_bytes) {
  rm_params *params = l->params;
  const rm_range here = params->placement.experts;
  const size_t first = p.offset;
  const int64_t n = p.kind >= RM_P_EXPERT_GATE ? params->spec->n_experts : 0;
  for (int64_t e = 0; e < rm_max64(n, 1); e++, params->n++) {
    const int64_t place = e - here.first;
    p.expert = n ? (int32_t)e : -1;
    p.offset = first + (n && place > 0 && place < here.n ? (size_t)place * expert_bytes : 0);
    const rm_range held = rm_param_rows_of(params, &params->placement, &p);
    p.first = held.first;
    p.held = held.n;
    if (params->list) params->list[params->n] = p;
  }
}

// Lays out n adjacent kinds as one matrix: q, k and v; gate and up; all inputs of a delta net; its
// convolution; or one kind.
static void lay(layout *l, rm_layer_params *out, int layer, rm_param_kind first, int n) {
  rm_params *params = l->params;
  const rm_spec *spec = params->spec;
  const int tied = spec->tie_word_embeddings, is_vector = rm_kinds[first].cols == RM_DIM_ONE;
  const int plain = is_vector || (params->plain && rm_kind_is_dense(first)) ||
                    (first == RM_P_EMBED && !tied) || first == RM_P_CONV_Q;
  const int gated = n == 2 && !plain;
  const rm_dtype dtype = rm_kind_is_float32(first) ? RM_F32 : params->dtype;
  const int64_t cols = params->whole.dims[rm_kinds[first].cols].n,
                copies = first >= RM_P_EXPERT_GATE ? params->placement.experts.n : 1;
  int64_t rows = 0, row0 = 0;
  for (int i = 0; i < n; i++) rows += params->placement.dims[rm_kind_rows(spec, first + i)].n;
  if (gated) rows = rm_gate_up_rows(rows / 2);
  const int64_t each = plain ? rows * cols : rm_packed_elems(rows, cols);
  const rm_matrix matrix = first == RM_P_LM_HEAD && tied
                               ? out->of[RM_P_EMBED]
                               : (rm_matrix){take(l, copies * each, dtype), copies * each, 0};
  for (int i = 0; i < n; i++) {
    const rm_param_kind kind = first + i;
    const int64_t size = params->whole.dims[rm_kind_rows(spec, kind)].n;
    const size_t elem = rm_dtype_bytes(dtype);
    out->of[kind] = matrix;
    out->of[kind].is_rest = i > 0;
    add(l,
        (rm_param){.kind = kind,
                   .layer = layer,
                   .rows = is_vector ? 1 : size,
                   .cols = is_vector ? size : cols,
                   .n_dims = is_vector ? 1 : 2,
                   .dtype = dtype,
                   .layout = gated   ? RM_PACKED_GATE + i
                             : plain ? RM_PLAIN
                                     : RM_PACKED,
                   .offset = matrix.offset + (is_vector ? (size_t)row0 * elem : 0),
                   .dst_row0 = is_vector || gated ? 0 : row0,
                   .required = kind == RM_P_ROUTER_BIAS ? spec->router_bias
                                                        : kind != RM_P_LM_HEAD || !tied},
        (size_t)each * elem);
    row0 += params->placement.dims[rm_kind_rows(spec, kind)].n;
  }
}

// Adds all parameters ordered by layer, kind and expert, for the binary search of rm_params_find.
static void lay_all(layout *l) {
  const rm_spec *spec = l->params->spec;
  for (int layer = -1; layer < (int)spec->n_layers; layer++) {
    rm_layer_params *out = layer < 0 ? &l->params->ends : &l->params->layers[layer];
    for (int kind = 0, n; kind < RM_N_PARAM_KIND; kind += n) {
      const int has = has_kind(spec, layer < 0 ? NULL : &spec->layers[layer], kind);
      n = has ? n_fused(kind) : 1;
      if (has) lay(l, out, layer, kind, n);
      else out->of[kind].offset = SIZE_MAX;
    }
  }
}

rm_code rm_params_create(const rm_spec *spec, const rm_placement *placement, rm_dtype dtype,
                         int plain, rm_params **out, rm_error *err) {
  *out = NULL;
  // Checked before anything of that size is allocated.
  const int64_t per_expert = (spec->moe_bias ? 6 : 3) * spec->n_experts * spec->n_moe_layers;
  RM_FAIL_IF(per_expert > MAX_PARAMS, RM_E_CONFIG,
             "num_experts: expected at most %d expert tensors, got %ld (num_experts=%ld in "
             "%ld layers)",
             MAX_PARAMS, per_expert, spec->n_experts, spec->n_moe_layers);
  rm_params *params = rm_alloc(1, sizeof *params);
  if (!params) goto no_memory;
  params->spec = spec;
  params->whole = rm_placement_whole(spec);
  params->placement = placement ? *placement : params->whole;
  params->dtype = dtype;
  params->plain = plain;
  params->layers = rm_alloc((size_t)spec->n_layers, sizeof *params->layers);
  if (!params->layers) goto no_memory;
  layout count = {.params = params};
  lay_all(&count);
  if (count.overflow) {
    rm_params_destroy(params);
    return rm_fail(err, RM_E_CONFIG,
                   "config: expected a model that fits the address space, got sizes that overflow "
                   "it");
  }
  params->list = rm_alloc((size_t)params->n, sizeof *params->list);
  if (!params->list) goto no_memory;
  params->n = 0;
  layout fill = {.params = params};
  lay_all(&fill);
  params->bytes = fill.end;
  *out = params;
  return RM_OK;

no_memory:
  rm_params_destroy(params);
  return rm_no_memory(err, "the table of parameters", 0);
}

void rm_params_destroy(rm_params *params) {
  if (!params) return;
  rm_free(params->list);
  rm_free(params->layers);
  rm_free(params);
}

static int compare(const rm_param *p, rm_param_kind kind, int32_t layer, int32_t expert) {
  if (p->layer != layer) return p->layer < layer ? -1 : 1;
  if (p->kind != kind) return p->kind < kind ? -1 : 1;
  return (p->expert > expert) - (p->expert < expert);
}

int64_t rm_params_find(const rm_params *params, rm_param_kind kind, int32_t layer, int32_t expert) {
  for (int64_t low = 0, high = params->n; low < high;) {
    const int64_t middle = low + (high - low) / 2;
    const int order = compare(&params->list[middle], kind, layer, expert);
    if (order == 0) return middle;
    if (order < 0) low = middle + 1;
    else high = middle;
  }
  return -1;
}

rm_param_text rm_param_name(const rm_params *params, const rm_param *param) {
  const char *own = params->spec->names[param->kind],
             *pattern = own ? own : rm_kinds[param->kind].name, *place = strchr(pattern, '#');
  rm_param_text out;
  if (param->layer < 0) snprintf(out.text, sizeof out.text, "%s", pattern);
  else if (!place) snprintf(out.text, sizeof out.text, "model.layers.%d.%s", param->layer, pattern);
  else
    snprintf(out.text, sizeof out.text, "model.layers.%d.%.*s%d%s", param->layer,
             (int)(place - pattern), pattern, param->expert, place + 1);
  return out;
}
