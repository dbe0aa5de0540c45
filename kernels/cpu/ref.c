// ref.c: docs/numerics.md as plain loops: the specification and the oracle. Every other variant of
// the family must be bit-identical. It uses one thread and almost no workspace. Attention, mixture
// of experts, sampling and the sums of products are in ref_*.c.
#include "ref.h"

#include "tables.h"
#include "threads.h"

float rm_ref_sum_of_squares(rm_dtype dtype, const void *x, int64_t n) {
  float partial[RM_LANES] = {0};
  for (int64_t i = 0; i < n; i++) {
    const float v = rm_get(dtype, x, i);
    partial[i % RM_LANES] = fmaf(v, v, partial[i % RM_LANES]);
  }
  return rm_tree16(partial);
}

void rm_rms_norm_ref(const rm_ctx *, const rm_rms_norm_args *a) {
  const rm_dtype dtype = a->dtype;
  for (int64_t r = 0; r < a->rows; r++) {
    void *h = rm_at_mut(dtype, a->residual, r * a->n);
    const int is_scaled = a->x_gate || a->x_scale != 0.0f;
    const float factor =
        a->x_gate ? rm_round_to(dtype, rm_sigmoid(rm_get(dtype, a->x_gate, r))) : a->x_scale;
    for (int64_t i = 0; a->x && i < a->n; i++) {
      const float x = rm_get(dtype, a->x, r * a->n + i);
      rm_put(dtype, h, i, rm_get(dtype, h, i) + (is_scaled ? rm_round_to(dtype, factor * x) : x));
    }
    if (!a->weight) {
      if (a->out)
        memcpy(rm_at_mut(dtype, a->out, r * a->n), h, (size_t)a->n * rm_dtype_bytes(dtype));
      continue;
    }
    const float scale = rm_rms_scale(rm_ref_sum_of_squares(dtype, h, a->n), a->n, a->eps);
    for (int64_t i = 0; i < a->n; i++)
      rm_put(dtype, a->out, r * a->n + i,
             rm_weighted(dtype, a->zero_centered, rm_get(dtype, a->weight, i),
                         rm_get(dtype, h, i) * scale));
  }
}

// The dot product of x and row `row` of w, plus bias `at`.
static float column(const rm_gemm_args *a, const void *x, const void *w, int64_t row, int64_t at) {
  const float acc = rm_ref_dot(a->dtype, x, w, row, a->k);
  return a->bias ? acc + rm_get(a->dtype, a->bias, at) : acc;
}

static float swiglu_column(const rm_gemm_args *a, const void *x, const void *w, int64_t i,
                           int64_t j) {
  const float gate = rm_round_to(a->dtype, column(a, x, w, rm_gate_up_row(j, 0), j));
  const float up = rm_round_to(a->dtype, column(a, x, w, rm_gate_up_row(j, 1), a->n + j));
  if (a->gate_up) {
    rm_put(a->dtype, a->gate_up, 2 * i * a->n + j, gate);
    rm_put(a->dtype, a->gate_up, (2 * i + 1) * a->n + j, up);
  }
  return rm_gated(a->dtype, a, gate, up);
}

static void gemm_rows(const rm_gemm_args *a, int swiglu, const void *w, int64_t row0,
                      int64_t row1) {
  for (int64_t i = row0; i < row1; i++)
    for (int64_t j = 0; j < a->n; j++) {
      const void *x = rm_at(a->dtype, a->x, i * a->ldx);
      rm_put(a->y_dtype, a->y, i * a->ldy + j,
             swiglu ? swiglu_column(a, x, w, i, j) : column(a, x, w, j, j));
    }
}

static void each_group(const rm_gemm_args *a, int swiglu) {
  if (!a->group_rows) gemm_rows(a, swiglu, a->w, 0, a->m);
  for (int64_t g = 0; a->group_rows && g < a->n_groups; g++) {
    rm_gemm_args of = *a;
    of.bias = rm_bias_of(a->dtype, a, g, swiglu);
    gemm_rows(&of, swiglu, rm_at(a->dtype, a->w, g * a->group_stride), a->group_rows[g],
              a->group_rows[g + 1]);
  }
}

