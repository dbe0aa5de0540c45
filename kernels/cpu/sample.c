// sample.c: token choice of docs/numerics.md §7, top-logprobs and ranks. A thread takes whole rows.
//
// Without top_k and top_p a row takes two passes over its logits: the maximum, then the sum of
// integer weights, with a partial sum for every 1024 tokens, so that only the part that contains
// the draw is read again.
//
// With top_k or top_p, few of 150,000 tokens matter. The first pass keeps the maximum of every 64
// logits. A radix selection over these maxima gives a lower bound of the true threshold, since more
// tokens can only raise it. Tokens above the bound are collected and selected exactly. If the
// maxima are not enough (a flat distribution), all tokens are collected, with the same result.
//
// Edits are made in a copy of the row. A banned token is a NaN in it: it is never the largest, has
// weight 0 and the lowest key.
#include "philox.h"
#include "variant.h"

enum { PIECE = 1024 };

static const float NO_WEIGHT = -28.0f; // exp of this is below 2^-40

typedef struct sample_job {
  const rm_sample_args *a;
  char *workspace;
  int64_t stride; // bytes of one thread
} sample_job;

typedef struct token_list { // ascending ids
  int32_t *ids;
  uint32_t *keys;
  uint64_t *weights;
  int64_t n;
} token_list;

typedef struct row_view { // one row's work; arrays are carved from the thread's workspace
  const rm_sample_params *params;
  const float *logits; // [vocab], edited, banned ones NaN
  int64_t vocab;
  float max;
  int counts; // whether `kept` is wanted
  int32_t kept; // out: number of tokens left; 0 at first
  float *maxima; // [pieces][16] largest of each lane of a piece
  uint64_t *sums; // [pieces] of weights
  token_list list; // room for [vocab↑1024]
  float *copy; // [vocab↑1024]
} row_view;

static int64_t thread_bytes(int64_t vocab) {
  return rm_round_up(vocab, PIECE) * (int64_t)(8 + 4 + 4 + 4) +
         rm_round_up(vocab, PIECE) / PIECE * (64 + 8) + 64;
}

static row_view carve(const rm_sample_params *params, const float *logits, int64_t vocab,
                      char *memory) {
  const int64_t padded = rm_round_up(vocab, PIECE), pieces = padded / PIECE;
  row_view v = {.params = params, .logits = logits, .vocab = vocab};
  v.list.weights = (uint64_t *)memory;
  v.sums = v.list.weights + padded;
  v.maxima = (float *)(v.sums + pieces);
  v.copy = v.maxima + pieces * RM_LANES;
  v.list.keys = (uint32_t *)(v.copy + padded);
  v.list.ids = (int32_t *)(v.list.keys + padded);
  return v;
}

// --------------------------------------------------------------------------------- parts of a row
// Returns the largest logit, −∞ if there is none, and fills v->maxima.
static float largest(const row_view *v) {
  vf max = vf_set1(-INFINITY);
  for (int64_t from = 0; from < v->vocab; from += PIECE) {
    const int64_t end = rm_min64(from + PIECE, v->vocab);
    vf most = vf_set1(-INFINITY);
    int64_t i = from;
    for (; i + RM_LANES <= end; i += RM_LANES) most = vf_max(vf_load(v->logits + i), most);
    if (i < end)
      most = vf_max(vf_pick(vi_first(end - i), vf_load_n(v->logits + i, end - i), most), most);
    vf_store(v->maxima + from / PIECE * RM_LANES, most);
    max = vf_max(most, max);
  }
  return vf_max16(max) + 0.0f;
}

// The lowest id whose logit is `max`, the largest; −1: none.
static int32_t first_largest(const float *x, int64_t n, float max) {
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const int64_t lanes = rm_min64(RM_LANES, n - i);
    const uint32_t found = vi_lanes(vf_ge(vf_load_n(x + i, lanes), vf_set1(max)));
    if (found & ((1u << lanes) - 1)) return (int32_t)i + __builtin_ctz(found);
  }
  return -1;
}

// Writes the weights of tokens [from, from + n), n ≤ 1024, to out[0 … n↑16); 0 for tokens that fail
// min_p.
static void piece_weights(const row_view *v, int64_t from, int64_t n, uint64_t *out) {
  const vf max = vf_set1(v->max), temperature = vf_set1(v->params->temperature),
           min_p = vf_set1(v->params->min_p);
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const int64_t lanes = rm_min64(RM_LANES, n - i);
    const vf x = vf_add(vf_load_n(v->logits + from + i, lanes), vf_zero());
    const vf d = vf_div(vf_sub(x, max), temperature);
    if (!vi_any(vf_gt(d, vf_set1(NO_WEIGHT)))) { // true for most of a vocabulary
      memset(out + i, 0, RM_LANES * sizeof *out);
      continue;
    }
    vf e = vf_exp(d);
    if (v->params->min_p > 0.0f) e = vf_keep(e, vf_ge(e, min_p));
    float weights[RM_LANES];
    vf_store(weights, vf_keep(e, vi_first(lanes)));
#pragma GCC unroll 1 // so that the compiler makes vectors of it
    for (int j = 0; j < RM_LANES; j++) out[i + j] = rm_token_weight(weights[j]);
  }
}

