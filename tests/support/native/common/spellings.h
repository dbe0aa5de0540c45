// spellings.h: every name that a tiny model accepts and the tensor that the name requires, written
// out from the model's sizes and not by matching patterns: the oracle of the drivers that send
// names. A fused or packed tensor holds parameters one after another along its rows, also over its
// outer dim, so a list of them describes it.
//
//   book *b = book_create(model);
//   const spelling *s = book_find(b, name, length, &code);   // NULL: refused with that code
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/tiny.h"

enum {
  BOOK_SLOTS = 64,
  BOOK_NAMES = 512,
  BOOK_INDEX = 2048,
  BOOK_PIECES = 16,
  BOOK_NAME_MAX = 1024
};

typedef struct slot { // a parameter
  char name[64]; // as checkpoints spell it
  int n_dims, optional, n_names;
  int64_t rows, cols; // a vector has rows = 1
  rm_src_dtype dtype;
} slot;

typedef struct spelling {
  char name[96]; // without wrappers and leading "model."
  int n_dims, n_slots, slots[BOOK_PIECES];
  int64_t shape[3];
  uint64_t mask; // of the slots
} spelling;

typedef struct book {
  const rm_spec *spec;
  rm_src_dtype dtype;
  int n_slots, n_names, embed, lm_head;
  slot slots[BOOK_SLOTS];
  spelling names[BOOK_NAMES];
  int16_t index[BOOK_INDEX]; // by hash; −1: free
} book;

// ------------------------------------------------------------------------------------- writing it
static inline uint64_t book_hash(const char *name, size_t length) {
  return tiny_mix(tiny_hash_bytes(0xCBF29CE484222325u, name, length)) % BOOK_INDEX;
}

__attribute__((format(printf, 5, 6))) static inline int book_slot(book *b, int n_dims, int64_t rows,
                                                                  int64_t cols, const char *format,
                                                                  ...) {
  if (b->n_slots == BOOK_SLOTS) tiny_die("more than %d parameters", BOOK_SLOTS);
  slot *s = &b->slots[b->n_slots];
  *s = (slot){.n_dims = n_dims, .rows = rows, .cols = cols, .dtype = b->dtype};
  va_list args;
  va_start(args, format);
  vsnprintf(s->name, sizeof s->name, format, args);
  va_end(args);
  return b->n_slots++;
}

// A name for n parameters: `first`, and every `step`-th after it; `outer` of them for each index of
// a first dim, 0: none.
__attribute__((format(printf, 6, 7))) static inline void book_say(book *b, int first, int step,
                                                                  int n, int64_t outer,
                                                                  const char *format, ...) {
  if (b->n_names == BOOK_NAMES || n > BOOK_PIECES)
    tiny_die("more than %d names or %d pieces", BOOK_NAMES, BOOK_PIECES);
  spelling *s = &b->names[b->n_names];
  va_list args;
  va_start(args, format);
  vsnprintf(s->name, sizeof s->name, format, args);
  va_end(args);
  int64_t rows = 0;
  for (int i = 0; i < n; i++) {
    const int at =
        outer ? first + i / (n / (int)outer) * 3 + i % (n / (int)outer) * step : first + i * step;
    s->slots[s->n_slots++] = at;
    s->mask |= UINT64_C(1) << at;
    rows += b->slots[at].n_dims == 1 ? b->slots[at].cols : b->slots[at].rows;
  }
  const slot *one = &b->slots[first];
  s->n_dims = outer ? 3 : one->n_dims;
  const int64_t shape[3] = {outer ? outer : rows,
                            outer              ? rows / outer
                            : one->n_dims == 2 ? one->cols
                                               : 0,
                            outer ? one->cols : 0};
  memcpy(s->shape, shape, sizeof shape);
  uint64_t at = book_hash(s->name, strlen(s->name));
  while (b->index[at] >= 0) at = (at + 1) % BOOK_INDEX;
  b->index[at] = (int16_t)b->n_names++;
}