void rm_gemm_ref(const rm_ctx *, const rm_gemm_args *a) { each_group(a, 0); }
void rm_gemm_swiglu_ref(const rm_ctx *, const rm_gemm_args *a) { each_group(a, 1); }

void rm_activate_ref(const rm_ctx *, const rm_activate_args *a) {
  for (int64_t r = 0; r < a->rows; r++)
    for (int64_t i = r * a->ld; i < r * a->ld + a->n; i++)
      rm_put(a->dtype, a->out, i, rm_activate(a->activation, rm_get(a->dtype, a->x, i)));
}

void rm_sigmoid_gate_ref(const rm_ctx *, const rm_sigmoid_gate_args *a) {
  for (int64_t i = 0; i < a->rows * a->n; i++)
    rm_put(a->dtype, a->out, i,
           rm_round_to(a->dtype, rm_sigmoid(rm_get(a->dtype, a->gate, i))) *
               rm_get(a->dtype, a->x, i));
}

void rm_head_squares_ref(const rm_ctx *, const rm_head_squares_args *a) {
  for (int64_t r = 0; r < a->rows; r++)
    for (int64_t h = 0; h < a->n_heads + a->n_kv_heads; h++) {
      const void *x =
          rm_at(a->dtype, a->qkv, (r * (a->n_heads + 2 * a->n_kv_heads) + h) * a->head_dim);
      float *out = h < a->n_heads ? a->q_out + r * a->n_heads + h
                                  : a->k_out + r * a->n_kv_heads + h - a->n_heads;
      *out = rm_canon(rm_ref_sum_of_squares(a->dtype, x, a->head_dim));
    }
}

static void load_head(rm_dtype dtype, const void *x, int64_t n, float *head) {
  for (int64_t i = 0; i < n; i++) head[i] = rm_get(dtype, x, i);
}

static void store_head(rm_dtype dtype, const float *head, int64_t n, void *out) {
  for (int64_t i = 0; i < n; i++) rm_put(dtype, out, i, head[i]);
}

// Norms a head of n numbers in place, unless weights are NULL. Heads are numbered over q's, then
// k's.
static void norm_head(const rm_qk_rope_kv_args *a, int64_t row, int64_t index, int64_t n,
                      float *head) {
  const rm_dtype dtype = a->dtype;
  const int64_t is_k = index >= a->n_heads, own = is_k ? index - a->n_heads : index;
  const int64_t all = is_k ? a->all_kv_heads : a->all_heads, weight_at = a->q_squares ? own * n : 0;
  const void *weight = is_k ? a->k_weight : a->q_weight;
  const float *squares = is_k ? a->k_squares : a->q_squares;
  if (!weight) return;
  const float scale = squares ? rm_scale_of_heads(a, squares + row * all, all)
                              : rm_rms_scale(rm_ref_sum_of_squares(RM_F32, head, n), n, a->eps);
  for (int64_t i = 0; i < n; i++)
    head[i] =
        rm_round_to(dtype, rm_weighted(dtype, a->zero_centered,
                                       rm_get(dtype, weight, weight_at + i), head[i] * scale));
}

static void rotate_head(const rm_qk_rope_kv_args *a, int64_t row, float *head) {
  const rm_dtype dtype = a->dtype;
  const int64_t half = a->rotary_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float c = a->cos[a->positions[row] * half + i], s = a->sin[a->positions[row] * half + i];
    const float lo = head[i], hi = head[i + half];
    head[i] = rm_round_to(dtype, rm_round_to(dtype, lo * c) + rm_round_to(dtype, -hi * s));
    head[i + half] = rm_round_to(dtype, rm_round_to(dtype, hi * c) + rm_round_to(dtype, lo * s));
  }
}