static uint64_t sum_of(const uint64_t *weights, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) sum += weights[i];
  return sum;
}

// Index of the first of n weights at which the running sum exceeds target; before: the sum of all
// earlier weights.
static int64_t exceeding(const uint64_t *weights, int64_t n, uint64_t before, uint64_t target) {
  int64_t i = 0;
  while (i < n - 1 && (before += weights[i]) <= target) i++;
  return i;
}

static float scaled(const row_view *v, float logit) {
  return (logit + 0.0f - v->max) / v->params->temperature;
}

static float logprob_under(const row_view *v, int32_t token, uint64_t weight, uint64_t total) {
  return weight ? rm_canon(scaled(v, v->logits[token]) - rm_log((float)total * 0x1p-40f))
                : -INFINITY;
}

// ------------------------------------------------------------------------ without top_k and top_p
// Sets v->sums and counts the tokens that are kept. Returns the total weight, of tokens that are
// not banned and pass min_p.
static uint64_t weigh_all(row_view *v) {
  uint64_t piece[PIECE], total = 0;
  for (int64_t from = 0; from < v->vocab; from += PIECE) {
    const int64_t n = rm_min64(PIECE, v->vocab - from);
    piece_weights(v, from, n, piece);
    total += v->sums[from / PIECE] = sum_of(piece, n);
    for (int64_t i = 0; v->counts && i < n; i++) v->kept += piece[i] != 0;
  }
  return total;
}

// Returns the token and its logprob; −1 if all weights are 0.
static int32_t draw_from_all(row_view *v, float *under) {
  uint64_t piece[PIECE];
  const uint64_t total = weigh_all(v);
  if (total == 0) return -1;
  int32_t token = v->params->forced;
  if (token < 0) {
    const uint64_t target = rm_mul_high(total, rm_philox_u64(v->params->seed, v->params->counter));
    uint64_t before = 0;
    int64_t at = 0;
    while (before + v->sums[at] <= target) before += v->sums[at++];
    const int64_t n = rm_min64(PIECE, v->vocab - at * PIECE);
    piece_weights(v, at * PIECE, n, piece);
    token = (int32_t)(at * PIECE + exceeding(piece, n, before, target));
  }
  piece_weights(v, token, 1, piece);
  *under = logprob_under(v, token, piece[0], total);
  return token;
}

// --------------------------------------------------------------------------- with top_k or top_p
typedef struct cut { // keeps tokens with a higher key, and `ties` with this key, lowest ids first
  uint32_t key;
  int64_t ties;
} cut;

// Finds the shortest prefix, in descending key and ascending id, whose measure (a number of tokens,
// or a sum of weights) reaches `need`, which is at most the measure of all. Uses three histograms,
// over 11, 11 and 10 bits of the key.
static cut select_prefix(const token_list *list, uint64_t need, int by_weight) {
  static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
  uint32_t prefix = 0;
  uint64_t above = 0; // measure of the keys known to be higher
  for (int round = 0; round < 3; round++) {
    const int shift = shifts[round];
    const uint32_t digits = (1u << widths[round]) - 1,
                   known = round == 0 ? 0 : ~0u << (shift + widths[round]);
    uint64_t sums[1 << 11] = {0};
    for (int64_t i = 0; i < list->n; i++)
      if ((list->keys[i] & known) == prefix)
        sums[list->keys[i] >> shift & digits] += by_weight ? list->weights[i] : 1;
    uint32_t digit = digits;
    while (digit > 0 && above + sums[digit] < need) above += sums[digit--];
    prefix |= digit << shift;
  }
  cut found = {prefix, 0};
  for (int64_t i = 0; i < list->n && above < need; i++)
    if (list->keys[i] == prefix) {
      above += by_weight ? list->weights[i] : 1;
      found.ties++;
    }
  return found;
}

static void apply(token_list *list, cut c) {
  int64_t n = 0, ties = 0;
  for (int64_t i = 0; i < list->n; i++) {
    if (list->keys[i] < c.key || (list->keys[i] == c.key && ties++ >= c.ties)) continue;
    list->ids[n] = list->ids[i];
    list->keys[n] = list->keys[i];
    list->weights[n++] = list->weights[i];
  }
  list->n = n;
}

