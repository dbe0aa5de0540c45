// rope.c: head_squares, and qk_rope_kv: the norm of each head of q and k, the rotation, and the
// write of k and v into their page. One thread computes a row. k is written in the layout of packed
// weights (a word per pair, 64 bytes apart), so that attention can use a page as a matrix.
#include "variant.h"

typedef struct rope_job {
  const rm_qk_rope_kv_args *a;
  float *workspace; // [threads][2][head_dim↑16 + 16]
  int64_t stride; // floats of one head in the workspace
} rope_job;

VEC void squares_of_row(rm_dtype T, const rm_head_squares_args *a, int64_t row) {
  const int64_t base = row * (a->n_heads + 2 * a->n_kv_heads);
  for (int64_t h = 0; h < a->n_heads + a->n_kv_heads; h++) {
    float *out = h < a->n_heads ? a->q_out + row * a->n_heads + h
                                : a->k_out + row * a->n_kv_heads + h - a->n_heads;
    const void *head = rm_at(T, a->qkv, (base + h) * a->head_dim);
    *out = rm_canon(vt_sum_of_squares(T, head, a->head_dim));
  }
}

ROW_OP(head_squares, a->rows *(a->n_heads + a->n_kv_heads) * a->head_dim,
       SPECIALIZE(a->dtype, squares_of_row(T, a, r)))

// The norm of a row's heads of q or of k.
typedef struct row_norm {
  const void *weight; // NULL: no norm
  int64_t step; // from one head's weights to the next; 0: heads share weights but not `scale`
  float scale;
} row_norm;

static row_norm norm_of(const rm_qk_rope_kv_args *a, int64_t row, const void *weight,
                        const float *squares, int64_t n_heads) {
  if (!squares) return (row_norm){.weight = weight};
  return (row_norm){weight, a->head_dim, rm_scale_of_heads(a, squares + row * n_heads, n_heads)};
}

// head[0 … n) ← x; up to 16 more floats of it may be written.
VEC void load_head(rm_dtype T, const void *x, int64_t n, float *head) {
  for (int64_t i = 0; i < n; i += RM_LANES) vf_store(head + i, vt_load_n(T, x, i, n - i));
}

// out[0 … n) ← round_T(head).
VEC void put_head(rm_dtype T, const float *head, int64_t n, void *out) {
  for (int64_t i = 0; i < n; i += RM_LANES)
    vt_store_n(T, out, i, vt_round(T, vf_load(head + i)), n - i);
}

// head[0 … n) ← round_T(weight · round_T(head · scale)), if there are weights.
VEC void norm_head(rm_dtype T, const rm_qk_rope_kv_args *a, const row_norm *norm, int64_t index,
                   int64_t n, float *head) {
  if (!norm->weight) return;
  const void *weight = rm_at(T, norm->weight, index * norm->step);
  const vf scale = vf_set1(
      norm->step ? norm->scale : rm_rms_scale(vt_sum_of_squares(RM_F32, head, n), n, a->eps));
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const vf t = vf_mul(vf_load(head + i), scale);
    vf_store(head + i, vt_weighted(T, a->zero_centered, vt_load_n(T, weight, i, n - i), t));
  }
}

// Rotates in place; may read 16 floats past the end of `head`.
VEC void rotate_head(rm_dtype T, const rm_qk_rope_kv_args *a, int64_t row, float *head) {
  const int64_t half = a->rotary_dim / 2;
  const float *cos = a->cos + a->positions[row] * half, *sin = a->sin + a->positions[row] * half;
  for (int64_t i = 0; i < half; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, half - i);
    const vf c = vf_load_n(cos + i, n), s = vf_load_n(sin + i, n);
    const vf lo = vf_load(head + i), hi = vf_load(head + half + i);
    const vf first = vf_add(vt_round(T, vf_mul(lo, c)), vt_round(T, vf_mul(vf_neg(hi), s)));
    const vf second = vf_add(vt_round(T, vf_mul(hi, c)), vt_round(T, vf_mul(lo, s)));
    vt_store_n(RM_F32, head, i, vt_round(T, first), n);
    vt_store_n(RM_F32, head, half + i, vt_round(T, second), n);
  }
}

// out ← the head normed and rotated, in the order of norm_last. `head` is scratch.
VEC void compute_head(rm_dtype T, const rm_qk_rope_kv_args *a, int64_t row, const void *x,
                      const row_norm *norm, int64_t index, float *head, void *out) {
  load_head(T, x, a->head_dim, head);
  if (!a->norm_last) norm_head(T, a, norm, index, a->head_dim, head);
  rotate_head(T, a, row, head);
  if (a->norm_last) norm_head(T, a, norm, index, a->head_dim, head);
  put_head(T, head, a->head_dim, out);
}

VEC int all_finite(rm_dtype T, const void *x, int64_t n) {
  int bad = 0;
  for (int64_t i = 0; i < n; i += RM_LANES) bad |= vf_any_nonfinite(vt_load_n(T, x, i, n - i));
  return !bad;
}

// In both layouts the tiles of 16 positions are adjacent, so that consecutive words of one position
// are 16 words apart.
VEC void store_k(rm_dtype T, void *page, int64_t head_dim, int64_t pos, const void *k) {
  uint32_t *words = rm_at_mut(T, page, rm_packed_index(T, head_dim, pos, 0));
  const int64_t n_words = T == RM_BF16 ? head_dim / 2 : head_dim;
  for (int64_t i = 0; i < n_words; i++)
    memcpy(words + i * RM_N_TILE, (const char *)k + i * 4, sizeof *words);
}