// Computes one head: out ← rope(norm(x)), or norm(rope(x)). `head` is scratch of head_dim floats.
static void norm_and_rotate(const rm_qk_rope_kv_args *a, int64_t row, int64_t index, float *head,
                            void *out) {
  const int64_t of_row = row * (a->n_heads + 2 * a->n_kv_heads);
  load_head(a->dtype, rm_at(a->dtype, a->qkv, (of_row + index) * a->head_dim), a->head_dim, head);
  if (!a->norm_last) norm_head(a, row, index, a->head_dim, head);
  rotate_head(a, row, head);
  if (a->norm_last) norm_head(a, row, index, a->head_dim, head);
  store_head(a->dtype, head, a->head_dim, out);
}

static int all_finite(rm_dtype dtype, const void *x, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!rm_is_finite(rm_get(dtype, x, i))) return 0;
  return 1;
}

static void store_kv(const rm_qk_rope_kv_args *a, int64_t row, int64_t head, const void *k,
                     const void *v) {
  const rm_dtype dtype = a->dtype;
  const int64_t page = a->slots[row] / a->page_size, pos = a->slots[row] % a->page_size;
  const int64_t k_base = (page * a->n_kv_heads + head) * rm_k_page_elems(a->page_size, a->head_dim);
  const int64_t value_dim = rm_value_dim(a->value_dim, a->head_dim);
  const int64_t v_base = (page * a->n_kv_heads + head) * rm_v_page_elems(a->page_size, value_dim);
  const int k_ok = all_finite(dtype, k, a->head_dim), v_ok = all_finite(dtype, v, value_dim);
  static const uint32_t zero = 0;
  for (int64_t d = 0; d < a->head_dim; d++)
    rm_copy_elem(dtype, a->k_cache, k_base + rm_packed_index(dtype, a->head_dim, pos, d),
                 k_ok ? k : &zero, k_ok ? d : 0);
  for (int64_t d = 0; d < value_dim; d++)
    rm_copy_elem(dtype, a->v_cache, v_base + rm_v_index(dtype, value_dim, pos, d), v_ok ? v : &zero,
                 v_ok ? d : 0);
  if (!k_ok || !v_ok) a->row_flags[row] |= RM_ROW_KV_NONFINITE;
}

// A row of latent attention.
static void latent_row(const rm_qk_rope_kv_args *a, int64_t row, float *head, void *k) {
  const rm_dtype dtype = a->dtype;
  const int64_t q = a->n_heads * a->q_dim, base = row * (q + a->head_dim), n = a->value_dim,
                rotary = a->rotary_dim;
  for (int64_t h = 0; h <= a->n_heads; h++) { // the last is the key
    const int64_t from = base + (h < a->n_heads ? (h + 1) * a->q_dim - rotary : q + n);
    void *out = rm_at_mut(dtype, a->q_out, (row * a->n_heads + h) * a->head_dim);
    load_head(dtype, rm_at(dtype, a->qkv, from), rotary, head);
    rotate_head(a, row, head);
    store_head(dtype, head, rotary, h < a->n_heads ? out : k);
  }
  void *latent = rm_at_mut(dtype, k, rotary);
  load_head(dtype, rm_at(dtype, a->qkv, base + q), n, head);
  norm_head(a, row, a->n_heads, n, head);
  store_head(dtype, head, n, latent);
  if (a->slots[row] >= 0) store_kv(a, row, 0, k, latent);
}

void rm_qk_rope_kv_ref(const rm_ctx *ctx, const rm_qk_rope_kv_args *a) {
  float *head = ctx->workspace, *rotated = head + a->head_dim;
  const int64_t per_row = (a->n_heads + 2 * a->n_kv_heads) * a->head_dim;
  for (int64_t r = 0; r < a->rows; r++) {
    if (a->value_dim) {
      latent_row(a, r, head, rotated);
      continue;
    }
    for (int64_t h = 0; h < a->n_heads; h++)
      norm_and_rotate(a, r, h, head,
                      rm_at_mut(a->dtype, a->q_out, (r * a->n_heads + h) * a->head_dim));
    for (int64_t h = 0; h < a->n_kv_heads && a->slots[r] >= 0; h++) {
      norm_and_rotate(a, r, a->n_heads + h, head, rotated);
      store_kv(
          a, r, h, rotated,
          rm_at(a->dtype, a->qkv, r * per_row + (a->n_heads + a->n_kv_heads + h) * a->head_dim));
    }
  }
}