// Returns a lower bound of the logit of the prefix's last token, from the maxima alone; −∞ if they
// do not reach `need`.
static float lower_bound(row_view *v, uint64_t need, int by_weight) {
  const int64_t n = rm_round_up(v->vocab, PIECE) / PIECE * RM_LANES;
  token_list *maxima = &v->list; // free until tokens are collected
  uint64_t measure = 0;
  maxima->n = n;
  for (int64_t i = 0; i < n; i++) {
    maxima->keys[i] = rm_order_key(v->maxima[i]);
    maxima->weights[i] = by_weight ? rm_token_weight(rm_exp(scaled(v, v->maxima[i]))) : 1;
    measure += maxima->weights[i];
  }
  if (measure < need) return -INFINITY;
  const cut c = select_prefix(maxima, need, by_weight);
  int64_t i = 0;
  while (maxima->keys[i] != c.key) i++;
  return v->maxima[i];
}

// Collects the tokens with a logit of at least `bound` that have a weight and pass min_p.
static void collect(row_view *v, float bound) {
  token_list *list = &v->list;
  uint64_t weights[RM_LANES];
  list->n = 0;
  for (int64_t i = 0; i < v->vocab; i += RM_LANES) {
    const int64_t lanes = rm_min64(RM_LANES, v->vocab - i);
    const vi above = vf_ge(vf_load_n(v->logits + i, lanes), vf_set1(bound));
    uint32_t left = vi_lanes(above) & ((1u << lanes) - 1);
    if (!left) continue;
    piece_weights(v, i, lanes, weights);
    for (; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (!weights[lane]) continue;
      list->ids[list->n] = (int32_t)(i + lane);
      list->keys[list->n] = rm_order_key(v->logits[i + lane]);
      list->weights[list->n++] = weights[lane];
    }
  }
}

static int32_t draw_filtered(row_view *v, float *under) {
  const rm_sample_params *p = v->params;
  token_list *list = &v->list;
  if (p->top_k > 0 && p->top_k < v->vocab) {
    collect(v, lower_bound(v, (uint64_t)p->top_k, 0));
    if (p->top_k < list->n) apply(list, select_prefix(list, (uint64_t)p->top_k, 0));
    const uint64_t left = sum_of(list->weights, list->n);
    if (p->top_p < 1.0f && left > 0)
      apply(list, select_prefix(list, rm_top_p_need(p->top_p, left), 1));
  } else {
    const uint64_t need = rm_top_p_need(p->top_p, weigh_all(v));
    collect(v, lower_bound(v, need, 1));
    if (list->n > 0) apply(list, select_prefix(list, need, 1));
  }
  const uint64_t total = sum_of(list->weights, list->n);
  if (total == 0) return -1;
  v->kept = (int32_t)list->n; // `collect` takes only tokens with a weight
  int64_t at = 0;
  if (p->forced < 0)
    at = exceeding(list->weights, list->n, 0,
                   rm_mul_high(total, rm_philox_u64(p->seed, p->counter)));
  else
    while (at < list->n && list->ids[at] != p->forced) at++;
  const int32_t token = p->forced < 0 ? list->ids[at] : p->forced;
  *under = logprob_under(v, token, at < list->n ? list->weights[at] : 0, total);
  return token;
}

// ------------------------------------------------------------------------------------------- rows
static void edit(row_view *v) {
  if (v->params->n_banned <= 0 && v->params->n_edits <= 0) return;
  memcpy(v->copy, v->logits, (size_t)v->vocab * sizeof *v->copy);
  for (int32_t i = 0; i < v->params->n_edits; i++) {
    float *logit = v->copy + v->params->edits[i].token;
    *logit = rm_edited_logit(*logit, v->params, v->params->edits + i);
  }
  for (int32_t i = 0; i < v->params->n_banned; i++)
    if (v->params->banned[i] >= 0 && v->params->banned[i] < v->vocab)
      v->copy[v->params->banned[i]] = NAN;
  v->logits = v->copy;
}

static int32_t pick_greedy(row_view *v, float *under) {
  const int32_t likeliest = first_largest(v->logits, v->vocab, v->max);
  v->kept = 1;
  if (likeliest < 0 || v->params->forced < 0) {
    *under = 0.0f;
    return likeliest;
  }
  *under = v->params->forced == likeliest ? 0.0f : -INFINITY;
  return v->params->forced;
}

