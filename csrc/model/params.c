// params.c: the layout of a version. Matrices are in the order in which a forward pass reads them;
// each begins on a cache line. Parameters that are one matrix for the kernels (q|k|v, gate|up)
// share an offset and differ in dst_row0 or layout.
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

static size_t take_packed(layout *l, int64_t rows, int64_t cols) {
  return take(l, rm_packed_elems(rows, cols), l->params->dtype);
}

// Reserves the matrix of a dense gemm, plain or packed.
static size_t take_dense(layout *l, int64_t rows, int64_t cols) {
  return l->params->plain ? take(l, rows * cols, l->params->dtype) : take_packed(l, rows, cols);
}

static void add(layout *l, rm_param p) {
  rm_params *params = l->params;
  const rm_range held = rm_placement_rows(params->spec, &params->placement, p.kind, p.expert,
                                          p.n_dims == 1 ? p.cols : p.rows);
  p.first = held.first;
  p.held = held.n;
  if (params->list) params->list[params->n] = p;
  params->n++;
}

static void add_matrix(layout *l, rm_param_kind kind, int layer, int expert, int64_t rows,
                       int64_t cols, rm_layout how, size_t offset, int64_t dst_row0) {
  add(l, (rm_param){.kind = kind,
                    .layer = layer,
                    .expert = expert,
                    .rows = rows,
                    .cols = cols,
                    .n_dims = 2,
                    .dtype = l->params->dtype,
                    .layout = how,
                    .offset = offset,
                    .dst_row0 = dst_row0,
                    .dst_cols = cols,
                    .required = 1});
}

static void add_vector(layout *l, rm_param_kind kind, int layer, int64_t n, rm_dtype dtype,
                       size_t offset, int required) {
  add(l, (rm_param){.kind = kind,
                    .layer = layer,
                    .expert = -1,
                    .rows = 1,
                    .cols = n,
                    .n_dims = 1,
                    .dtype = dtype,
                    .layout = RM_PLAIN,
                    .offset = offset,
                    .dst_cols = n,
                    .required = required});
}

// Adds a vector of n elements, of which this rank holds `held`.
static size_t new_vector(layout *l, rm_param_kind kind, int layer, int64_t n, int64_t held) {
  const size_t offset = take(l, held, l->params->dtype);
  add_vector(l, kind, layer, n, l->params->dtype, offset, 1);
  return offset;
}

static size_t new_dense(layout *l, rm_param_kind kind, int layer, int64_t rows, int64_t held,
                        int64_t cols) {
  const size_t offset = take_dense(l, held, cols);
  add_matrix(l, kind, layer, -1, rows, cols, l->params->plain ? RM_PLAIN : RM_PACKED, offset, 0);
  return offset;
}

static size_t new_packed(layout *l, rm_param_kind kind, int layer, int64_t rows, int64_t held,
                         int64_t cols) {
  const size_t offset = take_packed(l, held, cols);
  add_matrix(l, kind, layer, -1, rows, cols, RM_PACKED, offset, 0);
  return offset;
}

static void lay_attention(layout *l, rm_layer_params *out, int layer) {
  const rm_spec *s = l->params->spec;
  const rm_placement *here = &l->params->placement;
  const int64_t q = s->n_heads * s->head_dim, kv = s->n_kv_heads * s->head_dim,
                hidden = s->hidden_size;
  const int64_t q_here = here->heads.n * s->head_dim, kv_here = here->kv_heads.n * s->head_dim;
  const rm_layout how = l->params->plain ? RM_PLAIN : RM_PACKED;
  out->qkv = take_dense(l, q_here + 2 * kv_here, hidden);
  add_matrix(l, RM_P_Q, layer, -1, q, hidden, how, out->qkv, 0);
  add_matrix(l, RM_P_K, layer, -1, kv, hidden, how, out->qkv, q_here);
  add_matrix(l, RM_P_V, layer, -1, kv, hidden, how, out->qkv, q_here + kv_here);
  out->o = new_dense(l, RM_P_O, layer, hidden, here->hidden.n, q);
  out->qkv_bias = out->o_bias = out->q_norm = out->k_norm = SIZE_MAX;
  if (s->attention_bias) {
    const size_t each = rm_dtype_bytes(l->params->dtype);
    out->qkv_bias = take(l, q_here + 2 * kv_here, l->params->dtype);
    add_vector(l, RM_P_Q_BIAS, layer, q, l->params->dtype, out->qkv_bias, 1);
    add_vector(l, RM_P_K_BIAS, layer, kv, l->params->dtype, out->qkv_bias + (size_t)q_here * each,
               1);
    add_vector(l, RM_P_V_BIAS, layer, kv, l->params->dtype,
               out->qkv_bias + (size_t)(q_here + kv_here) * each, 1);
  }
  if (s->o_bias) out->o_bias = new_vector(l, RM_P_O_BIAS, layer, hidden, here->hidden.n);
  if (!s->qk_norm) return;
  const int whole = s->qk_norm == RM_QK_NORM_WHOLE;
  out->q_norm =
      new_vector(l, RM_P_Q_NORM, layer, whole ? q : s->head_dim, whole ? q_here : s->head_dim);
  out->k_norm =
      new_vector(l, RM_P_K_NORM, layer, whole ? kv : s->head_dim, whole ? kv_here : s->head_dim);
}

