// names.c: the table of spellings. A line has a pattern, in which the first # is the layer and the
// second the expert, and what the tensor contains. Before matching, the prefixes of module wrappers
// (torch.compile, DDP, FSDP, activation checkpointing) and leading "model." are removed, so one
// line matches the checkpoint, the bare module and the wrapped one. Regular expressions were
// rejected: compiling one takes longer than matching all sixty patterns.
#include "weights/names.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"

typedef enum form {
  ONE, // a parameter as it is
  TURNED, // q or k, with rows in the order of spec->wq_rows
  QKV, // q, k and v rows one after another
  GATE_UP, // gate rows, then up rows
  EXPERTS, // [experts][rows][cols] of one kind
  EXPERTS_GATE_UP, // [experts][gate rows, then up rows][cols]
  NOTHING, // a buffer that follows from the config
} form;

typedef struct spelling {
  const char *pattern;
  form form;
  rm_param_kind kind; // QKV: Q; GATE_UP: the gate
} spelling;

static const spelling spellings[] = {
    // Hugging Face checkpoints; a family's different names are in its spec
    {"embed_tokens.weight", ONE, RM_P_EMBED},
    {"lm_head.weight", ONE, RM_P_LM_HEAD},
    {"norm.weight", ONE, RM_P_FINAL_NORM},
    {"layers.#.input_layernorm.weight", ONE, RM_P_INPUT_NORM},
    {"layers.#.post_attention_layernorm.weight", ONE, RM_P_PRE_MLP_NORM},
    {"layers.#.self_attn.q_proj.weight", ONE, RM_P_Q},
    {"layers.#.self_attn.k_proj.weight", ONE, RM_P_K},
    {"layers.#.self_attn.v_proj.weight", ONE, RM_P_V},
    {"layers.#.self_attn.o_proj.weight", ONE, RM_P_O},
    {"layers.#.self_attn.q_proj.bias", ONE, RM_P_Q_BIAS},
    {"layers.#.self_attn.k_proj.bias", ONE, RM_P_K_BIAS},
    {"layers.#.self_attn.v_proj.bias", ONE, RM_P_V_BIAS},
    {"layers.#.self_attn.o_proj.bias", ONE, RM_P_O_BIAS},
    {"layers.#.self_attn.q_norm.weight", ONE, RM_P_Q_NORM},
    {"layers.#.self_attn.k_norm.weight", ONE, RM_P_K_NORM},
    {"layers.#.mlp.gate_proj.weight", ONE, RM_P_GATE},
    {"layers.#.mlp.up_proj.weight", ONE, RM_P_UP},
    {"layers.#.mlp.down_proj.weight", ONE, RM_P_DOWN},
    {"layers.#.mlp.gate.weight", ONE, RM_P_ROUTER},
    {"layers.#.post_self_attn_layernorm.weight", ONE, RM_P_POST_ATTN_NORM},
    {"layers.#.post_feedforward_layernorm.weight", ONE, RM_P_POST_MLP_NORM},
    {"layers.#.mlp.shared_experts.gate_proj.weight", ONE, RM_P_SHARED_GATE},
    {"layers.#.mlp.shared_experts.up_proj.weight", ONE, RM_P_SHARED_UP},
    {"layers.#.mlp.shared_experts.down_proj.weight", ONE, RM_P_SHARED_DOWN},
    {"layers.#.mlp.shared_expert_gate.weight", ONE, RM_P_SHARED_SWITCH},
    {"layers.#.mlp.experts.#.gate_proj.weight", ONE, RM_P_EXPERT_GATE},
    {"layers.#.mlp.experts.#.up_proj.weight", ONE, RM_P_EXPERT_UP},
    {"layers.#.mlp.experts.#.down_proj.weight", ONE, RM_P_EXPERT_DOWN},
    // modules of transformers 5: one tensor for all experts
    {"layers.#.mlp.experts.gate_up_proj", EXPERTS_GATE_UP, RM_P_EXPERT_GATE},
    {"layers.#.mlp.experts.down_proj", EXPERTS, RM_P_EXPERT_DOWN},
    // fused projections, as inference engines hold them
    {"layers.#.self_attn.qkv_proj.weight", QKV, RM_P_Q},
    {"layers.#.self_attn.qkv_proj.bias", QKV, RM_P_Q_BIAS},
    {"layers.#.mlp.gate_up_proj.weight", GATE_UP, RM_P_GATE},
    {"layers.#.mlp.experts.#.gate_up_proj.weight", GATE_UP, RM_P_EXPERT_GATE},
    // torchtitan; its fused wqkv is saved as wq, wk, wv
    {"tok_embeddings.weight", ONE, RM_P_EMBED},
    {"output.weight", ONE, RM_P_LM_HEAD},
    {"layers.#.attention_norm.weight", ONE, RM_P_INPUT_NORM},
    {"layers.#.ffn_norm.weight", ONE, RM_P_PRE_MLP_NORM},
    {"layers.#.attention.wq.weight", TURNED, RM_P_Q},
    {"layers.#.attention.wk.weight", TURNED, RM_P_K},
    {"layers.#.attention.wv.weight", ONE, RM_P_V},
    {"layers.#.attention.qkv_linear.wq.weight", TURNED, RM_P_Q},
    {"layers.#.attention.qkv_linear.wk.weight", TURNED, RM_P_K},
    {"layers.#.attention.qkv_linear.wv.weight", ONE, RM_P_V},
    {"layers.#.attention.wo.weight", ONE, RM_P_O},
    {"layers.#.attention.q_norm.weight", ONE, RM_P_Q_NORM},
    {"layers.#.attention.k_norm.weight", ONE, RM_P_K_NORM},
    {"layers.#.feed_forward.w1.weight", ONE, RM_P_GATE},
    {"layers.#.feed_forward.w2.weight", ONE, RM_P_DOWN},
    {"layers.#.feed_forward.w3.weight", ONE, RM_P_UP},
    {"layers.#.moe.router.gate.weight", ONE, RM_P_ROUTER},
    {"layers.#.moe.shared_experts.w1.weight", ONE, RM_P_SHARED_GATE},
    {"layers.#.moe.shared_experts.w2.weight", ONE, RM_P_SHARED_DOWN},
    {"layers.#.moe.shared_experts.w3.weight", ONE, RM_P_SHARED_UP},
    {"layers.#.moe.experts.w1", EXPERTS, RM_P_EXPERT_GATE},
    {"layers.#.moe.experts.w2", EXPERTS, RM_P_EXPERT_DOWN},
    {"layers.#.moe.experts.w3", EXPERTS, RM_P_EXPERT_UP},
    {"layers.#.moe.experts.w1_EFD", EXPERTS, RM_P_EXPERT_GATE},
    {"layers.#.moe.experts.w2_EDF", EXPERTS, RM_P_EXPERT_DOWN},
    {"layers.#.moe.experts.w3_EFD", EXPERTS, RM_P_EXPERT_UP},
    {"layers.#.moe.routed_experts.inner_experts.w1_EFD", EXPERTS, RM_P_EXPERT_GATE},
    {"layers.#.moe.routed_experts.inner_experts.w2_EDF", EXPERTS, RM_P_EXPERT_DOWN},
    {"layers.#.moe.routed_experts.inner_experts.w3_EFD", EXPERTS, RM_P_EXPERT_UP},
    // the router's bias, which the choice of experts adds
    {"layers.#.mlp.gate.e_score_correction_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.mlp.gate.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.mlp.router.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.mlp.e_score_correction_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.mlp.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.moe.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"layers.#.moe.expert_bias_E", ONE, RM_P_ROUTER_BIAS},
    // buffers of rope in older checkpoints
    {"rotary_emb.inv_freq", NOTHING, 0},
    {"layers.#.self_attn.rotary_emb.inv_freq", NOTHING, 0},
    {"layers.#.self_attn.rotary_emb.cos_cached", NOTHING, 0},
    {"layers.#.self_attn.rotary_emb.sin_cached", NOTHING, 0},
};

static const char *const wrappers[] = {"_orig_mod.", "module.", "_fsdp_wrapped_module.",
                                       "_checkpoint_wrapped_module."};

// ----------------------------------------------------------------------------------------- bounds
static int is_continuation(unsigned char c) { return (c & 0xC0) == 0x80; }

// Returns 1 when the bytes are UTF-8 without NUL or surrogates, so that a message can contain them.
static int is_text(const char *name, size_t length) {
  const unsigned char *p = (const unsigned char *)name, *end = p + length;
  while (p < end) {
    const int more = *p == 0      ? -1
                     : *p < 0x80  ? 0
                     : *p >= 0xF5 ? -1
                     : *p >= 0xF0 ? 3
                     : *p >= 0xE0 ? 2
                     : *p >= 0xC2 ? 1
                                  : -1;
    if (more < 0 || end - p <= more) return 0;
    if ((*p == 0xED && p[1] >= 0xA0) || (*p == 0xE0 && p[1] < 0xA0) ||
        (*p == 0xF0 && p[1] < 0x90) || (*p == 0xF4 && p[1] >= 0x90))
      return 0;
    for (int i = 1; i <= more; i++)
      if (!is_continuation(p[i])) return 0;
    p += more + 1;
  }
  return 1;
}

static rm_code check_name(const char *name, size_t length, rm_error *err) {
  if (length > RM_NAME_MAX)
    return rm_fail(err, RM_E_LIMIT, "expected a tensor name of at most %d bytes, got %zu",
                   RM_NAME_MAX, length);
  if (!is_text(name, length))
    return rm_fail(err, RM_E_LIMIT, "a tensor name of %zu bytes has a NUL byte or is not UTF-8",
                   length);
  return RM_OK;
}

// --------------------------------------------------------------------------------------- matching
static size_t wrapper_length(const char *at) {
  for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++) {
    const size_t n = strlen(wrappers[i]);
    if (strncmp(at, wrappers[i], n) == 0) return n;
  }
  return 0;
}