static void sample_row(const void *args, int thread, int64_t r) {
  const sample_job *job = args;
  const rm_sample_args *a = job->a;
  char *memory = job->workspace + thread * job->stride;
  const rm_sample_params *params = a->params + r;
  const int filtered = (params->top_k > 0 && params->top_k < a->vocab) || params->top_p < 1.0f;
  row_view v = carve(params, a->logits + r * a->ld_logits, a->vocab, memory);
  float under = 0.0f;
  int32_t token = -1;
  v.counts = a->kept != NULL;
  if (!a->row_flags[rm_sampled_row(a, r)]) {
    edit(&v);
    v.max = largest(&v);
    if (params->temperature == 0.0f) token = pick_greedy(&v, &under);
    else token = filtered ? draw_filtered(&v, &under) : draw_from_all(&v, &under);
  }
  rm_put_draw(a, r, token, under, v.kept);
}

void RM_FN(sample)(const rm_ctx *ctx, const rm_sample_args *a) {
  const sample_job job = {.a = a, .workspace = ctx->workspace, .stride = thread_bytes(a->vocab)};
  rm_each_row(ctx, a->rows, a->rows * a->vocab * 3, sample_row, &job);
}

size_t RM_FN(sample_workspace)(const rm_limits *l) {
  return (size_t)(l->n_threads * thread_bytes(l->vocab));
}

// ----------------------------------------------------------------------------------- top logprobs
// A heap: every token is worse than its two children, so the worst is first.
typedef struct top_list {
  int32_t *ids;
  const float *logits;
  int64_t n;
} top_list;

static uint32_t key_at(const top_list *top, int64_t i) {
  return rm_order_key(top->logits[top->ids[i]]);
}

static int is_worse(const top_list *top, int64_t i, int64_t j) {
  const uint32_t a = key_at(top, i), b = key_at(top, j);
  return a != b ? a < b : top->ids[i] > top->ids[j];
}

static void swap_ids(top_list *top, int64_t i, int64_t j) {
  const int32_t id = top->ids[i];
  top->ids[i] = top->ids[j];
  top->ids[j] = id;
}

// Restores the heap when only the token at i may be better than its children: moves it down.
static void sift(top_list *top, int64_t i) {
  for (int64_t child; (child = 2 * i + 1) < top->n; i = child) {
    if (child + 1 < top->n && is_worse(top, child + 1, child)) child++;
    if (is_worse(top, i, child)) return;
    swap_ids(top, i, child);
  }
}

// Replaces the worst token if this one is better. Tokens come in ascending id, so a token with an
// equal logit is worse.
static void offer(top_list *top, int64_t id) {
  if (rm_order_key(top->logits[id]) <= key_at(top, 0)) return;
  top->ids[0] = (int32_t)id;
  sift(top, 0);
}

static void top_row(const rm_top_logprobs_args *a, int64_t r) {
  if (a->k == 0) return;
  top_list top = {.ids = a->ids + r * a->k, .logits = a->logits + r * a->ld_logits, .n = a->k};
  int64_t v = 0;
  for (; v < a->k; v++) top.ids[v] = (int32_t)v;
  for (int64_t i = a->k / 2; i-- > 0;) sift(&top, i);
  for (; v < a->vocab && key_at(&top, 0) == 0; v++)
    offer(&top, v); // lanes cannot be compared with a NaN
  // Few of the rest are better than the worst of the list.
  for (; v + RM_LANES <= a->vocab; v += RM_LANES) {
    const vf worst = vf_set1(top.logits[top.ids[0]]);
    for (uint32_t better = vi_lanes(vf_gt(vf_load(top.logits + v), worst)); better;
         better &= better - 1)
      offer(&top, v + __builtin_ctz(better));
  }
  for (; v < a->vocab; v++) offer(&top, v);
  for (top.n--; top.n > 0; top.n--) { // moves the worst to the end
    swap_ids(&top, 0, top.n);
    sift(&top, 0);
  }
  for (int64_t k = 0; k < a->k; k++)
    a->logprobs[r * a->k + k] = rm_logprob(top.logits[top.ids[k]], a->stats + 2 * r);
}

ROW_OP(top_logprobs, a->rows * a->vocab, top_row(a, r))

// ------------------------------------------------------------------------------------------ ranks
static int32_t rank_of(const float *logits, int64_t vocab, int32_t token) {
  const float mine = logits[token];
  int32_t rank = 0;
  for (int64_t v = 0; v < vocab; v++) rank += logits[v] >= mine; // gcc vectorizes this loop
  return rank;
}

ROW_OP(ranks, a->rows * a->vocab / 4,
       a->ranks[r] = a->tokens[r] < 0
                         ? 0
                         : rank_of(a->logits + r * a->ld_logits, a->vocab, a->tokens[r]))
