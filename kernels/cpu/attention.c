// attention.c: paged attention by the recurrence of docs/numerics.md §4. A unit of work is a run of
// rows of one sequence times one kv head: all its query heads (rows × heads per kv head) use each
// block of keys and values while it is in the L1 cache. A page of K is a packed matrix and a page
// of V a k block, so both products are those of the panel's header. On a rank of a mesh the first
// and the last kv head may have fewer query heads than the others, and their units fewer queries.
//
// The softmax of a block runs over all queries of a unit: values with one number per query (maxima,
// alpha, sums) are computed for sixteen queries at once. Queries without a live position in the
// block get P = 0 and alpha = 1, which does not change their state. Threads take units from a
// counter, since contexts differ in length; the result does not depend on which thread takes which.
#include <stdatomic.h>

#include "panel.h"
#include "variant.h"

// Query heads of a unit, unless one row has more.
#ifdef RM_TILES
enum { UNIT_QUERIES = 2 * TILE_ROWS };
#else
enum { UNIT_QUERIES = 24 };
#endif

typedef struct attention_job {
  const rm_attention_args *a;
  int32_t *runs; // [n_runs + 1] first row of each run
  int64_t n_runs;
  float *workspace;
  int64_t stride; // floats of one thread
  _Atomic int64_t next; // the next unit
} attention_job;

// The state of one unit, carved from a thread's workspace; q runs over rows × query heads.
typedef struct unit {
  const rm_attention_args *a;
  int64_t n_q, kv_head;
  int64_t width_k, width_v; // head_dim padded to 32, value_dim to 16
  int64_t farthest; // the last live position of any query
  const int32_t *pages;
  float *queries; // a panel of width_k
  float *scores; // [2][n_q][16] of the two halves of a block
  float *p; // a panel of one block of probabilities
  float *acc, *merged; // [width_v / 16][n_q][16] of the split, of the previous splits
  float *m, *l, *m_all, *l_all; // [n_q↑16]
  float *top, *alpha, *sum; // [n_q↑16] of the block: the new m, its alpha, the sum of its p
  int64_t *first, *last; // [n_q] live positions
} unit;

static int64_t unit_floats(int64_t group, int64_t n_heads, int64_t head_dim) {
  const int64_t n_q = rm_max64(UNIT_QUERIES, rm_min64(group, n_heads));
  const int64_t per_query =
      rm_round_up(head_dim, RM_K_BLOCK) + 2 * RM_ATTN_BLOCK + 2 * rm_round_up(head_dim, RM_N_TILE);
  // 7: m to sum; 4: first and last, which take as much as two floats each.
  return rm_round_up(n_q, RM_LANES) * (per_query + 7 + 4);
}

static unit carve(const rm_attention_args *a, float *memory, int64_t n_q) {
  unit u = {.a = a,
            .n_q = n_q,
            .width_k = rm_round_up(a->head_dim, RM_K_BLOCK),
            .width_v = rm_round_up(a->value_dim, RM_N_TILE)};
  const int64_t lanes = rm_round_up(n_q, RM_LANES);
  float **const per_query[] = {&u.m, &u.l, &u.m_all, &u.l_all, &u.top, &u.alpha, &u.sum};
  u.queries = memory;
  u.scores = u.queries + n_q * u.width_k;
  u.p = u.scores + n_q * RM_ATTN_BLOCK;
  u.acc = u.p + n_q * RM_ATTN_BLOCK;
  u.merged = u.acc + n_q * u.width_v;
  u.first = (int64_t *)(u.merged + n_q * u.width_v);
  u.last = u.first + n_q;
  float *next = (float *)(u.last + n_q);
  for (size_t i = 0; i < sizeof per_query / sizeof *per_query; i++, next += lanes)
    *per_query[i] = next;
  return u;
}

// Index of lanes 16·tile … of a query in scores, acc or merged.
static int64_t lanes_at(const unit *u, int64_t tile, int64_t q) {
  return (tile * u->n_q + q) * RM_LANES;
}

static int is_live(const unit *u, int64_t q, int64_t from, int64_t to) {
  return u->first[q] < to && u->last[q] >= from;
}

static int any_live(const unit *u, int64_t from, int64_t to) {
  if (u->a->window == 0) return from <= u->farthest;
  for (int64_t q = 0; q < u->n_q; q++)
    if (is_live(u, q, from, to)) return 1;
  return 0;
}