// Returns the name without wrappers and leading "model."; `out` has room for length + 1 bytes.
static const char *bare_name(char *out, const char *name, size_t length) {
  char *to = out;
  memcpy(out, name, length);
  out[length] = 0;
  for (const char *from = out; *from;) {
    size_t n;
    while ((n = wrapper_length(from))) from += n;
    while (*from && *from != '.') *to++ = *from++;
    if (*from == '.') *to++ = *from++;
  }
  *to = 0;
  const char *bare = out;
  while (strncmp(bare, "model.", 6) == 0) bare += 6;
  return bare;
}

// Reads a decimal number without sign or leading zeros and moves *at behind it. Returns −1 if there
// is not one.
static int32_t read_number(const char **at) {
  const char *p = *at;
  int32_t value = 0;
  int digits = 0;
  for (; *p >= '0' && *p <= '9'; p++, digits++) {
    if (digits == 9) return -1;
    value = value * 10 + (*p - '0');
  }
  if (digits == 0 || (digits > 1 && **at == '0')) return -1;
  *at = p;
  return value;
}

static int matches(const char *pattern, const char *name, int32_t numbers[2]) {
  int n = 0;
  numbers[0] = numbers[1] = -1;
  for (; *pattern; pattern++) {
    if (*pattern == '#') {
      if ((numbers[n++] = read_number(&name)) < 0) return 0;
    } else if (*pattern != *name++) {
      return 0;
    }
  }
  return *name == 0;
}