static void lay_dense(layout *l, rm_layer_params *out, int layer) {
  const rm_spec *s = l->params->spec;
  const rm_placement *here = &l->params->placement;
  const int64_t width = s->intermediate_size, hidden = s->hidden_size;
  const int plain = l->params->plain;
  if (s->ungated) {
    out->gate_up = new_dense(l, RM_P_UP, layer, width, here->inner.n, hidden);
  } else {
    out->gate_up =
        take_dense(l, plain ? 2 * here->inner.n : rm_gate_up_rows(here->inner.n), hidden);
    add_matrix(l, RM_P_GATE, layer, -1, width, hidden, plain ? RM_PLAIN : RM_PACKED_GATE,
               out->gate_up, 0);
    add_matrix(l, RM_P_UP, layer, -1, width, hidden, plain ? RM_PLAIN : RM_PACKED_UP, out->gate_up,
               plain ? here->inner.n : 0);
  }
  out->down = new_dense(l, RM_P_DOWN, layer, hidden, here->hidden.n, width);
  out->router = out->router_bias = out->expert_gate_up = out->expert_down = SIZE_MAX;
  out->shared_gate_up = out->shared_down = out->shared_switch = SIZE_MAX;
}

// Adds a matrix of each expert. This rank's matrices are `stride` bytes apart; it has no memory for
// the others.
static void add_experts(layout *l, rm_param_kind kind, int layer, int64_t rows, int64_t cols,
                        rm_layout how, size_t offset, size_t stride) {
  const rm_range here = l->params->placement.experts;
  for (int64_t e = 0; e < l->params->spec->n_experts; e++) {
    const int64_t place = e >= here.first && e < here.first + here.n ? e - here.first : 0;
    add_matrix(l, kind, layer, (int)e, rows, cols, how, offset + (size_t)place * stride, 0);
  }
}

static void lay_shared_expert(layout *l, rm_layer_params *out, int layer) {
  const rm_spec *s = l->params->spec;
  const rm_placement *here = &l->params->placement;
  const int64_t width = s->shared_intermediate_size, hidden = s->hidden_size;
  out->shared_gate_up = out->shared_down = out->shared_switch = SIZE_MAX;
  if (!width) return;
  out->shared_gate_up = take_packed(l, rm_gate_up_rows(here->shared_inner.n), hidden);
  add_matrix(l, RM_P_SHARED_GATE, layer, -1, width, hidden, RM_PACKED_GATE, out->shared_gate_up, 0);
  add_matrix(l, RM_P_SHARED_UP, layer, -1, width, hidden, RM_PACKED_UP, out->shared_gate_up, 0);
  out->shared_down = new_packed(l, RM_P_SHARED_DOWN, layer, hidden, here->hidden.n, width);
  if (s->shared_switch) out->shared_switch = new_packed(l, RM_P_SHARED_SWITCH, layer, 1, 1, hidden);
}