static int64_t within(int64_t n) { return n < 0 ? 0 : rm_min64(n, RM_LANES); }

// The lanes whose position, t0 + 16·half + lane, is live for q.
VEC vi live_lanes(const unit *u, int64_t q, int64_t t0, int half) {
  const int64_t base = t0 + half * RM_LANES;
  return vi_sub(vi_first(within(u->last[q] + 1 - base)), vi_first(within(u->first[q] - base)));
}

// Scales, caps and masks the scores of q and sets `top` to the maximum of m and the scores. On
// entry the scores of positions that are not live are undefined.
VEC void mask_scores(unit *u, int64_t q, int64_t t0) {
  const int partly = u->first[q] > t0 || u->last[q] < t0 + RM_ATTN_BLOCK - 1;
  vf top = vf_set1(u->m[q]);
  for (int half = 0; half < 2; half++) {
    float *scores = u->scores + lanes_at(u, half, q);
    vf s = vf_softcap(vf_mul(vf_load(scores), vf_set1(u->a->scale)), u->a->softcap);
    if (partly) s = vf_pick(live_lanes(u, q, t0, half), s, vf_set1(-INFINITY));
    vf_store(scores, s);
    top = vf_max(s, top);
  }
  u->top[q] = vf_max16(top);
}

// Turns masked scores into probabilities and sets `sum` to their sum, unrounded.
VEC void exponentials(rm_dtype T, unit *u, int64_t q, int64_t t0) {
  const int partly = u->first[q] > t0 || u->last[q] < t0 + RM_ATTN_BLOCK - 1;
  vf p[2];
  for (int half = 0; half < 2; half++) {
    p[half] = vf_exp(vf_sub(vf_load(u->scores + lanes_at(u, half, q)), vf_set1(u->top[q])));
    if (partly) p[half] = vf_keep(p[half], live_lanes(u, q, t0, half));
  }
  u->sum[q] = vf_tree16(vf_add(p[0], p[1]));
  store_probabilities(T, u->p + q * block_words(T), p[0], p[1]);
}

// Turns the scores into probabilities and updates m, l and acc. Queries without a live
// position keep their state: their P is 0 and their alpha 1.
VEC void softmax_step(rm_dtype T, unit *u, int64_t t0) {
  for (int64_t q = 0; q < u->n_q; q++) {
    if (is_live(u, q, t0, t0 + RM_ATTN_BLOCK)) mask_scores(u, q, t0);
    else u->top[q] = u->m[q];
  }
  for (int64_t q = 0; q < u->n_q; q += RM_LANES) {
    const vf m = vf_load(u->m + q), top = vf_load(u->top + q), none = vf_set1(-INFINITY);
    vf_store(u->alpha + q, vf_pick(vf_gt(m, none), vf_exp(vf_sub(m, top)), vf_zero()));
    vf_store(u->m + q, top);
  }
  for (int64_t q = 0; q < u->n_q; q++) {
    if (is_live(u, q, t0, t0 + RM_ATTN_BLOCK)) {
      exponentials(T, u, q, t0);
      continue;
    }
    store_probabilities(T, u->p + q * block_words(T), vf_zero(), vf_zero());
    u->alpha[q] = 1.0f;
    u->sum[q] = 0.0f;
  }
  for (int64_t q = 0; q < u->n_q; q += RM_LANES)
    vf_store(u->l + q, vf_fma(vf_load(u->l + q), vf_load(u->alpha + q), vf_load(u->sum + q)));
  for (int64_t q = 0; q < u->n_q; q++)
    for (int64_t tile = 0; u->alpha[q] != 1.0f && tile < u->width_v / RM_LANES; tile++) {
      float *acc = u->acc + lanes_at(u, tile, q);
      vf_store(acc, vf_mul(vf_load(acc), vf_set1(u->alpha[q])));
    }
}

// The page of position t for this kv head, as an index into pages of one head.
static int64_t head_page(const unit *u, int64_t t) {
  return u->pages[t / u->a->page_size] * u->a->n_kv_heads + u->kv_head;
}