// ---------------------------------------------------------------------------------------- targets
static rm_code add_piece(rm_target *target, int64_t param, int64_t outer, int64_t row0,
                         rm_error *err) {
  if (!target->capacity) {
    target->pieces = target->few;
    target->capacity = RM_FEW_PIECES;
  }
  if (target->n_pieces == target->capacity) {
    const int is_few = target->pieces == target->few;
    const int64_t capacity = 4 * target->capacity;
    rm_param_rows *grown =
        rm_realloc(is_few ? NULL : target->pieces, (size_t)capacity, sizeof *grown);
    if (!grown)
      return rm_fail(err, RM_E_MEMORY, "no memory for the %lld pieces of a tensor",
                     (long long)capacity);
    if (is_few) memcpy(grown, target->few, sizeof target->few);
    target->pieces = grown;
    target->capacity = capacity;
  }
  target->pieces[target->n_pieces++] =
      (rm_param_rows){.param = param, .outer = outer, .row0 = row0};
  return RM_OK;
}

// Writes the family's own name of a parameter kind to `pattern` and matches it. Returns 0 if the
// family has none or it does not match.
static int matches_own(const rm_params *params, rm_param_kind kind, const char *bare, char *pattern,
                       size_t capacity, int32_t numbers[2]) {
  const char *own = params->spec->names[kind];
  if (!own) return 0;
  snprintf(pattern, capacity, "%s%s", kind <= RM_P_FINAL_NORM ? "" : "layers.#.", own);
  return matches(strncmp(pattern, "model.", 6) == 0 ? pattern + 6 : pattern, bare, numbers);
}