static void lay_experts(layout *l, rm_layer_params *out, int layer) {
  const rm_spec *s = l->params->spec;
  const rm_placement *here = &l->params->placement;
  const int64_t width = s->moe_intermediate_size, hidden = s->hidden_size;
  const size_t each = rm_dtype_bytes(l->params->dtype);
  out->gate_up = out->down = SIZE_MAX;
  out->router = new_packed(l, RM_P_ROUTER, layer, s->n_experts, s->n_experts, hidden);
  out->router_bias = take(l, s->n_experts, RM_F32);
  add_vector(l, RM_P_ROUTER_BIAS, layer, s->n_experts, RM_F32, out->router_bias, s->router_bias);
  lay_shared_expert(l, out, layer);
  out->expert_gate_up_stride = rm_packed_elems(rm_gate_up_rows(here->expert_inner.n), hidden);
  out->expert_down_stride = rm_packed_elems(here->expert_hidden.n, width);
  out->expert_gate_up = take(l, here->experts.n * out->expert_gate_up_stride, l->params->dtype);
  out->expert_down = take(l, here->experts.n * out->expert_down_stride, l->params->dtype);
  const size_t gate_up_bytes = (size_t)out->expert_gate_up_stride * each,
               down_bytes = (size_t)out->expert_down_stride * each;
  add_experts(l, RM_P_EXPERT_GATE, layer, width, hidden, RM_PACKED_GATE, out->expert_gate_up,
              gate_up_bytes);
  add_experts(l, RM_P_EXPERT_UP, layer, width, hidden, RM_PACKED_UP, out->expert_gate_up,
              gate_up_bytes);
  add_experts(l, RM_P_EXPERT_DOWN, layer, hidden, width, RM_PACKED, out->expert_down, down_bytes);
}

// Adds all parameters ordered by layer, kind and expert, for the binary search of rm_params_find.
static void lay_all(layout *l) {
  rm_params *p = l->params;
  const rm_spec *s = p->spec;
  const int64_t vocab = p->placement.vocab.n;
  if (s->tie_word_embeddings) {
    p->lm_head = p->embed = take_packed(l, vocab, s->hidden_size);
    add_matrix(l, RM_P_EMBED, -1, -1, s->vocab_size, s->hidden_size, RM_PACKED, p->embed, 0);
  } else {
    p->embed = take(l, vocab * s->hidden_size, p->dtype);
    add_matrix(l, RM_P_EMBED, -1, -1, s->vocab_size, s->hidden_size, RM_PLAIN, p->embed, 0);
    p->lm_head = take_packed(l, vocab, s->hidden_size);
  }
  add_matrix(l, RM_P_LM_HEAD, -1, -1, s->vocab_size, s->hidden_size, RM_PACKED, p->lm_head, 0);
  if (p->list) p->list[p->n - 1].required = !s->tie_word_embeddings;
  p->final_norm = new_vector(l, RM_P_FINAL_NORM, -1, s->hidden_size, s->hidden_size);
  for (int i = 0; i < (int)s->n_layers; i++) {
    rm_layer_params *out = &p->layers[i];
    out->input_norm = s->norm_before
                          ? new_vector(l, RM_P_INPUT_NORM, i, s->hidden_size, s->hidden_size)
                          : SIZE_MAX;
    out->post_attn_norm =
        s->norm_after ? new_vector(l, RM_P_POST_ATTN_NORM, i, s->hidden_size, s->hidden_size)
                      : SIZE_MAX;
    out->pre_mlp_norm = s->norm_before
                            ? new_vector(l, RM_P_PRE_MLP_NORM, i, s->hidden_size, s->hidden_size)
                            : SIZE_MAX;
    out->post_mlp_norm = s->norm_after
                             ? new_vector(l, RM_P_POST_MLP_NORM, i, s->hidden_size, s->hidden_size)
                             : SIZE_MAX;
    lay_attention(l, out, i);
    if (s->layers[i].is_moe) lay_experts(l, out, i);
    else lay_dense(l, out, i);
  }
}