static inline void book_attention(book *b, int l) {
  const rm_spec *m = b->spec;
  const int64_t q = m->n_heads * m->head_dim, kv = m->n_kv_heads * m->head_dim,
                hidden = m->hidden_size;
  static const char *const titan[3] = {"wq", "wk", "wv"};
  const int first = b->n_slots;
  for (int i = 0; i < 3; i++) {
    const int s = book_slot(b, 2, i ? kv : q, hidden, "model.layers.%d.self_attn.%c_proj.weight", l,
                            "qkv"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.self_attn.%c_proj.weight", l, "qkv"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.attention.%s.weight", l, titan[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.attention.qkv_linear.%s.weight", l, titan[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.attn.%s.weight", l, titan[i]);
  }
  book_say(b, first, 1, 3, 0, "layers.%d.self_attn.qkv_proj.weight", l);
  const int o = book_slot(b, 2, hidden, q, "model.layers.%d.self_attn.o_proj.weight", l);
  book_say(b, o, 1, 1, 0, "layers.%d.self_attn.o_proj.weight", l);
  book_say(b, o, 1, 1, 0, "layers.%d.attention.wo.weight", l);
  book_say(b, o, 1, 1, 0, "layers.%d.attn.wo.weight", l);
  const int bias = b->n_slots;
  for (int i = m->attention_bias ? 0 : 3; i < (m->o_bias ? 4 : 3); i++) {
    const int s = book_slot(b, 1, 1,
                            i == 0   ? q
                            : i == 3 ? hidden
                                     : kv,
                            "model.layers.%d.self_attn.%c_proj.bias", l, "qkvo"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.self_attn.%c_proj.bias", l, "qkvo"[i]);
  }
  if (m->attention_bias) book_say(b, bias, 1, 3, 0, "layers.%d.self_attn.qkv_proj.bias", l);
  for (int i = 0; i < 2 && m->qk_norm; i++) {
    const int s =
        book_slot(b, 1, 1, m->head_dim, "model.layers.%d.self_attn.%c_norm.weight", l, "qk"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.self_attn.%c_norm.weight", l, "qk"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.attention.%c_norm.weight", l, "qk"[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.attn.%c_norm.weight", l, "qk"[i]);
  }
}

static inline void book_dense(book *b, int l) {
  const int64_t width = b->spec->intermediate_size, hidden = b->spec->hidden_size;
  static const char *const hf[3] = {"gate", "up", "down"}, *const titan[3] = {"w1", "w3", "w2"};
  const int first = b->n_slots;
  for (int i = 0; i < 3; i++) {
    const int s = book_slot(b, 2, i < 2 ? width : hidden, i < 2 ? hidden : width,
                            "model.layers.%d.mlp.%s_proj.weight", l, hf[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.mlp.%s_proj.weight", l, hf[i]);
    book_say(b, s, 1, 1, 0, "layers.%d.feed_forward.%s.weight", l, titan[i]);
  }
  book_say(b, first, 1, 2, 0, "layers.%d.mlp.gate_up_proj.weight", l);
}

static inline void book_experts(book *b, int l) {
  const int64_t width = b->spec->moe_intermediate_size, hidden = b->spec->hidden_size;
  const int n = (int)b->spec->n_experts;
  const int router = book_slot(b, 2, n, hidden, "model.layers.%d.mlp.gate.weight", l);
  book_say(b, router, 1, 1, 0, "layers.%d.mlp.gate.weight", l);
  book_say(b, router, 1, 1, 0, "layers.%d.moe.router.gate.weight", l);

  static const char *const bias_names[] = {"mlp.gate.e_score_correction_bias",
                                           "mlp.gate.expert_bias",
                                           "mlp.router.expert_bias",
                                           "mlp.e_score_correction_bias",
                                           "mlp.expert_bias",
                                           "moe.expert_bias",
                                           "moe.expert_bias_E"};
  const int bias = book_slot(b, 1, 1, n, "model.layers.%d.mlp.gate.e_score_correction_bias", l);
  b->slots[bias].optional = 1;
  b->slots[bias].dtype = RM_SRC_F32;
  for (size_t i = 0; i < sizeof bias_names / sizeof *bias_names; i++)
    book_say(b, bias, 1, 1, 0, "layers.%d.%s", l, bias_names[i]);

  static const char *const hf[3] = {"gate", "up", "down"};
  static const char *const titan[3][2] = {{"w1", "w1_EFD"}, {"w3", "w3_EFD"}, {"w2", "w2_EDF"}};
  const int first = b->n_slots;
  for (int e = 0; e < n; e++)
    for (int i = 0; i < 3; i++) {
      const int s = book_slot(b, 2, i < 2 ? width : hidden, i < 2 ? hidden : width,
                              "model.layers.%d.mlp.experts.%d.%s_proj.weight", l, e, hf[i]);
      book_say(b, s, 1, 1, 0, "layers.%d.mlp.experts.%d.%s_proj.weight", l, e, hf[i]);
      if (i == 1) book_say(b, s - 1, 1, 2, 0, "layers.%d.mlp.experts.%d.gate_up_proj.weight", l, e);
    }
  book_say(b, first, 1, 2 * n, n, "layers.%d.mlp.experts.gate_up_proj", l);
  book_say(b, first + 2, 1, n, n, "layers.%d.mlp.experts.down_proj", l);
  for (int i = 0; i < 3; i++) {
    for (int how = 0; how < 2; how++)
      book_say(b, first + i, 1, n, n, "layers.%d.moe.experts.%s", l, titan[i][how]);
    book_say(b, first + i, 1, n, n, "layers.%d.moe.routed_experts.inner_experts.%s", l,
             titan[i][1]);
  }
}

static inline book *book_create(const tiny_model *model) {
  book *b = calloc(1, sizeof *b);
  if (!b) tiny_die("no memory for a book of names");
  const rm_spec *m = b->spec = model->spec;
  b->dtype = model->dtype == RM_BF16 ? RM_SRC_BF16 : RM_SRC_F32;
  memset(b->index, -1, sizeof b->index);
  b->embed = book_slot(b, 2, m->vocab_size, m->hidden_size, "model.embed_tokens.weight");
  book_say(b, b->embed, 1, 1, 0, "embed_tokens.weight");
  book_say(b, b->embed, 1, 1, 0, "tok_embeddings.weight");
  b->lm_head = book_slot(b, 2, m->vocab_size, m->hidden_size, "lm_head.weight");
  b->slots[b->lm_head].optional = m->tie_word_embeddings;
  book_say(b, b->lm_head, 1, 1, 0, "lm_head.weight");
  book_say(b, b->lm_head, 1, 1, 0, "output.weight");
  const int norm = book_slot(b, 1, 1, m->hidden_size, "model.norm.weight");
  book_say(b, norm, 1, 1, 0, "norm.weight");
  for (int l = 0; l < m->n_layers; l++) {
    static const char *const norms[2][2] = {{"input_layernorm", "attention_norm"},
                                            {"post_attention_layernorm", "ffn_norm"}};
    for (int i = 0; i < 2; i++) {
      const int s = book_slot(b, 1, 1, m->hidden_size, "model.layers.%d.%s.weight", l, norms[i][0]);
      for (int how = 0; how < 2; how++)
        book_say(b, s, 1, 1, 0, "layers.%d.%s.weight", l, norms[i][how]);
    }
    book_attention(b, l);
    if (m->layers[l].is_moe) book_experts(b, l);
    else book_dense(b, l);
  }
  return b;
}

// ------------------------------------------------------------------------------------- reading it
// Whether a wrapper puts a module of this name around another.
static inline int book_is_wrapper(const char *word, size_t n) {
  static const char *const words[] = {"_orig_mod", "module", "_fsdp_wrapped_module",
                                      "_checkpoint_wrapped_module"};
  for (int i = 0; i < 4; i++)
    if (n == strlen(words[i]) && memcmp(word, words[i], n) == 0) return 1;
  return 0;
}

// Without the wrappers, then without leading "model"s. The last word is the tensor and stays
// whatever it is.
static inline size_t book_undress(char *out, const char *name, size_t length) {
  size_t used = 0;
  for (const char *dot; (dot = memchr(name, '.', length));) {
    const size_t n = (size_t)(dot - name);
    if (!book_is_wrapper(name, n) && !(used == 0 && n == 5 && memcmp(name, "model", 5) == 0)) {
      memcpy(out + used, name, n + 1);
      used += n + 1;
    }
    name += n + 1, length -= n + 1;
  }
  memcpy(out + used, name, length);
  return used + length;
}

static inline const spelling *book_find(const book *b, const char *name, size_t length,
                                        rm_code *code) {
  *code = RM_E_LIMIT;
  if (length > BOOK_NAME_MAX || memchr(name, 0, length)) return NULL;
  *code = RM_E_UNEXPECTED_KEY;
  char bare[BOOK_NAME_MAX];
  const size_t n = book_undress(bare, name, length);
  for (uint64_t at = book_hash(bare, n); b->index[at] >= 0; at = (at + 1) % BOOK_INDEX) {
    const spelling *s = &b->names[b->index[at]];
    if (strlen(s->name) != n || memcmp(s->name, bare, n) != 0) continue;
    *code = RM_OK;
    return s;
  }
  return NULL;
}