VEC void store_v(rm_dtype T, void *page, int64_t head_dim, int64_t pos, const void *v) {
  const int64_t first = rm_v_index(T, head_dim, pos, 0), step = T == RM_BF16 ? 2 : 1;
  for (int64_t d = 0; d < head_dim; d++) rm_copy_elem(T, page, first + d * step, v, d);
}

// Writes k and v of one head to the row's slot, zeros instead of one that is not finite. `k` may be
// changed; `zeros` is scratch.
VEC void store_head(rm_dtype T, const rm_qk_rope_kv_args *a, int64_t row, int64_t head, void *k,
                    const void *v, float *zeros) {
  const int64_t head_dim = a->head_dim, value_dim = rm_value_dim(a->value_dim, head_dim),
                place = a->slots[row] / a->page_size * a->n_kv_heads + head,
                pos = a->slots[row] % a->page_size;
  const int k_ok = all_finite(T, k, head_dim), v_ok = all_finite(T, v, value_dim);
  if (!k_ok || !v_ok) a->row_flags[row] |= RM_ROW_KV_NONFINITE;
  if (!v_ok) v = memset(zeros, 0, (size_t)value_dim * sizeof *zeros);
  store_v(T, rm_at_mut(T, a->v_cache, place * rm_v_page_elems(a->page_size, value_dim)), value_dim,
          pos, v);
  if (!k_ok) memset(k, 0, (size_t)head_dim * sizeof *zeros);
  store_k(T, rm_at_mut(T, a->k_cache, place * rm_k_page_elems(a->page_size, head_dim)), head_dim,
          pos, k);
}

// A row of latent attention.
VEC void latent_row(rm_dtype T, const rope_job *job, int64_t row, float *head, void *k) {
  const rm_qk_rope_kv_args *a = job->a;
  const int64_t q = a->n_heads * a->q_dim, base = row * (q + a->head_dim), rotary = a->rotary_dim;
  const void *latent = rm_at(T, a->qkv, base + q);
  for (int64_t h = 0; h <= a->n_heads; h++) { // the last is the key
    const int64_t from = base + (h < a->n_heads ? (h + 1) * a->q_dim - rotary : q + a->value_dim);
    void *out = rm_at_mut(T, a->q_out, (row * a->n_heads + h) * a->head_dim);
    load_head(T, rm_at(T, a->qkv, from), rotary, head);
    rotate_head(T, a, row, head);
    put_head(T, head, rotary, h < a->n_heads ? out : k);
  }
  if (a->slots[row] < 0) return;
  void *normed = rm_at_mut(T, k, rotary);
  load_head(T, latent, a->value_dim, head);
  norm_head(T, a, &(row_norm){.weight = a->k_weight}, 0, a->value_dim, head);
  put_head(T, head, a->value_dim, normed);
  store_head(T, a, row, 0, k, normed, head);
}

VEC void rope_row(rm_dtype T, const rope_job *job, int64_t row, float *normed, void *rotated) {
  const rm_qk_rope_kv_args *a = job->a;
  if (a->value_dim) {
    latent_row(T, job, row, normed, rotated);
    return;
  }
  const int64_t head_dim = a->head_dim, base = row * (a->n_heads + 2 * a->n_kv_heads) * head_dim;
  const row_norm q_norm = norm_of(a, row, a->q_weight, a->q_squares, a->all_heads);
  for (int64_t h = 0; h < a->n_heads; h++) {
    compute_head(T, a, row, rm_at(T, a->qkv, base + h * head_dim), &q_norm, h, normed,
                 rm_at_mut(T, a->q_out, (row * a->n_heads + h) * head_dim));
  }
  if (a->slots[row] < 0) return;
  const row_norm k_norm = norm_of(a, row, a->k_weight, a->k_squares, a->all_kv_heads);
  for (int64_t h = 0; h < a->n_kv_heads; h++) {
    const void *v = rm_at(T, a->qkv, base + (a->n_heads + a->n_kv_heads + h) * head_dim);
    compute_head(T, a, row, rm_at(T, a->qkv, base + (a->n_heads + h) * head_dim), &k_norm, h,
                 normed, rotated);
    store_head(T, a, row, h, rotated, v, normed);
  }
}

static void rope_row_of(const void *args, int thread, int64_t row) {
  const rope_job *job = args;
  float *normed = job->workspace + thread * 2 * job->stride;
  SPECIALIZE(job->a->dtype, rope_row(T, job, row, normed, normed + job->stride));
}

static int64_t head_floats(int64_t head_dim) { return rm_round_up(head_dim, RM_LANES) + RM_LANES; }

void RM_FN(qk_rope_kv)(const rm_ctx *ctx, const rm_qk_rope_kv_args *a) {
  const rope_job job = {.a = a, .workspace = ctx->workspace, .stride = head_floats(a->head_dim)};
  rm_each_row(ctx, a->rows, a->rows * (a->n_heads + 4 * a->n_kv_heads) * a->head_dim, rope_row_of,
              &job);
}

size_t RM_FN(rope_workspace)(const rm_limits *l) {
  return (size_t)(l->n_threads * 2 * head_floats(l->head_dim)) * sizeof(float);
}
