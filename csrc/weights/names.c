// names.c: the spellings of names. A family's own names and those of Hugging Face checkpoints are
// in the spec and in rm_kinds; the table below has one line for each other spelling: a pattern, in
// which # is the expert, and what the tensor contains. Before matching, the prefixes of module
// wrappers (torch.compile, DDP, FSDP, activation checkpointing), leading "model." and the layer are
// removed, so one line matches the checkpoint, the bare module and the wrapped one. Regular
// expressions were rejected: compiling one takes longer than matching all patterns.
#include "weights/names.h"

#include <string.h>

#include "base/memory.h"

typedef enum form {
  ONE, // a parameter as it is
  TURNED, // q or k, with rows in the order of spec->wq_rows
  QKV, // q, k and v rows one after another
  CONV, // as [rows][1][cols]
  CONV_QKV, // q, k and v rows one after another, as [rows][1][cols]
  QKVZ, // of a delta net: the rows of each key head one after another, and of the value heads with it
  BA, // likewise
  GATE_UP, // gate rows, then up rows
  EXPERTS, // [experts][rows][cols] of one kind
  EXPERTS_GATE_UP, // [experts][gate rows, then up rows][cols]
  KV_B, // for each head of latent attention the rows of k_b, transposed, then those of v_b
  NOTHING, // a buffer that follows from the config
} form;

typedef struct spelling {
  const char *pattern;
  form form;
  rm_param_kind kind; // the first; NOTHING: any kind of the same place
} spelling;