// pair ← (max, sum) of the logits of one vocabulary block.
static void block_stats(const float *logits, int64_t n, float *pair) {
  float partial[RM_LANES] = {0}, max = -INFINITY;
  int finite = 1;
  for (int64_t i = 0; i < n; i++) {
    max = rm_max_f32(logits[i], max);
    finite &= rm_is_finite(logits[i]);
  }
  for (int64_t i = 0; i < n; i++)
    partial[i % RM_LANES] = partial[i % RM_LANES] + rm_exp(logits[i] - max);
  pair[0] = max;
  pair[1] = finite ? rm_tree16(partial) : NAN;
}

// all ← all merged with the next block.
static void merge_pair(rm_merged *all, const float *pair) {
  *all = rm_merge(all->max, all->sum, pair[0], pair[1]);
}

static void merge_row(const rm_merge_pairs_args *a, int64_t r) {
  rm_merged all = {.max = a->pairs[2 * r], .sum = a->pairs[2 * r + 1]};
  for (int64_t b = 1; b < a->n_blocks; b++) merge_pair(&all, a->pairs + 2 * (b * a->rows + r));
  rm_put_stats(a, r, all.max, all.sum);
}
// All CPU variants share it.
RM_ROW_OP(rm_merge_pairs_ref, merge_pairs, a->rows * a->n_blocks * 40, merge_row(a, r))

void rm_lm_head_ref(const rm_ctx *, const rm_lm_head_args *a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const int32_t target = a->targets ? a->targets[r] : -1;
    rm_merged all = {.max = -INFINITY};
    float target_logit = 0.0f;
    for (int64_t v0 = 0; v0 < a->vocab; v0 += RM_VOCAB_BLOCK) {
      const int64_t n = rm_min64(RM_VOCAB_BLOCK, a->vocab - v0);
      float logits[RM_VOCAB_BLOCK], pair[2];
      for (int64_t i = 0; i < n; i++)
        logits[i] = rm_logit(
            a, rm_ref_dot(a->dtype, rm_at(a->dtype, a->x, r * a->ldx), a->w, v0 + i, a->hidden));
      if (a->logits) memcpy(a->logits + r * a->ld_logits + v0, logits, (size_t)n * sizeof *logits);
      if (target >= v0 && target < v0 + n) target_logit = logits[target - v0];
      block_stats(logits, n, pair);
      if (a->pairs) memcpy(a->pairs + 2 * (v0 / RM_VOCAB_BLOCK * a->rows + r), pair, sizeof pair);
      if (v0 == 0) all = (rm_merged){.max = pair[0], .sum = pair[1]};
      else merge_pair(&all, pair);
    }
    if (a->target_logits) a->target_logits[r] = target_logit;
    if (a->pairs) {
      if (rm_is_nan(all.sum)) a->row_flags[r] |= RM_ROW_LOGITS_NONFINITE;
      continue;
    }
    const rm_merge_pairs_args row = {.stats = a->stats + 2 * r,
                                     .target_logprobs =
                                         a->target_logprobs ? a->target_logprobs + r : NULL,
                                     .targets = &target,
                                     .target_logits = &target_logit,
                                     .row_flags = a->row_flags + r};
    rm_put_stats(&row, 0, all.max, all.sum);
  }
}

static size_t workspace_bytes(const rm_limits *l) {
  const int64_t head = rm_round_up(l->head_dim, RM_K_BLOCK);
  const int64_t delta = rm_packed_elems(l->v_dim, l->k_dim) + 2 * (l->k_dim + l->v_dim);
  return (size_t)(rm_max64(rm_max64(2 * head, l->n_experts), delta) + 64) * sizeof(float);
}

#define ENTRY(name, args) .name = rm_##name##_ref,
const rm_kernels rm_table_ref = {
    .isa = "ref",
    .family = "x86",
    .workspace_bytes = workspace_bytes,
    RM_OPS(ENTRY).pack = rm_pack_ref,
};