static int64_t extent(const rm_param *p) { return p->n_dims == 1 ? p->cols : p->rows; }

// Adds the parameters of `kinds`, concatenated along the rows; expert −1: not of an expert.
static rm_code stack(const rm_params *params, rm_target *out, const rm_param_kind *kinds,
                     int n_kinds, int32_t layer, int32_t expert, int64_t outer, rm_error *err) {
  int64_t rows = 0;
  for (int i = 0; i < n_kinds; i++) {
    const int64_t index = rm_params_find(params, kinds[i], layer, expert);
    if (index < 0) return RM_E_UNEXPECTED_KEY;
    const rm_code code = add_piece(out, index, outer, rows, err);
    if (code) return code;
    rows += extent(&params->list[index]);
  }
  const rm_param *first = &params->list[out->pieces[0].param];
  out->n_dims = first->n_dims;
  out->shape[0] = rows;
  if (first->n_dims == 2) out->shape[1] = first->cols;
  return RM_OK;
}

static rm_code stack_experts(const rm_params *params, rm_target *out, const rm_param_kind *kinds,
                             int n_kinds, int32_t layer, rm_error *err) {
  const int64_t experts = params->spec->n_experts;
  for (int32_t e = 0; e < experts; e++) {
    const rm_code code = stack(params, out, kinds, n_kinds, layer, e, e, err);
    if (code) return code;
  }
  if (experts == 0) return RM_E_UNEXPECTED_KEY;
  out->n_dims = 3;
  out->shape[2] = out->shape[1];
  out->shape[1] = out->shape[0];
  out->shape[0] = experts;
  return RM_OK;
}

static rm_code fill(const rm_params *params, const spelling *s, const int32_t numbers[2],
                    rm_target *out, rm_error *err) {
  const rm_param_kind next = (rm_param_kind)(s->kind + 1);
  // Q, K, V and gate, up are adjacent in the enum.
  const rm_param_kind kinds[3] = {s->kind, next, (rm_param_kind)(s->kind + 2)};
  switch (s->form) {
    case ONE: return stack(params, out, kinds, 1, numbers[0], numbers[1], 0, err);
    case TURNED:
      if (params->spec->wq_rows == RM_WQ_NONE) return RM_E_UNEXPECTED_KEY;
      return stack(params, out, kinds, 1, numbers[0], numbers[1], 0, err);
    case QKV: return stack(params, out, kinds, 3, numbers[0], numbers[1], 0, err);
    case GATE_UP: return stack(params, out, kinds, 2, numbers[0], numbers[1], 0, err);
    case EXPERTS: return stack_experts(params, out, kinds, 1, numbers[0], err);
    case EXPERTS_GATE_UP: return stack_experts(params, out, kinds, 2, numbers[0], err);
    case NOTHING: return RM_OK;
  }
  return RM_E_UNEXPECTED_KEY;
}

// Sets head_dim and turned of pieces whose tensor has the rows of adjacent elements rotated by
// rope: the family's checkpoints have that order, or tensors of this name do.
static void set_pairs(const rm_params *params, const spelling *s, rm_target *out) {
  const rm_spec *spec = params->spec;
  const int64_t turned = s->form == TURNED ? spec->head_dim : spec->rotary_dim;
  if (s->form == TURNED ? spec->wq_rows != RM_WQ_NEIGHBOURS : !spec->rope_neighbours) return;
  for (int64_t i = 0; i < out->n_pieces; i++) {
    const rm_param_kind kind = params->list[out->pieces[i].param].kind;
    if (kind != RM_P_Q && kind != RM_P_K && kind != RM_P_Q_BIAS && kind != RM_P_K_BIAS) continue;
    out->pieces[i].head_dim = spec->head_dim;
    out->pieces[i].turned = turned;
  }
}

