// ref_attention.c: the attention recurrence of docs/numerics.md §4, one row, one head, one position
// at a time.
#include "ref.h"

typedef struct head_view { // one query head of one row, and its sequence
  const rm_attention_args *a;
  const void *q; // T [head_dim]
  const int32_t *pages; // block table of the sequence
  int64_t head;
  int64_t kv_head, first, last; // live positions, both included
} head_view;

static int64_t page_of(const head_view *h, int64_t t) {
  return (h->pages[t / h->a->page_size] * h->a->n_kv_heads) + h->kv_head;
}

static float score(const head_view *h, int64_t t) {
  const rm_attention_args *a = h->a;
  const void *page =
      rm_at(a->dtype, a->k_cache, page_of(h, t) * rm_k_page_elems(a->page_size, a->head_dim));
  return rm_softcap(rm_ref_dot(a->dtype, h->q, page, t % a->page_size, a->head_dim) * a->scale,
                    a->softcap);
}

static float value(const head_view *h, int64_t t, int64_t d) {
  const rm_attention_args *a = h->a;
  const int64_t page = page_of(h, t) * rm_v_page_elems(a->page_size, a->value_dim);
  return rm_get(a->dtype, a->v_cache,
                page + rm_v_index(a->dtype, a->value_dim, t % a->page_size, d));
}

// Adds one block of positions [t0, t0 + 32) to the state (m, l, acc) of its split.
static void add_block(const head_view *h, int64_t t0, float *m, float *l, float *acc) {
  const rm_dtype dtype = h->a->dtype;
  float p[RM_ATTN_BLOCK] = {0}, partial[RM_LANES], next = *m;
  const int64_t from = rm_max64(t0, h->first), to = rm_min64(t0 + RM_ATTN_BLOCK - 1, h->last);
  for (int64_t t = from; t <= to; t++) {
    p[t - t0] = score(h, t);
    next = rm_max_f32(p[t - t0], next);
  }
  const float alpha = rm_bits(*m) == rm_bits(-INFINITY) ? 0.0f : rm_exp(*m - next);
  for (int64_t t = from; t <= to; t++) p[t - t0] = rm_exp(p[t - t0] - next);
  for (int j = 0; j < RM_LANES; j++) partial[j] = p[j] + p[j + RM_LANES];
  *l = fmaf(*l, alpha, rm_tree16(partial));
  *m = next;
  for (int j = 0; j < RM_ATTN_BLOCK; j++) p[j] = rm_round_to(dtype, p[j]);
  for (int64_t d = 0; d < h->a->value_dim; d++) {
    float v[RM_ATTN_BLOCK] = {0};
    for (int64_t t = from; t <= to; t++) v[t - t0] = value(h, t, d);
    acc[d] = acc[d] * alpha + rm_ref_values_dot(dtype, p, v);
  }
}

static void one_head(const head_view *h, float *acc, float *merged, void *out) {
  const int64_t value_dim = h->a->value_dim;
  float m_all = 0.0f, l_all = 0.0f;
  const int64_t first_split = h->first / RM_ATTN_SPLIT;
  for (int64_t split = first_split; split <= h->last / RM_ATTN_SPLIT; split++) {
    float m = -INFINITY, l = 0.0f;
    for (int64_t d = 0; d < value_dim; d++) acc[d] = 0.0f;
    const int64_t end = (split + 1) * RM_ATTN_SPLIT;
    for (int64_t t0 = split * RM_ATTN_SPLIT; t0 < end; t0 += RM_ATTN_BLOCK)
      if (t0 + RM_ATTN_BLOCK > h->first && t0 <= h->last) add_block(h, t0, &m, &l, acc);
    if (split == first_split) {
      m_all = m;
      l_all = l;
      memcpy(merged, acc, (size_t)value_dim * sizeof *acc);
      continue;
    }
    const rm_merged all = rm_merge(m_all, l_all, m, l);
    m_all = all.max;
    l_all = all.sum;
    for (int64_t d = 0; d < value_dim; d++) merged[d] = fmaf(merged[d], all.old, acc[d] * all.add);
  }
  const float factor = rm_add_sink(h->a, h->head, m_all, &l_all);
  for (int64_t d = 0; d < value_dim; d++) rm_put(h->a->dtype, out, d, merged[d] * factor / l_all);
}

void rm_attention_ref(const rm_ctx *ctx, const rm_attention_args *a) {
  float *acc = ctx->workspace, *merged = acc + a->value_dim;
  for (int64_t r = 0; r < a->rows; r++)
    for (int64_t head = 0; head < a->n_heads; head++) {
      const int64_t at = r * a->n_heads + head;
      const head_view h = {
          .a = a,
          .q = rm_at(a->dtype, a->q, at * a->head_dim),
          .pages = a->block_tables + a->seq_of_row[r] * a->max_pages,
          .head = head,
          .kv_head = (a->head0 + head) / a->group,
          .first = rm_first_position(a, r),
          .last = a->positions[r],
      };
      one_head(&h, acc, merged, rm_at_mut(a->dtype, a->out, at * a->value_dim));
    }
}