// The keys, and below the values, of the 16 positions from t.
VEC const void *keys_at(rm_dtype T, const unit *u, int64_t t) {
  const rm_attention_args *a = u->a;
  return rm_at(T, a->k_cache,
               head_page(u, t) * rm_k_page_elems(a->page_size, a->head_dim) +
                   t % a->page_size * u->width_k);
}
VEC const void *values_at(rm_dtype T, const unit *u, int64_t t) {
  const rm_attention_args *a = u->a;
  return rm_at(T, a->v_cache,
               head_page(u, t) * rm_v_page_elems(a->page_size, a->value_dim) +
                   t % a->page_size * u->width_v);
}

// The hardware prefetcher cannot predict pages, which are not contiguous, and a core has only a few
// requests to its L1 cache in flight. So the next block is fetched into the L2 cache: its keys
// while scores are computed, its values while values are read. These two fetch the block after
// position t.
VEC fetch next_keys(rm_dtype T, const unit *u, int64_t t) {
  t += RM_ATTN_BLOCK;
  return any_live(u, t, t + RM_LANES) ? fetch_all(T, keys_at(T, u, t), 0) : (fetch){0};
}
VEC fetch next_values(rm_dtype T, const unit *u, int64_t t) {
  t += RM_ATTN_BLOCK;
  return any_live(u, t, t + RM_LANES) ? fetch_lines(values_at(T, u, t), tile_bytes(T) / 2, 0)
                                      : (fetch){0};
}

// A unit's first block is not in the cache yet: its values are fetched while scores are computed,
// and the next keys before values are read.
VEC void block_step(rm_dtype T, unit *u, int64_t t0, int is_first) {
  const int64_t step = T == RM_BF16 ? 2 * u->width_v : u->width_v;
  k_block values = {{NULL, NULL}, step};
  memset(u->scores, 0, (size_t)(u->n_q * RM_ATTN_BLOCK) * sizeof *u->scores);
  for (int half = 0; half < 2; half++) {
    const int64_t t = t0 + half * RM_LANES;
    if (!any_live(u, t, t + RM_LANES)) continue; // its page may not exist
    values.half[half] = values_at(T, u, t);
    const fetch soon = is_first ? fetch_all(T, values.half[half], 1) : next_keys(T, u, t);
    tile_dots(T, u->queries, u->n_q, keys_at(T, u, t), u->width_k / RM_K_BLOCK,
              u->scores + lanes_at(u, half, 0), &soon);
  }
  if (!values.half[0]) values.half[0] = values.half[1]; // any finite numbers, since their P is 0
  if (!values.half[1]) values.half[1] = values.half[0];
  softmax_step(T, u, t0);
  for (int half = 0; is_first && half < 2; half++) {
    const fetch keys = next_keys(T, u, t0 + half * RM_LANES);
    for (int64_t b = 0; b < u->width_k / RM_K_BLOCK; b++) fetch_block(&keys, b);
  }
  const fetch soon[2] = {next_values(T, u, t0), next_values(T, u, t0 + RM_LANES)};
  value_dots(T, u->p, u->n_q, &values, u->width_v / RM_N_TILE, u->acc, soon);
}

// Merges a query's state of a split into that of the previous splits, or copies the first.
static void merge_split(unit *u, int64_t q, int is_first) {
  const rm_merged all = is_first ? (rm_merged){.max = u->m[q], .sum = u->l[q]}
                                 : rm_merge(u->m_all[q], u->l_all[q], u->m[q], u->l[q]);
  u->m_all[q] = all.max;
  u->l_all[q] = all.sum;
  for (int64_t tile = 0; tile < u->width_v / RM_LANES; tile++) {
    float *merged = u->merged + lanes_at(u, tile, q);
    const vf acc = vf_load(u->acc + lanes_at(u, tile, q)), added = vf_mul(acc, vf_set1(all.add));
    vf_store(merged, is_first ? acc : vf_fma(vf_load(merged), vf_set1(all.old), added));
  }
}

static void begin_split(unit *u) {
  memset(u->acc, 0, (size_t)(u->n_q * u->width_v) * sizeof *u->acc);
  for (int64_t q = 0; q < u->n_q; q += RM_LANES) {
    vf_store(u->m + q, vf_set1(-INFINITY));
    vf_store(u->l + q, vf_zero());
    vf_store(u->top + q, vf_zero());
    vf_store(u->sum + q, vf_zero());
  }
}