// Fails for a known spelling that this model does not have: the message names the layer, expert or
// option.
static rm_code fail_absent(const rm_params *params, const char *name, const spelling *s,
                           const int32_t numbers[2], rm_error *err) {
  const rm_spec *spec = params->spec;
  if (s->form == TURNED && spec->wq_rows == RM_WQ_NONE)
    return rm_fail(err, RM_E_UNEXPECTED_KEY,
                   "%s: the order of its rows is known of Llama, Mistral and Qwen3; expected "
                   "self_attn.%c_proj",
                   name, s->kind == RM_P_Q ? 'q' : 'k');
  if (numbers[0] >= spec->n_layers)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: layer %d; the model has %lld", name, numbers[0],
                   (long long)spec->n_layers);
  if (numbers[1] >= 0 && spec->layers[numbers[0]].is_moe && numbers[1] >= spec->n_experts)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: expert %d; the model has %lld", name, numbers[1],
                   (long long)spec->n_experts);
  if (s->kind >= RM_P_Q_BIAS && s->kind <= RM_P_O_BIAS)
    // With attention_bias some families still have no bias of o.
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: the model has no bias there%s", name,
                   spec->attention_bias ? "" : " (attention_bias=False)");
  if (s->kind == RM_P_Q_NORM || s->kind == RM_P_K_NORM)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: the model does not norm q and k", name);
  if (s->kind >= RM_P_INPUT_NORM && s->kind <= RM_P_POST_MLP_NORM)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: the model norms a block's %s", name,
                   spec->norm_after ? "output" : "input");
  if (s->kind == RM_P_GATE && spec->ungated && !spec->layers[numbers[0]].is_moe)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: the model's MLPs have no gate", name);
  if (s->kind >= RM_P_SHARED_GATE && s->kind <= RM_P_SHARED_SWITCH &&
      spec->layers[numbers[0]].is_moe)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: the model has no %s", name,
                   spec->shared_intermediate_size ? "gate of its shared expert" : "shared expert");
  if (s->kind >= RM_P_GATE && numbers[0] >= 0)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: layer %d %s", name, numbers[0],
                   spec->layers[numbers[0]].is_moe ? "is a mixture of experts" : "has no experts");
  return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s is no parameter of this model", name);
}

// Fills *out for a name of this spelling.
static rm_code resolve(const rm_params *params, const char *name, const spelling *s,
                       const int32_t numbers[2], rm_target *out, rm_error *err) {
  const rm_code code = fill(params, s, numbers, out, err);
  if (!code) set_pairs(params, s, out);
  return code == RM_E_UNEXPECTED_KEY ? fail_absent(params, name, s, numbers, err) : code;
}

rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, rm_target *out,
                         rm_error *err) {
  rm_code code = check_name(name, length, err);
  if (code) return code;
  char shown[RM_NAME_MAX + 1], buffer[RM_NAME_MAX + 1];
  memcpy(shown, name, length);
  shown[length] = 0;
  const char *bare = bare_name(buffer, name, length);
  out->n_pieces = 0;
  out->n_dims = 0;
  int32_t numbers[2];
  // The family's names come first: a family may give a name of the table to another kind.
  for (int kind = 0; kind < RM_N_PARAM_KIND; kind++) {
    char pattern[RM_NAME_MAX + 16];
    if (!matches_own(params, (rm_param_kind)kind, bare, pattern, sizeof pattern, numbers)) continue;
    const spelling own = {pattern, ONE, (rm_param_kind)kind};
    return resolve(params, shown, &own, numbers, out, err);
  }
  for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++)
    if (matches(spellings[i].pattern, bare, numbers))
      return resolve(params, shown, &spellings[i], numbers, out, err);
  return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s is no parameter of this model",
                 length ? shown : "''");
}

void rm_target_clear(rm_target *target) {
  if (target->pieces != target->few) rm_free(target->pieces);
  *target = (rm_target){0};
}