rm_code rm_params_create(const rm_spec *spec, const rm_placement *placement, rm_dtype dtype,
                         int plain, rm_params **out, rm_error *err) {
  *out = NULL;
  // Checked before anything of that size is allocated.
  const int64_t per_expert = 3 * spec->n_experts * spec->n_moe_layers;
  if (per_expert > MAX_PARAMS)
    return rm_fail(err, RM_E_CONFIG,
                   "num_experts: expected at most %d expert tensors, got %lld (num_experts=%lld in "
                   "%lld layers)",
                   MAX_PARAMS, (long long)per_expert, (long long)spec->n_experts,
                   (long long)spec->n_moe_layers);
  rm_params *params = rm_alloc(1, sizeof *params);
  if (!params) goto no_memory;
  params->spec = spec;
  params->placement = placement ? *placement : rm_placement_whole(spec);
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
  return rm_fail(err, RM_E_MEMORY, "no memory for the parameter table of %lld layers",
                 (long long)spec->n_layers);
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

static const struct {
  const char *kind, *name;
} hf_names[RM_N_PARAM_KIND] = {
    [RM_P_EMBED] = {"embed", "model.embed_tokens.weight"},
    [RM_P_LM_HEAD] = {"lm_head", "lm_head.weight"},
    [RM_P_FINAL_NORM] = {"final_norm", "model.norm.weight"},
    [RM_P_INPUT_NORM] = {"input_norm", "input_layernorm.weight"},
    [RM_P_POST_ATTN_NORM] = {"post_attn_norm", "post_self_attn_layernorm.weight"},
    [RM_P_PRE_MLP_NORM] = {"pre_mlp_norm", "post_attention_layernorm.weight"},
    [RM_P_POST_MLP_NORM] = {"post_mlp_norm", "post_feedforward_layernorm.weight"},
    [RM_P_Q] = {"q", "self_attn.q_proj.weight"},
    [RM_P_K] = {"k", "self_attn.k_proj.weight"},
    [RM_P_V] = {"v", "self_attn.v_proj.weight"},
    [RM_P_O] = {"o", "self_attn.o_proj.weight"},
    [RM_P_Q_BIAS] = {"q_bias", "self_attn.q_proj.bias"},
    [RM_P_K_BIAS] = {"k_bias", "self_attn.k_proj.bias"},
    [RM_P_V_BIAS] = {"v_bias", "self_attn.v_proj.bias"},
    [RM_P_O_BIAS] = {"o_bias", "self_attn.o_proj.bias"},
    [RM_P_Q_NORM] = {"q_norm", "self_attn.q_norm.weight"},
    [RM_P_K_NORM] = {"k_norm", "self_attn.k_norm.weight"},
    [RM_P_GATE] = {"gate", "mlp.gate_proj.weight"},
    [RM_P_UP] = {"up", "mlp.up_proj.weight"},
    [RM_P_DOWN] = {"down", "mlp.down_proj.weight"},
    [RM_P_ROUTER] = {"router", "mlp.gate.weight"},
    [RM_P_ROUTER_BIAS] = {"router_bias", "mlp.gate.e_score_correction_bias"},
    [RM_P_SHARED_GATE] = {"shared_gate", "mlp.shared_experts.gate_proj.weight"},
    [RM_P_SHARED_UP] = {"shared_up", "mlp.shared_experts.up_proj.weight"},
    [RM_P_SHARED_DOWN] = {"shared_down", "mlp.shared_experts.down_proj.weight"},
    [RM_P_SHARED_SWITCH] = {"shared_switch", "mlp.shared_expert_gate.weight"},
    [RM_P_EXPERT_GATE] = {"expert_gate", "mlp.experts.#.gate_proj.weight"},
    [RM_P_EXPERT_UP] = {"expert_up", "mlp.experts.#.up_proj.weight"},
    [RM_P_EXPERT_DOWN] = {"expert_down", "mlp.experts.#.down_proj.weight"},
};

const char *rm_param_kind_name(int kind) {
  return kind < RM_N_PARAM_KIND ? hf_names[kind].kind : NULL;
}

int rm_param_name(const rm_params *params, const rm_param *param, char *buffer, size_t capacity) {
  const char *own = params->spec->names[param->kind],
             *pattern = own ? own : hf_names[param->kind].name, *place = strchr(pattern, '#');
  if (param->layer < 0) return snprintf(buffer, capacity, "%s", pattern);
  if (!place) return snprintf(buffer, capacity, "model.layers.%d.%s", param->layer, pattern);
  return snprintf(buffer, capacity, "model.layers.%d.%.*s%d%s", param->layer,
                  (int)(place - pattern), pattern, param->expert, place + 1);
}