VEC void attend(rm_dtype T, const attention_job *job, float *memory, int64_t row0, int64_t row1,
                int64_t kv_head) {
  const rm_attention_args *a = job->a;
  const int64_t head = rm_max64(0, kv_head * a->group - a->head0); // its first local query head
  const int64_t per = rm_min64((kv_head + 1) * a->group - a->head0, a->n_heads) - head;
  unit u = carve(a, memory, (row1 - row0) * per);
  u.kv_head = kv_head;
  u.pages = a->block_tables + a->seq_of_row[row0] * a->max_pages;
  int64_t first = INT64_MAX, last = 0;
  for (int64_t q = 0; q < u.n_q; q++) {
    u.last[q] = a->positions[row0 + q / per];
    u.first[q] = rm_first_position(a, row0 + q / per);
    first = rm_min64(first, u.first[q]);
    last = rm_max64(last, u.last[q]);
  }
  u.farthest = last;
  for (int64_t r = row0; r < row1; r++)
    for (int64_t h = 0; h < per; h++)
      fill_row(T, u.queries, u.n_q, (r - row0) * per + h,
               rm_at(T, a->q, (r * a->n_heads + head + h) * a->head_dim), a->head_dim);
  begin_products(T, u.n_q);
  for (int64_t from = first / RM_ATTN_SPLIT * RM_ATTN_SPLIT; from <= last; from += RM_ATTN_SPLIT) {
    const int64_t begin = rm_max64(from, first / RM_ATTN_BLOCK * RM_ATTN_BLOCK),
                  end = rm_min64(from + RM_ATTN_SPLIT, last + 1);
    begin_split(&u);
    for (int64_t t0 = begin; t0 < end; t0 += RM_ATTN_BLOCK)
      if (any_live(&u, t0, t0 + RM_ATTN_BLOCK)) block_step(T, &u, t0, t0 <= first);
    for (int64_t q = 0; q < u.n_q; q++)
      if (is_live(&u, q, from, from + RM_ATTN_SPLIT)) merge_split(&u, q, u.first[q] >= from);
  }
  end_products(T);
  if (a->sinks) { // merged like a split without values
    begin_split(&u);
    for (int64_t q = 0; q < u.n_q; q++) {
      u.m[q] = rm_get(T, a->sinks, head + q % per);
      u.l[q] = 1.0f;
      merge_split(&u, q, 0);
    }
  }
  for (int64_t q = 0; q < u.n_q; q++) {
    const int64_t out = ((row0 + q / per) * a->n_heads + head + q % per) * a->value_dim;
    for (int64_t d = 0; d < a->value_dim; d += RM_LANES) {
      const vf sum = vf_load(u.merged + lanes_at(&u, d / RM_LANES, q)),
               y = vf_div(sum, vf_set1(u.l_all[q]));
      vt_store_n(T, a->out, out + d, vt_round(T, y), a->value_dim - d);
    }
  }
}

static void attention_task(void *arg, int thread, int) {
  attention_job *job = arg;
  float *memory = job->workspace + thread * job->stride;
  const int64_t heads = job->a->n_kv_heads, n_units = job->n_runs * heads;
  for (;;) {
    const int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (i >= n_units) return;
    const int32_t *run = job->runs + i / heads;
    SPECIALIZE(job->a->dtype, attend(T, job, memory, run[0], run[1], i % heads));
  }
}

void RM_FN(attention)(const rm_ctx *ctx, const rm_attention_args *a) {
  attention_job job = {.a = a, .runs = ctx->workspace};
  job.workspace = (float *)ctx->workspace + rm_runs_floats(a->rows);
  job.stride = unit_floats(a->group, a->n_heads, a->head_dim);
  // Short enough that a unit has at most UNIT_QUERIES queries.
  const int64_t most = rm_max64(1, UNIT_QUERIES / rm_min64(a->group, a->n_heads));
  int64_t positions = 0;
  job.n_runs = rm_find_runs(a->seq_of_row, a->rows, most, job.runs);
  for (int64_t r = 0; r < a->rows; r++) positions += a->positions[r] + 1 - rm_first_position(a, r);
  rm_parallel(ctx, positions * a->n_heads * a->head_dim / 8, attention_task, &job);
}

size_t RM_FN(attention_workspace)(const rm_limits *l) {
  if (l->n_kv_heads == 0) return 0; // a caller without attention
  return (size_t)(rm_runs_floats(l->max_rows) +
                  l->n_threads * unit_floats(l->group, l->n_heads, l->head_dim)) *
         sizeof(float);
}