static const spelling spellings[] = {
    // modules of transformers 5: one tensor for all experts
    {"mlp.experts.gate_up_proj", EXPERTS_GATE_UP, RM_P_EXPERT_GATE},
    {"mlp.experts.down_proj", EXPERTS, RM_P_EXPERT_DOWN},
    {"mlp.experts.gate_up_proj_bias", EXPERTS_GATE_UP, RM_P_EXPERT_GATE_BIAS},
    {"mlp.experts.down_proj_bias", EXPERTS, RM_P_EXPERT_DOWN_BIAS},
    {"block_sparse_moe.experts.gate_up_proj", EXPERTS_GATE_UP, RM_P_EXPERT_GATE},
    {"block_sparse_moe.experts.down_proj", EXPERTS, RM_P_EXPERT_DOWN},
    {"block_sparse_moe.router.weight", ONE, RM_P_ROUTER},
    // GraniteMoE's checkpoints
    {"block_sparse_moe.input_linear.weight", EXPERTS_GATE_UP, RM_P_EXPERT_GATE},
    {"block_sparse_moe.output_linear.weight", EXPERTS, RM_P_EXPERT_DOWN},
    // fused projections, as inference engines hold them
    {"self_attn.qkv_proj.weight", QKV, RM_P_Q},
    {"self_attn.qkv_proj.bias", QKV, RM_P_Q_BIAS},
    {"linear_attn.in_proj_qkvz.weight", QKVZ, RM_P_DELTA_Q},
    {"linear_attn.in_proj_ba.weight", BA, RM_P_DELTA_B},
    {"linear_attn.in_proj_qkv.weight", QKV, RM_P_DELTA_Q},
    {"linear_attn.conv1d.weight", CONV_QKV, RM_P_CONV_Q},
    {"mlp.gate_up_proj.weight", GATE_UP, RM_P_GATE},
    {"mlp.experts.#.gate_up_proj.weight", GATE_UP, RM_P_EXPERT_GATE},
    {"self_attn.kv_b_proj.weight", KV_B, RM_P_K_B},
    // torchtitan; its fused wqkv is saved as wq, wk, wv
    {"tok_embeddings.weight", ONE, RM_P_EMBED},
    {"output.weight", ONE, RM_P_LM_HEAD},
    {"attention_norm.weight", ONE, RM_P_INPUT_NORM},
    {"ffn_norm.weight", ONE, RM_P_PRE_MLP_NORM},
    {"attention.wq.weight", TURNED, RM_P_Q},
    {"attention.wk.weight", TURNED, RM_P_K},
    {"attention.wv.weight", ONE, RM_P_V},
    {"attention.qkv_linear.wq.weight", TURNED, RM_P_Q},
    {"attention.qkv_linear.wk.weight", TURNED, RM_P_K},
    {"attention.qkv_linear.wv.weight", ONE, RM_P_V},
    {"attention.wo.weight", ONE, RM_P_O},
    {"attention.q_norm.weight", ONE, RM_P_Q_NORM},
    {"attention.k_norm.weight", ONE, RM_P_K_NORM},
    {"feed_forward.w1.weight", ONE, RM_P_GATE},
    {"feed_forward.w2.weight", ONE, RM_P_DOWN},
    {"feed_forward.w3.weight", ONE, RM_P_UP},
    {"moe.router.gate.weight", ONE, RM_P_ROUTER},
    {"moe.shared_experts.w1.weight", ONE, RM_P_SHARED_GATE},
    {"moe.shared_experts.w2.weight", ONE, RM_P_SHARED_DOWN},
    {"moe.shared_experts.w3.weight", ONE, RM_P_SHARED_UP},
    {"moe.shared_experts.gate.weight", ONE, RM_P_SHARED_SWITCH},
    {"moe.experts.w1", EXPERTS, RM_P_EXPERT_GATE},
    {"moe.experts.w2", EXPERTS, RM_P_EXPERT_DOWN},
    {"moe.experts.w3", EXPERTS, RM_P_EXPERT_UP},
    {"moe.experts.w1_EFD", EXPERTS, RM_P_EXPERT_GATE},
    {"moe.experts.w2_EDF", EXPERTS, RM_P_EXPERT_DOWN},
    {"moe.experts.w3_EFD", EXPERTS, RM_P_EXPERT_UP},
    {"moe.routed_experts.inner_experts.w1_EFD", EXPERTS, RM_P_EXPERT_GATE},
    {"moe.routed_experts.inner_experts.w2_EDF", EXPERTS, RM_P_EXPERT_DOWN},
    {"moe.routed_experts.inner_experts.w3_EFD", EXPERTS, RM_P_EXPERT_UP},
    {"attn.wq.weight", TURNED, RM_P_Q},
    {"attn.wk.weight", TURNED, RM_P_K},
    {"attn.wv.weight", ONE, RM_P_V},
    {"attn.wo.weight", ONE, RM_P_O},
    {"attn.q_norm.weight", ONE, RM_P_Q_NORM},
    {"attn.k_norm.weight", ONE, RM_P_K_NORM},
    {"attn.in_proj_q.weight", ONE, RM_P_DELTA_Q},
    {"attn.in_proj_k.weight", ONE, RM_P_DELTA_K},
    {"attn.in_proj_v.weight", ONE, RM_P_DELTA_V},
    {"attn.in_proj_z.weight", ONE, RM_P_DELTA_Z},
    {"attn.in_proj_b.weight", ONE, RM_P_DELTA_B},
    {"attn.in_proj_a.weight", ONE, RM_P_DELTA_A},
    {"attn.out_proj.weight", ONE, RM_P_DELTA_OUT},
    {"attn.conv_q.weight", CONV, RM_P_CONV_Q},
    {"attn.conv_k.weight", CONV, RM_P_CONV_K},
    {"attn.conv_v.weight", CONV, RM_P_CONV_V},
    {"attn.A_log", ONE, RM_P_A_LOG},
    {"attn.dt_bias", ONE, RM_P_DT_BIAS},
    {"attn.norm.weight", ONE, RM_P_DELTA_NORM},
    // the router's bias, which the choice of experts adds
    {"mlp.gate.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"mlp.router.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"mlp.e_score_correction_bias", ONE, RM_P_ROUTER_BIAS},
    {"mlp.gate.moe_statics.e_score_correction_bias", ONE, RM_P_ROUTER_BIAS},
    {"mlp.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"moe.expert_bias", ONE, RM_P_ROUTER_BIAS},
    {"moe.expert_bias_E", ONE, RM_P_ROUTER_BIAS},
    // buffers of rope in older checkpoints
    {"rotary_emb.inv_freq", NOTHING, RM_P_EMBED},
    {"self_attn.rotary_emb.inv_freq", NOTHING, RM_P_Q},
    {"self_attn.rotary_emb.cos_cached", NOTHING, RM_P_Q},
    {"self_attn.rotary_emb.sin_cached", NOTHING, RM_P_Q},
};

// language_model holds the text model of a multimodal one.
static const char *const wrappers[] = {"_orig_mod.", "module.", "_fsdp_wrapped_module.",
                                       "_checkpoint_wrapped_module.", "language_model."};

// ----------------------------------------------------------------------------------------- bounds
static rm_code check_name(const char *name, size_t length, rm_error *err) {
  RM_FAIL_IF(length > RM_NAME_MAX, RM_E_LIMIT,
             "expected a tensor name of at most %d bytes, got %zu", RM_NAME_MAX, length);
  RM_FAIL_IF(memchr(name, 0, length), RM_E_LIMIT,
             "expected a tensor name without NUL, got one of %zu bytes", length);
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

// A name without its prefixes.
typedef struct bare {
  const char *rest; // below the layer
  int32_t layer; // -1: not of a layer
} bare;

static bare split_layer(const char *name) {
  const char *at = name + 7;
  bare out = {name, -1};
  if (strncmp(name, "layers.", 7)) return out;
  const int32_t layer = read_number(&at);
  return layer >= 0 && *at == '.' ? (bare){at + 1, layer} : out;
}

// Returns whether the name has this pattern, NULL: none. *expert: its number, -1 if there is none.
static int matches(const char *pattern, rm_param_kind kind, bare name, int32_t *expert) {
  const char *at = name.rest;
  *expert = -1;
  if (!pattern || (name.layer >= 0) != (kind > RM_P_FINAL_NORM)) return 0;
  if (strncmp(pattern, "model.", 6) == 0) pattern += 6;
  for (; *pattern; pattern++) {
    if (*pattern == '#') {
      if ((*expert = read_number(&at)) < 0) return 0;
    } else if (*pattern != *at++) {
      return 0;
    }
  }
  return *at == 0;
}

// ---------------------------------------------------------------------------------------- targets
// For tensors of all experts that are transposed and in which rows of gate and up alternate.
static void interleave(const rm_params *params, const spelling *s, rm_target *out, int64_t rows) {
  for (int64_t i = 0; i < out->n_pieces; i++) {
    rm_param_rows *piece = &out->pieces[i];
    if (s->form == EXPERTS_GATE_UP) piece->head_dim = piece->turned = rows;
    piece->transposed = params->list[piece->param].n_dims == 2;
  }
  if (!out->pieces[0].transposed) return;
  out->shape[1] = params->list[out->pieces[0].param].cols;
  out->shape[2] = rows;
}

enum { MOST_KINDS = 4 };
typedef struct members { // the kinds whose rows a tensor has, one kind after another
  rm_param_kind kinds[MOST_KINDS];
  int n, alternating; // heads of the first `alternating` kinds alternate
  int64_t heads;
} members;

static members members_of(const rm_spec *spec, const spelling *s) {
  static const int counts[] = {[ONE] = 1,      [TURNED] = 1,  [QKV] = 3,     [CONV] = 1,
                               [CONV_QKV] = 3, [QKVZ] = 4,    [BA] = 2,      [KV_B] = 2,
                               [GATE_UP] = 2,  [EXPERTS] = 1, [NOTHING] = 0, [EXPERTS_GATE_UP] = 2};
  members out = {.n = counts[s->form],
                 .heads = s->form == KV_B ? spec->n_heads : spec->delta_k_heads};
  for (int i = 0; i < out.n; i++) out.kinds[i] = s->kind + i;
  if (s->form == QKVZ || s->form == BA || s->form == KV_B) out.alternating = out.n;
  if (!spec->gate_in_q || s->kind != RM_P_Q || s->pattern == spec->names[RM_P_Q]) return out;
  for (int i = out.n++; i > 1; i--) out.kinds[i] = out.kinds[i - 1];
  out.kinds[1] = RM_P_ATTN_GATE;
  out.alternating = 2;
  out.heads = spec->n_heads;
  return out;
}

// Sets where the heads of the first pieces are. Returns the rows of these pieces.
static int64_t alternate(const rm_params *params, const members *m, rm_target *out) {
  int64_t stride = 0;
  for (int i = 0; i < m->alternating; i++) {
    rm_param_rows *piece = &out->pieces[i];
    const rm_param *param = &params->list[piece->param];
    piece->head_dim = rm_param_extent(param) / m->heads;
    piece->transposed = param->kind == RM_P_K_B;
    piece->row0 = stride;
    stride += piece->transposed ? param->cols : piece->head_dim;
  }
  for (int i = 0; i < m->alternating; i++) out->pieces[i].stride = stride;
  return m->heads * stride;
}

// Fills the target of a spelling: its kinds, concatenated along the rows.
static rm_code fill(const rm_params *params, const spelling *s, int32_t layer, int32_t expert,
                    rm_target *out, rm_error *err) {
  const members m = members_of(params->spec, s);
  const int n = m.n, stacked = s->form == EXPERTS || s->form == EXPERTS_GATE_UP,
            conv = s->form == CONV || s->form == CONV_QKV;
  const int64_t copies = stacked ? params->spec->n_experts : 1;
  int64_t rows = 0;
  if (s->form == NOTHING) return RM_OK;
  if (!copies || (s->form == TURNED && params->spec->wq_rows == RM_WQ_NONE) ||
      ((s->form == QKVZ || s->form == BA) && !params->spec->delta_alternates))
    return RM_E_UNEXPECTED_KEY;
  out->pieces = stacked ? rm_alloc((size_t)(n * copies), sizeof *out->pieces) : out->few;
  if (!out->pieces) return rm_no_memory(err, "the pieces of a tensor", 0);
  for (int32_t e = 0; e < copies; e++) {
    rows = 0;
    for (int i = 0; i < n; i++) {
      const int64_t index = rm_params_find(params, m.kinds[i], layer, stacked ? e : expert);
      if (index < 0) return RM_E_UNEXPECTED_KEY;
      out->pieces[out->n_pieces++] = (rm_param_rows){.param = index,
                                                     .outer = stacked ? e
                                                              : conv  ? -1
                                                                      : 0,
                                                     .row0 = rows};
      rows += rm_param_extent(&params->list[index]);
    }
  }
  if (m.alternating) {
    const int64_t alternating = alternate(params, &m, out);
    if (m.alternating == n) rows = alternating;
  }
  const rm_param *last = &params->list[out->pieces[out->n_pieces - 1].param];
  int64_t *shape = out->shape;
  if (stacked) *shape++ = copies;
  *shape++ = rows;
  if (conv) *shape++ = 1;
  *shape = last->cols; // not used if the tensor is a vector
  if (stacked && params->spec->experts_interleaved) interleave(params, s, out, rows);
  out->n_dims = last->n_dims + (stacked || conv);
  return RM_OK;
}

// Sets head_dim and turned of pieces whose tensor has the rows of adjacent elements rotated by
// rope: the family's checkpoints have that order, or tensors of this name do.
static void set_pairs(const rm_params *params, const spelling *s, rm_target *out) {
  const rm_spec *spec = params->spec;
  const int64_t turned = s->form == TURNED ? spec->head_dim : spec->rotary_dim;
  if (s->form == TURNED ? spec->wq_rows != RM_WQ_NEIGHBOURS : !spec->rope_neighbours) return;
  for (int64_t i = 0; i < out->n_pieces; i++) {
    const rm_param_kind kind = params->list[out->pieces[i].param].kind;
    if (kind == RM_P_Q_B || kind == RM_P_KV_A) {
      out->pieces[i].head_dim = kind == RM_P_Q_B ? rm_q_dim(spec) : spec->head_dim;
      out->pieces[i].turned = spec->rotary_dim;
      out->pieces[i].unturned = out->pieces[i].head_dim - spec->rotary_dim;
    }
    if (kind != RM_P_Q && kind != RM_P_K && kind != RM_P_Q_BIAS && kind != RM_P_K_BIAS) continue;
    out->pieces[i].head_dim = spec->head_dim;
    out->pieces[i].turned = turned;
  }
}

// Fails for a known spelling that this model does not have: the message names the layer, expert or
// option.
static rm_code fail_absent(const rm_params *params, const char *name, const spelling *s,
                           int32_t layer, int32_t expert, rm_error *err) {
  const rm_spec *spec = params->spec;
  RM_FAIL_IF(s->form == TURNED && spec->wq_rows == RM_WQ_NONE, RM_E_UNEXPECTED_KEY,
             "%s: the order of its rows is known of Llama, Mistral, Qwen3 and Qwen3.5; expected "
             "self_attn.%c_proj",
             name, s->kind == RM_P_Q ? 'q' : 'k');
  RM_FAIL_IF(layer >= spec->n_layers, RM_E_UNEXPECTED_KEY, "%s: layer %d; the model has %ld", name,
             layer, spec->n_layers);
  RM_FAIL_IF(expert >= 0 && spec->layers[layer].is_moe && expert >= spec->n_experts,
             RM_E_UNEXPECTED_KEY, "%s: expert %d; the model has %ld", name, expert,
             spec->n_experts);
  const int is_moe = layer >= 0 && spec->layers[layer].is_moe;
  const char *why = "is not a parameter of this model";
  if (layer >= 0 && s->kind >= RM_P_Q && s->kind < RM_P_GATE &&
      spec->n_attention_layers < spec->n_layers &&
      (s->kind >= RM_P_DELTA_Q) != (spec->layers[layer].kind == RM_LAYER_DELTA_NET))
    why = spec->layers[layer].kind == RM_LAYER_DELTA_NET ? ": the layer has a delta net"
                                                         : ": the layer has attention";
  else if (s->kind >= RM_P_Q_BIAS && s->kind <= RM_P_O_BIAS)
    // With attention_bias some families still have no bias of o.
    why = spec->attention_bias ? ": the model has no bias there"
                               : ": the model has no bias there (attention_bias=False)";
  else if (s->kind == RM_P_Q_NORM || s->kind == RM_P_K_NORM)
    why = ": the model does not norm q and k";
  else if (s->kind == RM_P_SINKS) why = ": the model's attention has no sinks";
  else if (is_moe && (s->kind == RM_P_ROUTER_LOGIT_BIAS || s->kind >= RM_P_EXPERT_GATE_BIAS))
    why = ": the model has no bias there";
  else if (s->kind >= RM_P_INPUT_NORM && s->kind <= RM_P_POST_MLP_NORM)
    why = spec->norm_after ? ": the model norms a block's output"
                           : ": the model norms a block's input";
  else if (s->kind == RM_P_GATE && spec->ungated && !is_moe)
    why = ": the model's MLPs have no gate";
  else if (s->kind >= RM_P_SHARED_GATE && s->kind <= RM_P_SHARED_SWITCH && is_moe)
    why = spec->shared_intermediate_size ? ": the model has no gate of its shared expert"
                                         : ": the model has no shared expert";
  else if (s->kind >= RM_P_GATE && layer >= 0)
    return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s: layer %d %s", name, layer,
                   is_moe ? "is a mixture of experts" : "has no experts");
  return rm_fail(err, RM_E_UNEXPECTED_KEY, *why == ':' ? "%s%s" : "%s %s", name, why);
}

// Finds the spelling of a name and the number of its expert. Returns 0 if there is none. The
// family's names come first: a family may give another's name to another kind.
static int find_spelling(const rm_params *params, bare name, spelling *out, int32_t *expert) {
  for (int own = 1; own >= 0; own--)
    for (int kind = 0; kind < RM_N_PARAM_KIND; kind++) {
      *out = (spelling){own ? params->spec->names[kind] : rm_kinds[kind].name, ONE, kind};
      if (matches(out->pattern, kind, name, expert)) return 1;
    }
  for (size_t i = 0; i < sizeof spellings / sizeof *spellings; i++) {
    *out = spellings[i];
    if (matches(out->pattern, out->kind, name, expert)) return 1;
  }
  return 0;
}

static rm_code fail_unknown(const char *name, rm_error *err) {
  static const char *const parts[] = {"visual.", "vision_encoder.",
                                      "mtp."}; // of checkpoints of text models too
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    const char *at = strstr(name, parts[i]);
    RM_FAIL_IF(at, RM_E_UNEXPECTED_KEY,
               "%s is not a parameter of this model; ignore=(\"%.*s*\",) leaves such tensors out",
               name, (int)(at - name + (ptrdiff_t)strlen(parts[i])), name);
  }
  return rm_fail(err, RM_E_UNEXPECTED_KEY, "%s is not a parameter of this model", name);
}

rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, int skip_unknown,
                         rm_target *out, rm_error *err) {
  RM_TRY(check_name(name, length, err));
  rm_code code;
  char buffer[RM_NAME_MAX + 1];
  const bare rest = split_layer(bare_name(buffer, name, length));
  spelling found;
  int32_t expert;
  if (!find_spelling(params, rest, &found, &expert)) code = fail_unknown(length ? name : "''", err);
  else if (!(code = fill(params, &found, rest.layer, expert, out, err)))
    set_pairs(params, &found, out);
  else if (code == RM_E_UNEXPECTED_KEY)
    code = fail_absent(params, name, &found, rest.layer, expert, err);
  if (code != RM_E_UNEXPECTED_KEY || !skip_unknown) return code;
  rm_error_clear(err);
  rm_target_clear(out);
  return RM_OK;
}

void rm_target_clear(rm_target *target) {
  if (target->pieces != target->few) rm_free(target->pieces);
  *target = (rm_target){0};
}
